"""Disks that are full, slow or broken: the tier says so, counts it, and goes on."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from forebay.errors import ConfigError, NoSpace, NotWritable
from forebay.tiers.base import LoadJob
from forebay.tiers.fs.device import AlignedBuffer, Device, Expected, Loaded, TempFile
from forebay.tiers.fs.tier import FsTier
from tests.tiers.fs_rig import FsRig, disk_usage
from tests.tiers.support import make_chunk, numbered

BIG = 48 << 10


class Faulty(Device):
    """Fails on demand; class attributes, since the tier makes its device itself."""

    write_errors: list[int] = []  # noqa: RUF012 - one list for all, emptied by each test
    read_errors: list[int] = []  # noqa: RUF012

    def write_all(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        if self.write_errors and sum(len(part) for part in parts) > 70_000:  # not the probe
            number = self.write_errors.pop(0)
            super().write_all(descriptor, [parts[0]], offset)  # a part is written before it goes wrong
            raise OSError(number, os.strerror(number))
        super().write_all(descriptor, parts, offset)

    def read_all(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        if self.read_errors and sum(len(part) for part in parts) > 70_000:
            number = self.read_errors.pop(0)
            raise OSError(number, os.strerror(number))
        return super().read_all(descriptor, parts, offset)


@pytest.fixture
def faulty(rig: FsRig) -> Iterator[type[Faulty]]:
    rig.device = Faulty
    yield Faulty
    Faulty.write_errors.clear()
    Faulty.read_errors.clear()


def test_a_full_disk_costs_old_chunks_and_the_store_is_tried_once_more(rig: FsRig, faulty: type[Faulty]) -> None:
    old = [numbered(i, granule=BIG) for i in range(8)]
    with rig.opened() as driver:
        for chunk in old:
            driver.store(chunk)
        faulty.write_errors[:] = [errno.ENOSPC]
        new = numbered(9, granule=BIG)
        assert driver.store(new).ok
        assert driver.serves(new)
        assert not driver.has(old[0])
        assert driver.has(old[7])
        assert driver.value("disk_full_retries") == 1
        assert driver.value("bytes") == rig.usage()


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "io")])
def test_a_store_that_fails_for_good_leaves_nothing(
    rig: FsRig, faulty: type[Faulty], number: int, reason: str
) -> None:
    chunk = numbered(1, granule=BIG)
    with rig.opened() as driver:
        empty = rig.usage()
        faulty.write_errors[:] = [number, number]
        result = driver.store(chunk)
        assert (result.ok, result.reason) == (False, reason)
        assert driver.value(f"stores_{reason}") == 1
        assert not driver.has(chunk)
        assert driver.value("bytes") == rig.usage() == empty
        faulty.write_errors.clear()
        assert driver.store(chunk).ok
        assert driver.serves(chunk)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_read_error_fails_the_load_and_keeps_the_file(rig: FsRig, faulty: type[Faulty], number: int) -> None:
    chunk = numbered(1, granule=BIG)
    with rig.opened() as driver:
        driver.store(chunk)
        faulty.read_errors[:] = [number]
        assert driver.load(chunk).result.reason == "io"
        assert driver.value("loads_io") == 1
        assert driver.serves(chunk), "the disk has recovered"


@pytest.mark.parametrize("granule", [BIG, BIG + 5])
def test_a_file_system_that_takes_no_direct_io_midway_is_used_without(
    rig: FsRig, faulty: type[Faulty], granule: int
) -> None:
    chunk = numbered(1, granule=granule)
    with rig.opened() as driver:
        if not driver.value("odirect"):
            pytest.skip("this file system has no O_DIRECT")
        faulty.write_errors[:] = [errno.EINVAL]
        assert driver.store(chunk).ok
        faulty.read_errors[:] = [errno.EINVAL]
        assert driver.serves(chunk)
        assert driver.value("odirect_fallbacks") == 2


def test_writes_that_take_only_a_part_are_continued(rig: FsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real_write(fd, [parts[0][:8192]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: real_read(fd, [parts[0][:8192]], at))
    chunk = numbered(1, granule=BIG + 100)
    with rig.opened() as driver:
        assert driver.store(chunk).ok
        assert driver.serves(chunk)
        assert rig.file(chunk).stat().st_size == chunk.length


def test_without_nameless_files_private_names_do(rig: FsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def no_tmpfile(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_tmpfile)
    chunk = numbered(1, granule=BIG)
    with rig.opened() as driver:
        assert driver.store(chunk).ok
        assert list(rig.paths.tmp.iterdir()) == []
        assert driver.serves(chunk)


def test_a_file_that_is_there_without_a_record_is_replaced(rig: FsRig) -> None:
    chunk = make_chunk()
    with rig.opened() as driver:
        driver.until(lambda: driver.value("reconciled") == 1, "the walk")
        rig.file(chunk).parent.mkdir(parents=True)
        rig.file(chunk).write_bytes(b"something else")
        assert driver.store(chunk).ok
        assert driver.serves(chunk)
        assert driver.value("bytes") == rig.usage()


def test_fsync_flushes_each_file_before_it_is_named(rig: FsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fdatasync

    def noted(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", noted)
    chunk = numbered(1, granule=BIG)
    with rig.opened(fsync="file") as driver:
        flushed.clear()
        driver.store(chunk)
        assert flushed == [chunk.length]
    with rig.opened(fsync="none") as driver:
        flushed.clear()
        driver.store(numbered(2, granule=BIG))
        assert flushed == []


def test_fsync_has_the_name_on_the_disk_before_the_store_is_done(
    rig: FsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync
    failing: list[int] = []

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if failing:
            raise OSError(failing.pop(), "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    chunk = numbered(1, granule=BIG)
    with rig.opened(fsync="file") as driver:
        assert driver.store(chunk).ok
        folder = rig.file(chunk).parent
        assert {str(folder), str(folder.parent), str(rig.paths.chunks)} <= set(synced)
        other = numbered(2, granule=BIG)
        failing[:] = [errno.EIO]
        assert driver.store(other).reason == "io"
        assert not rig.file(other).exists(), "what isn't reported as stored is not there"
        assert driver.value("bytes") == rig.usage()
        assert driver.store(other).ok and driver.serves(other)
    synced.clear()
    with rig.opened(fsync="none") as driver:
        assert driver.store(numbered(3)).ok
        assert synced == []


# --- the quota, to the byte --------------------------------------------------------------------------------


class Measuring(Device):
    """Notes what is on the disk at the moment in which it is most: a new file is written, none is named yet."""

    peaks: list[int] = []  # noqa: RUF012 - emptied by the test

    def publish(self, temp: TempFile, path: str) -> None:
        unnamed = temp.disk if not temp.name else 0
        self.peaks.append(disk_usage(self.paths.root) + unnamed)
        super().publish(temp, path)


@pytest.mark.parametrize("granule", [16, 3000, 20_001])
def test_files_under_way_count_against_the_quota(rig: FsRig, granule: int) -> None:
    rig.device = Measuring
    Measuring.peaks.clear()
    quota = 1 << 20
    with rig.opened(quota_bytes=quota, write_threads=1) as driver:
        for i in range(2 * quota // (2 * granule + 8192)):
            assert driver.store(numbered(i, granule=granule)).ok
            assert rig.usage() <= quota
        assert driver.value("evicted") > 10
    assert max(Measuring.peaks) <= quota
    assert max(Measuring.peaks) > 0.9 * quota, "and it is used"


# --- slow disks --------------------------------------------------------------------------------------------


class Gated(Device):
    """Writes, or reads, wait at a gate."""

    write_gate = threading.Event()
    read_gate = threading.Event()
    reading = threading.Event()

    def write(
        self, path: str, block: bytes, payload: memoryview, buffer: AlignedBuffer, *, aligned: bool
    ) -> TempFile:
        assert self.write_gate.wait(20)
        return super().write(path, block, payload, buffer, aligned=aligned)

    def read(
        self, descriptor: int, expected: Expected, payload: memoryview, buffer: AlignedBuffer, *, direct: bool
    ) -> Loaded:
        self.reading.set()
        assert self.read_gate.wait(20)
        return super().read(descriptor, expected, payload, buffer, direct=direct)


@pytest.fixture
def gated(rig: FsRig) -> Iterator[type[Gated]]:
    rig.device = Gated
    for gate in (Gated.write_gate, Gated.read_gate):
        gate.set()
    yield Gated
    for gate in (Gated.write_gate, Gated.read_gate):
        gate.set()


def test_a_full_store_queue_drops_and_counts_and_loads_go_on(rig: FsRig, gated: type[Gated]) -> None:
    chunks = [numbered(i, granule=16384) for i in range(8)]
    with rig.opened(write_queue_bytes=3 * chunks[0].length) as driver:
        driver.store(chunks[0])
        gated.write_gate.clear()
        jobs = [driver.store_job(chunk) for chunk in chunks[1:]]
        driver.engine.begin(jobs)
        driver.until(lambda: len(driver.results) == 1 + 4, "the dropped ones")
        assert {result.reason for result in driver.results[1:]} == {"dropped"}
        assert driver.value("jobs_dropped") == 4
        assert driver.value("write_queue_bytes") == 3 * chunks[0].length
        assert driver.serves(chunks[0]), "a load doesn't wait for stores"
        gated.write_gate.set()
        driver.until(lambda: len([r for r in driver.results if r.id in {j.id for j in jobs}]) == 7, "the rest")


def test_a_load_that_misses_its_deadline_is_late(rig: FsRig, gated: type[Gated]) -> None:
    chunk = make_chunk()
    with rig.opened(read_threads=1) as driver:
        driver.store(chunk)
        gated.read_gate.clear()
        at = [driver.pool.slot(len(chunk.payload)) for _ in range(2)]
        jobs = [LoadJob(driver.next_id(), chunk.id, 0, slot, len(chunk.payload), 0.05) for slot in at]
        driver.engine.begin(jobs)
        time.sleep(0.1)
        gated.read_gate.set()
        ids = {job.id for job in jobs}
        driver.until(lambda: ids <= {result.id for result in driver.results}, "both loads")
        assert {result.reason for result in driver.results if result.id in ids} == {"late"}
        assert set(driver.pool.memory[at[1] : at[1] + len(chunk.payload)]) == {0xEE}, "too late to begin with"


def test_a_chunk_that_is_being_read_is_not_evicted(rig: FsRig, gated: type[Gated]) -> None:
    chunk = numbered(0, granule=BIG)
    with rig.opened(quota_bytes=1 << 20) as driver:
        driver.store(chunk)
        gated.read_gate.clear()
        gated.reading.clear()
        job = LoadJob(driver.next_id(), chunk.id, 0, driver.pool.slot(len(chunk.payload)), len(chunk.payload), 20.0)
        driver.engine.begin([job])
        assert gated.reading.wait(10)
        for i in range(1, 20):
            assert driver.store(numbered(i, granule=BIG)).ok
        assert rig.file(chunk).exists()
        gated.read_gate.set()
        driver.until(lambda: job.id in {result.id for result in driver.results}, "the load")
        assert next(result for result in driver.results if result.id == job.id).ok


def test_two_stores_of_one_chunk_at_once_both_succeed(rig: FsRig, gated: type[Gated]) -> None:
    chunk = numbered(0, granule=BIG)
    with rig.opened(write_threads=4) as driver:
        gated.write_gate.clear()
        jobs = [driver.store_job(chunk) for _ in range(4)]
        driver.engine.begin(jobs)
        time.sleep(0.05)
        gated.write_gate.set()
        driver.until(lambda: len(driver.results) == 4, "all stores")
        assert all(result.ok for result in driver.results)
        assert driver.value("chunks") == 1
        assert driver.value("bytes") == rig.usage()


def test_closing_finishes_what_runs_and_drops_what_waits(rig: FsRig, gated: type[Gated]) -> None:
    driver = rig.open(write_threads=1)
    gated.write_gate.clear()
    jobs = [driver.store_job(numbered(i)) for i in range(4)]
    driver.engine.begin(jobs)
    time.sleep(0.05)
    threading.Timer(0.1, gated.write_gate.set).start()
    tier = rig.tier
    rig.close()
    results = {result.id: result for result in tier.get_finished_jobs()}
    assert results[jobs[0].id].ok
    assert {results[job.id].reason for job in jobs[1:]} == {"dropped"}


# --- at the start ------------------------------------------------------------------------------------------


def test_a_folder_without_a_parent_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotWritable, match="create that first"):
        FsTier("f", {"directory": str(tmp_path / "no" / "such")})


def test_a_file_in_the_directorys_place_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match="choose another"):
        FsTier("f", {"directory": str(tmp_path / "file")})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"quota_bytes": 5}, "quota_bytes"),
        ({"read_threads": 0}, "read_threads"),
        ({"odirect": "maybe"}, "odirect"),
        ({"fsync": "always"}, "fsync"),
        ({"quota": 1 << 30}, "quota"),
        ({"write_queue_bytes": 0}, "write_queue_bytes"),
        ({"quarantine_files": -1}, "quarantine_files"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        FsTier("f", {"directory": str(tmp_path), **options})


def test_an_option_that_there_is_none_of_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'f' has no option 'dir'; it takes directory, quota_bytes, "):
        FsTier("f", {"dir": str(tmp_path)})


class AlwaysFull(Device):
    def write_all(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_the_start_says_what_to_do(rig: FsRig) -> None:
    rig.device = AlwaysFull
    with pytest.raises(NoSpace, match="free some"):
        rig.open()


# --- a disk that is really full ----------------------------------------------------------------------------

_MOUNT = 'mount -t tmpfs -o size=4m none "$1" && exec "$2" -m tests.tiers.full_disk "$1" "$3"'


def can_mount(tmp_path: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=1m none "{tmp_path}"']
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("state", ["inside", "elsewhere"])
def test_a_disk_that_is_smaller_than_the_quota_refuses_and_never_lies(tmp_path: Path, state: str) -> None:
    disk, elsewhere = tmp_path / "disk", tmp_path / "state"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("no right to mount a small file system here")
    folder = str(disk / "fs" / ".state") if state == "inside" else str(elsewhere)
    command = ["unshare", "-m", "sh", "-c", _MOUNT, "sh", str(disk), sys.executable, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all served chunks were right" in done.stdout


