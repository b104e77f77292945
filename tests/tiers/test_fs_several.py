"""Several stores use one directory: what one has, all can serve; what one removes, no other serves; and all together
never take more than the quota."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import AlreadyRunning, NotWritable, ResourceError
from forebay.tiers.base import ChunkId, ClearScope, Query
from forebay.tiers.errors import TierFailed
from forebay.tiers.fs import claims, keeper, neighbours, seating
from forebay.tiers.fs.fsck import check_directory, list_directory
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import Paths, seat_paths
from forebay.tiers.fs.requests import REQUESTS_MAX, Mailbox, Request
from forebay.tiers.fs.tier import FsTier
from tests.tiers.fs_several import Several, Watchman, told, used
from tests.tiers.support import NAMESPACE, ROOT, Driver, Pool, make_chunk, numbered

BIG = 48 << 10

Make = Callable[..., Several]


@pytest.fixture
def make(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(neighbours, "POLL_S", 0.01)
    monkeypatch.setattr(keeper, "FLUSH_S", 0.02)
    made: list[Several] = []

    def several(**options: Any) -> Several:
        made.append(Several(pool, tmp_path, **options))
        return made[-1]

    yield several
    for one in made:
        one.shut()


@pytest.fixture(params=["flock", "heartbeat"])
def several(make: Make, request: pytest.FixtureRequest) -> Several:
    return make(liveness=request.param, quota_bytes=8 << 20)


def two(several: Several) -> tuple[Driver, Driver]:
    first, second = several.open(0), several.open(1)
    several.settled(2)
    return first, second


@contextmanager
def nobody_reads(several: Several) -> Iterator[None]:
    """Neither of two stores looks at the other meanwhile, nor is still about to."""
    quiet: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours.Neighbours, "turn", lambda self: quiet.add(id(self)))
        several.until(lambda: len(quiet) == 2, "the last looks")
        yield


# --- what one has, all can serve ---------------------------------------------------------------------------


def test_a_chunk_of_one_store_is_found_by_the_other_by_its_name_alone(make: Make) -> None:
    several = make(quota_bytes=8 << 20)
    first, second = two(several)
    chunks = [numbered(i) for i in range(3)]
    with nobody_reads(several):
        for chunk in chunks:
            assert first.store(chunk).ok
        found = second.lookup(*[chunk.query() for chunk in chunks])
        assert [answer.outcome for answer in found] == ["hit"] * 3
        assert all(second.serves(chunk) for chunk in chunks)
        assert second.value("neighbour_asked") == 3
        assert not second.has(numbered(77))


def test_what_was_not_looked_for_is_not_said_to_be_missing(make: Make) -> None:
    """Behind one that isn't there: whoever asks for single chunks can do with the others."""
    several = make(quota_bytes=8 << 20)
    first, second = two(several)
    chunk, lost = numbered(1), numbered(2)
    with nobody_reads(several):
        assert first.store(chunk).ok
        found = second.lookup(lost.query(), chunk.query())
        assert [answer.outcome for answer in found] == ["miss", "away"]
        assert second.serves(chunk)


def test_what_is_stored_here_is_told_there_and_serves_partial_matches(several: Several) -> None:
    first, second = two(several)
    chunk = make_chunk([*range(16), *range(100, 116)], granule=20_000)
    assert first.store(chunk).ok
    several.until(lambda: second.value("neighbour_chunks") == 1, "the news")
    other = make_chunk([*range(16), *range(200, 216)], granule=20_000)
    query = Query(0, other.header.key, ROOT, other.header.tokens)
    (found,) = second.lookup(query)
    assert (found.outcome, found.key, found.matched) == ("hit", chunk.header.key, 16)
    (change,) = told(second, chunk)
    assert change.stored and change.header
    assert second.serves(chunk)


def test_what_was_there_before_is_found_too(several: Several) -> None:
    chunks = [numbered(i) for i in range(20)]
    first = several.open(0)
    for chunk in chunks:
        assert first.store(chunk).ok
    second = several.open(1)
    several.settled(2)
    assert all(second.serves(chunk) for chunk in chunks)
    assert {change.chunk for change in second.changes if change.stored} == {chunk.id for chunk in chunks}
    assert second.value("bytes_stored") == 0, "it is the other's, and counted there"


def test_one_chunk_is_stored_once(several: Several) -> None:
    first, second = two(several)
    chunk = numbered(1, granule=BIG)
    assert first.store(chunk).ok and second.store(chunk).ok
    assert several.file(0, chunk).exists() and not several.file(1, chunk).exists()
    assert second.value("stores_elsewhere") == 1


def test_two_copies_of_one_chunk_are_one_to_the_daemon(several: Several) -> None:
    first, second = two(several)
    chunk = numbered(1)
    assert first.store(chunk).ok
    several.until(lambda: len(told(second, chunk)) == 1, "the news")
    several.file(1, chunk).parent.mkdir(parents=True, exist_ok=True)
    several.file(1, chunk).write_bytes(several.file(0, chunk).read_bytes())
    several.tier(1)._shelf.adopt(chunk.id)  # both had begun before either had told
    first.engine.forget([chunk.id], "cleared")
    several.until(lambda: not several.file(0, chunk).exists(), "the file to go")
    several.until(lambda: several.tier(1)._neighbours.place(chunk.id) is None, "the news")
    assert [change.stored for change in told(second, chunk)][:1] == [True]
    assert not second.has(chunk) or second.serves(chunk)


# --- what one removes, no other serves -----------------------------------------------------------------------


def test_what_one_evicts_is_a_miss_for_the_other_which_learns_of_it(several: Several) -> None:
    first, second = two(several)
    chunk = numbered(0, granule=BIG)
    first.store(chunk)
    several.until(lambda: second.has(chunk), "the news")
    for i in range(1, 80):
        assert first.store(numbered(i, granule=BIG)).ok
    assert not several.file(0, chunk).exists()
    assert not second.serves(chunk)
    several.until(lambda: not second.has(chunk), "the news")
    assert [change.stored for change in told(second, chunk)] == [True, False]


def test_a_load_whose_file_was_removed_a_moment_ago_is_a_miss(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    several = make(quota_bytes=8 << 20)
    first, second = two(several)
    chunk = numbered(0)
    first.store(chunk)
    several.until(lambda: second.has(chunk), "the news")
    several.file(0, chunk).unlink()
    assert second.load(chunk).result.reason == "missing"
    assert not second.has(chunk)


@pytest.mark.parametrize("by", ["namespace", "tenant", "prefix", "everything"])
def test_a_clear_reaches_what_others_have_stored(several: Several, by: str) -> None:
    first, second = two(several)
    front = make_chunk(range(32), tenant="a")
    behind = make_chunk(range(32, 64), tenant="a", parent=front.header.key, start=32)
    other = make_chunk(range(500, 532), namespace=b"o" * 32, tenant="b")
    for chunk in (front, behind, other):
        first.store(chunk)
    several.until(lambda: all(second.has(chunk) for chunk in (front, behind, other)), "the news")
    scope = {
        "namespace": ClearScope(NAMESPACE), "tenant": ClearScope(b"", "a"), "everything": ClearScope(),
        "prefix": ClearScope(NAMESPACE, None, 1, ROOT, 0, front.header.tokens[:64]),
    }[by]  # fmt: skip
    count = second.engine.clear_scope(scope)
    gone = [front, behind, other] if by == "everything" else [front, behind]
    assert count == len(gone)
    assert not any(second.serves(chunk) or second.has(chunk) for chunk in gone)
    several.until(lambda: not any(several.file(0, chunk).exists() for chunk in gone), "the files to go")
    several.until(lambda: not any(first.has(chunk) for chunk in gone), "the other store to know")
    assert all(second.serves(chunk) and first.serves(chunk) for chunk in [front, behind, other] if chunk not in gone)
    several.until(lambda: not any(several.paths(0).requests.iterdir()), "the request to be done")


def test_a_clear_reaches_what_is_not_known_here_yet_and_what_a_dead_store_left(make: Make) -> None:
    several = make(quota_bytes=8 << 20, takeover_s=60.0)
    first, second = two(several)
    known, unknown = numbered(1), numbered(2)
    first.store(known)
    several.until(lambda: second.has(known), "the news")
    with nobody_reads(several):
        first.store(unknown)
        several.die(0)
        second.engine.clear(b"")
        assert not second.has(known) and not second.has(unknown), "found by its name, if it weren't asked to be cleared"
        assert not second.serves(unknown)
    again = several.open(0)
    several.until(lambda: not again.has(known) and not again.has(unknown), "the request")
    assert not again.serves(unknown)


def test_requests_beyond_the_cap_become_one_that_clears_the_seat(tmp_path: Path) -> None:
    box = Mailbox(tmp_path / "requests", "t")
    for i in range(3 * REQUESTS_MAX):
        box.leave(Request(scope=ClearScope(bytes([i]) * 32)))
        assert len(list((tmp_path / "requests").iterdir())) <= REQUESTS_MAX
    assert box.covers(make_chunk(namespace=b"\x01" * 32).header)
    assert box.covers(make_chunk(namespace=b"z" * 32).header)
    for received in list(box.waiting()):
        box.done(received.name)
    assert not box.covers(make_chunk().header)
    (tmp_path / "requests" / "torn").write_bytes(b"\xc1")
    assert box.covers(make_chunk().header), "better too much than too little"
    for _ in range(20):
        box.leave_gone([make_chunk().id] * 200, "evicted")
    assert len(list((tmp_path / "requests").iterdir())) <= REQUESTS_MAX


def test_a_damaged_file_of_another_store_is_moved_aside_there(several: Several) -> None:
    first, second = two(several)
    chunk = numbered(1)
    first.store(chunk)
    several.until(lambda: second.has(chunk), "the news")
    data = bytearray(several.file(0, chunk).read_bytes())
    data[5000] ^= 1
    several.file(0, chunk).write_bytes(data)
    assert second.load(chunk).result.reason == "corrupt"
    assert not several.file(0, chunk).exists() and len(list(several.paths(0).quarantine.iterdir())) == 1
    assert not second.has(chunk)
    several.until(lambda: not first.has(chunk), "the other store to know")
    assert second.store(chunk).ok and first.serves(chunk)


def test_what_others_load_is_not_taken_for_unused(several: Several) -> None:
    first, second = two(several)
    loaded, idle = numbered(0, granule=BIG), numbered(1, granule=BIG)
    first.store(loaded)
    first.store(idle)
    for i in range(2, 30):
        first.store(numbered(i, granule=BIG))
    assert second.serves(loaded)
    several.until(lambda: first.value("used_elsewhere") == 1, "the news")
    for i in range(30, 40):
        first.store(numbered(i, granule=BIG))
    assert first.serves(loaded) and not first.serves(idle)


# --- the quota -----------------------------------------------------------------------------------------------


def test_all_together_never_take_more_than_the_quota(several: Several) -> None:
    quota = several.options["quota_bytes"]
    first = several.open(0)
    watchman = Watchman(several.directory)
    for i in range(80):
        assert first.store(numbered(i, granule=BIG)).ok
    second = several.open(1)
    for i in range(100, 140):
        second.store(numbered(i, granule=BIG))
        first.store(numbered(1000 + i, granule=BIG))
    several.settled(2)
    for i in range(200, 260):
        assert second.store(numbered(i, granule=BIG)).ok, "it has its part by now"
        assert first.store(numbered(1000 + i, granule=BIG)).ok
    third = several.open(2)
    several.settled(3)
    for i in range(300, 340):
        assert third.store(numbered(i, granule=BIG)).ok
        assert second.store(numbered(1000 + i, granule=BIG)).ok
    most = watchman.stop()
    assert most <= quota, f"{most - quota} bytes too many"
    assert most > 0.8 * quota, "and it is used"
    for number in several.rigs:
        own = used(several.paths(number).chunks)
        assert several.tier(number).statistics().values["bytes_stored"] == own, "each byte is counted once"


def test_who_stays_alone_gets_everything_back(several: Several) -> None:
    first, _ = two(several)
    part = first.value("bytes_quota")
    several.die(1)
    several.hasten(0)
    several.until(lambda: first.value("bytes_quota") > 1.9 * part, "the other part")
    assert first.value("stores") == 1


# --- death, and what is left -----------------------------------------------------------------------------------


def test_what_a_dead_store_left_comes_to_another_with_the_room_that_it_takes(several: Several) -> None:
    first, second = two(several)
    quota = several.options["quota_bytes"]
    mine, theirs = [numbered(i, granule=BIG) for i in range(15)], [numbered(50 + i, granule=BIG) for i in range(15)]
    for here, there in zip(mine, theirs, strict=True):
        assert first.store(here).ok and second.store(there).ok
    several.until(lambda: second.value("neighbour_chunks") == 15, "the news")
    unfinished = several.paths(0).tmp / "77-1"
    unfinished.write_bytes(bytes(100_000))
    living = several.paths(1).tmp / "78-1"
    living.write_bytes(b"")
    watchman = Watchman(several.directory)
    several.die(0)
    several.hasten(1)
    assert second.serves(mine[0]), "a dead store's chunks are served all the same"
    several.until(lambda: second.value("estates") == 1, "the estate")
    assert all(second.serves(chunk) for chunk in mine + theirs)
    assert not unfinished.exists() and living.exists()
    several.until(lambda: second.value("bytes_quota") > 0.9 * quota, "its part")
    assert second.value("bytes_stored") == used(several.paths(1).chunks)
    removed = [change.chunk for change in second.changes if not change.stored]
    assert removed == [], "they were there all the time"
    assert watchman.stop() <= quota
    several.hasten(1, 30.0)
    again = several.open(0)
    several.settled(2)
    assert all(again.serves(chunk) for chunk in mine + theirs)


def test_a_store_that_comes_back_in_time_keeps_its_seat_and_its_manifest(make: Make) -> None:
    several = make(quota_bytes=8 << 20, takeover_s=60.0)
    first, second = two(several)
    chunk = numbered(1)
    first.store(chunk)
    several.die(0)
    again = several.open(0)
    assert several.tier(0)._seat.number == 0
    assert not several.tier(0)._rebuilt
    assert again.serves(chunk) and second.serves(chunk)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_who_fails_while_sitting_down_leaves_the_seat_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    options = FsOptions(directory=str(tmp_path / "files"), quota_bytes=8 << 20)
    if shared:
        first, second = seating.take_seat(options), seating.take_seat(options)
        os.close(first.lock)
        os.close(second.lock)
    asked = 0

    def fails_once_locked(*arguments: object) -> bool:
        nonlocal asked
        asked += 1
        if asked == 1 and not shared:
            return False
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patched:
        if shared:
            patched.setattr(claims.Claims, "change", fails_once_locked)
        else:
            patched.setattr(claims.Claims, "exists", fails_once_locked)
        with pytest.raises(NotWritable) as refused:
            seating.take_seat(options)
    again = seating.take_seat(options)  # while the error and all that it refers to are still alive
    assert (again.number, again.shared) == (0, shared), refused.value
    os.close(again.lock)


def test_each_store_finds_its_own_seat_again(several: Several) -> None:
    first, second = two(several)
    here, there = numbered(1), numbered(2)
    first.store(here)
    second.store(there)
    several.close(0)
    several.close(1)
    several.open(1)
    assert several.tier(1)._seat.number == 1 and not several.tier(1)._rebuilt
    several.open(0)
    assert several.tier(0)._seat.number == 0 and not several.tier(0)._rebuilt
    assert several.file(0, here).exists() and several.file(1, there).exists()


def test_an_heir_that_dies_is_followed_by_another(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    several = make(quota_bytes=12 << 20)
    for number in range(3):
        several.open(number)
    several.settled(3)
    chunks = [numbered(i, granule=BIG) for i in range(30)]
    for i, chunk in enumerate(chunks):
        assert several.rigs[i % 2].driver.store(chunk).ok  # type: ignore[union-attr]
    monkeypatch.setattr(neighbours, "WORK_S", 0.0)  # nobody gets far
    several.die(0)
    several.until(
        lambda: any(several.tier(n)._neighbours._moving is not None for n in (1, 2)), "an heir"
    )
    heir = next(n for n in (1, 2) if several.tier(n)._neighbours._moving is not None)
    several.die(heir)
    monkeypatch.setattr(neighbours, "WORK_S", 0.05)
    (last,) = several.rigs
    several.until(lambda: several.tier(last).statistics().values.get("estates") == 2, "both estates")
    driver = several.rigs[last].driver
    assert driver is not None and all(driver.serves(chunk) for chunk in chunks)
    assert used(several.directory) <= 12 << 20


def test_who_stood_still_for_too_long_publishes_nothing_and_starts_anew(make: Make) -> None:
    several = make(quota_bytes=8 << 20, liveness="heartbeat")
    first, second = two(several)
    kept = numbered(1)
    first.store(kept)
    tier = several.tier(0)
    tier._neighbours._looking.acquire()
    still = threading.Event()
    turn, tier._neighbours.turn = tier._neighbours.turn, lambda: still.wait(20)  # type: ignore[method-assign]
    several.hasten(1)
    tier._neighbours._dead_after_s = 0.3
    several.until(lambda: second.value("estates") == 1, "the others to take it for dead")
    result = first.store(numbered(2))
    assert not result.ok, "nobody would count its bytes"
    tier._neighbours.well = tier._shelf.well = lambda: True  # type: ignore[method-assign]
    assert not first.store(numbered(3)).ok, "its folder is gone, too"
    assert [path.name for path in several.directory.rglob("*-00")] == [several.file(0, kept).name]
    tier._neighbours.turn = turn  # type: ignore[method-assign]
    still.set()
    tier._neighbours._looking.release()
    end = time.monotonic() + 60
    while tier._outbox.failure is None and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(TierFailed, match="taken over"):
        tier.get_finished_jobs()
    several.close(0)
    several.hasten(1, 30.0)
    again = several.open(0)
    several.settled(2)
    assert again.serves(kept) and second.serves(kept)
    assert again.store(numbered(4)).ok


# --- who may come ------------------------------------------------------------------------------------------------


def test_two_stores_with_one_state_directory_are_refused(several: Several) -> None:
    several.open(0)
    with pytest.raises(AlreadyRunning, match="state_dir of its own"):
        FsTier("f", {"directory": str(several.directory), "state_dir": str(several.folder / "state-0")})


def test_without_state_directories_each_seat_has_its_own(make: Make, pool: Pool) -> None:
    several = make()
    options = {"directory": str(several.directory), "quota_bytes": 8 << 20}
    first, second = FsTier("f", options), FsTier("f", options)
    assert first._state_path == several.directory / ".state"
    assert second._state_path == several.directory / "seats" / "1" / ".state"
    first.close()
    second.close()
    again = FsTier("f", options)
    assert again._seat.number == 0 and not again._rebuilt
    again.close()


def test_one_store_too_many_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seating, "SEATS_MAX", 2)
    several = make()
    several.open(0)
    several.open(1)
    with pytest.raises(ResourceError, match="directory of its own"):
        several.open(2)
    several.rigs.pop(2)


def test_a_damaged_table_is_written_anew(several: Several) -> None:
    first, second = two(several)
    newest = max((several.directory / "claims").iterdir())
    newest.write_bytes(b"{")
    several.until(lambda: len(several.tier(0)._seat.claims.read().seats) == 2, "both to enter themselves again")
    several.settled(2)
    chunk = numbered(1)
    assert first.store(chunk).ok and second.serves(chunk)


# --- looking from outside ----------------------------------------------------------------------------------------


def test_fsck_and_the_listing_see_all_seats(several: Several) -> None:
    first, second = two(several)
    chunks = [numbered(i) for i in range(4)]
    for chunk in chunks:
        (first if chunk in chunks[:2] else second).store(chunk)
    spoiled = several.file(1, chunks[3])
    data = bytearray(spoiled.read_bytes())
    data[5000] ^= 1
    spoiled.write_bytes(data)
    report = check_directory(several.directory, repair=True)
    assert (report.files, report.chunks, report.problem_count, report.in_use) == (4, 3, 1, True)
    assert report.problems[0].path == str(spoiled) and report.problems[0].repaired
    assert not spoiled.exists()
    unfinished = several.paths(1).tmp / "77-1"
    unfinished.write_bytes(b"")
    check_directory(several.directory, repair=True)
    assert unfinished.exists(), "its store lives"
    several.close(1)
    assert unfinished.exists()
    check_directory(several.directory, repair=True)
    assert not unfinished.exists()
    listed = {ChunkId(item.header.group, item.header.key) for item in list_directory(several.directory)}
    assert listed == {chunk.id for chunk in chunks[:3]}


def test_a_seats_paths_are_in_its_own_folder(tmp_path: Path) -> None:
    assert seat_paths(tmp_path, 0) == Paths(tmp_path)
    assert os.path.relpath(seat_paths(tmp_path, 3).chunks, tmp_path) == "seats/3/chunks"
