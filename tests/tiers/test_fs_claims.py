"""The table of the quota's parts, the journal of a seat, and who counts as alive, each on its own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from forebay.errors import NotWritable
from forebay.tiers.base import ChunkId
from forebay.tiers.fs import journal
from forebay.tiers.fs.claims import VERSIONS_KEPT, Claim, Claims, Table
from forebay.tiers.fs.journal import BUFFER_MAX, CAME, FILE_ENTRIES_MAX, LEFT, USED, Journal, Note, end_of, read_on
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.presence import Onlooker, Pulse, Signs, file_system, is_locked, signs_for

# --- the table -----------------------------------------------------------------------------------------------


def take(claims: Claims, number: int, size: int, quota: int) -> Table:
    """Enter a seat with as much as is free, at most `size`."""

    def edit(seats: dict[int, Claim]) -> dict[int, Claim]:
        held = seats.pop(number, Claim(0, quota, claims.token)).held
        free = quota - Table(seats).claimed - held
        return {**seats, number: Claim(held + min(size, free), quota, claims.token)}

    return claims.change(edit)


def test_changes_of_many_at_once_are_all_made_one_after_the_other(tmp_path: Path) -> None:
    quota, failed = 1000, []

    def work(number: int) -> None:
        try:
            claims = Claims(tmp_path / "claims", f"t{number}")
            for _ in range(25):
                table = take(claims, number, 7, quota)
                assert table.claimed <= quota
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    table = Claims(tmp_path / "claims", "t").read()
    # More if a change was so slow that nobody remembers it: then it is made again, which its maker is told of.
    assert table.claimed == quota and table.version >= 150
    assert {claim.token for claim in table.seats.values()} == {f"t{number}" for number in range(6)}
    assert len(list((tmp_path / "claims").iterdir())) <= VERSIONS_KEPT + 1


def test_a_version_that_was_long_passed_by_is_not_the_newest(tmp_path: Path) -> None:
    slow, fast = Claims(tmp_path / "claims", "slow"), Claims(tmp_path / "claims", "fast")
    take(fast, 0, 1, 1000)
    began = []

    def edit(seats: dict[int, Claim]) -> dict[int, Claim]:
        if not began:  # others make many versions between its look and its link
            began.append(seats)
            for _ in range(3 * VERSIONS_KEPT):
                take(fast, 0, 1, 1000)
        return {**seats, 1: Claim(5, 1000, "slow")}

    table = slow.change(edit)
    assert table.seats[0].held == 1 + 3 * VERSIONS_KEPT, "nothing of it is lost"
    assert Claims(tmp_path / "claims", "x").read() == table
    assert (table.version, list(table.seats)) == (2 + 3 * VERSIONS_KEPT, [0, 1])


def test_leftovers_of_a_dead_process_can_be_removed_and_garbage_counts_as_empty(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims", "t")
    assert not claims.exists() and claims.read() == Table({})
    take(claims, 0, 10, 1000)
    (tmp_path / "claims" / "new-dead-0").write_bytes(b"{")
    claims.forget("dead")
    assert not (tmp_path / "claims" / "new-dead-0").exists()
    (tmp_path / "claims" / f"{2:012d}").write_bytes(msgspec.json.encode([1]))
    assert claims.read() == Table({}, 2)
    assert take(claims, 0, 10, 1000).version == 3
    assert claims.change(lambda seats: None).version == 3


def test_a_file_system_without_hard_links_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(NotWritable, match="only one store"):
        take(Claims(tmp_path / "claims", "t"), 0, 1, 10)
    assert list((tmp_path / "claims").iterdir()) == []


# --- the journal ---------------------------------------------------------------------------------------------


def chunk(number: int) -> ChunkId:
    return ChunkId(number % 256, number.to_bytes(32, "little"))


def test_a_reader_gets_every_entry_once_across_files(tmp_path: Path) -> None:
    writer = Journal(tmp_path)
    writer.note(chunk(0), USED)
    assert writer.waiting == 0, "nobody reads"
    writer.open()
    place = end_of(tmp_path)
    assert place is not None
    seen: list[Note] = []
    for number in range(3 * FILE_ENTRIES_MAX):
        writer.note(chunk(number), CAME if number % 3 else LEFT)
        if number % 100 == 99:
            writer.flush()
            news = read_on(tmp_path, place)
            assert not news.lost and news.place is not None
            seen, place = seen + news.notes, news.place
    assert seen == [Note(chunk(number), CAME if number % 3 else LEFT) for number in range(len(seen))]
    assert len(seen) == 3 * FILE_ENTRIES_MAX
    assert len(list(tmp_path.iterdir())) <= 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 64 << 10
    assert read_on(tmp_path, place).notes == []


def test_a_reader_who_was_away_for_too_long_is_told_so(tmp_path: Path) -> None:
    writer = Journal(tmp_path)
    writer.open()
    place = end_of(tmp_path)
    assert place is not None
    for number in range(4 * FILE_ENTRIES_MAX):
        writer.note(chunk(number), USED)
        if number % 300 == 0:
            writer.flush()
    news = read_on(tmp_path, place)
    assert news.lost and news.place == end_of(tmp_path)
    writer.open()
    assert news.place is not None and read_on(tmp_path, news.place).lost, "another process writes it now"


def test_a_full_buffer_begins_the_journal_anew(tmp_path: Path) -> None:
    writer = Journal(tmp_path)
    writer.open()
    place = end_of(tmp_path)
    assert place is not None
    for number in range(BUFFER_MAX + 5):
        writer.note(chunk(number), USED)
    assert writer.waiting == BUFFER_MAX
    writer.flush()
    assert read_on(tmp_path, place).lost and writer.waiting == 0


def test_a_write_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Journal(tmp_path)
    writer.open()
    place = end_of(tmp_path)
    assert place is not None
    writer.note(chunk(1), USED)
    real = os.pwrite

    def partly(descriptor: int, data: bytes, offset: int) -> int:
        real(descriptor, data[:10], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "pwrite", partly)
        with pytest.raises(OSError, match="No space"):
            writer.flush()
    assert read_on(tmp_path, place).notes == []
    writer.flush()
    assert read_on(tmp_path, place).notes == [Note(chunk(1), USED)]


# --- who is alive --------------------------------------------------------------------------------------------


def test_a_beat_that_stands_still_on_our_own_clock_is_a_dead_ones(tmp_path: Path) -> None:
    now = [100.0]
    paths = Paths(tmp_path)
    pulse = Pulse(paths, "t")
    onlooker = Onlooker(Signs(flock=False, beat=True), 10.0, clock=lambda: now[0])
    pulse.beat()
    for _ in range(5):
        assert onlooker.alive(0, paths)
        now[0] += 9.0
        pulse.beat()
    now[0] += 9.0
    assert onlooker.alive(0, paths), "the last beat is seen only now"
    now[0] += 9.0
    assert onlooker.alive(0, paths)
    now[0] += 2.0
    assert not onlooker.alive(0, paths)
    now[0] += 5.0
    assert not onlooker.alive(0, paths) and onlooker.dead_for_s(0) == 5.0
    pulse.beat()
    assert onlooker.alive(0, paths) and onlooker.dead_for_s(0) == 0.0


def test_a_lock_is_let_go_by_the_kernel_when_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.touch()
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); print('x', flush=True); "
    child = subprocess.Popen([sys.executable, "-c", code + "sys.stdin.read()", str(path)], stdin=-1, stdout=-1)
    assert child.stdout is not None and child.stdout.read(1) == b"x"
    assert is_locked(path)
    child.kill()
    child.wait(10)
    assert not is_locked(path)
    assert not is_locked(tmp_path / "none")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not is_locked(path), "somebody else is only looking, too"


def test_locks_are_trusted_on_local_file_systems_only(tmp_path: Path) -> None:
    assert file_system(Path("/proc")) == "proc"
    assert file_system(tmp_path) != ""
    assert signs_for("auto", Path("/proc")) == Signs(flock=True, beat=True)
    assert signs_for("heartbeat", tmp_path) == Signs(flock=False, beat=True)
    assert signs_for("flock", tmp_path) == Signs(flock=True, beat=False)
