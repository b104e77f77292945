"""A tier's process may be killed at any instant, and nothing torn or uncounted is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from forebay.tiers.base import JobResult, StoreJob
from forebay.tiers.fs.device import Device, TempFile
from forebay.tiers.fs.fsck import check_directory
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.tier import FsTier
from forebay.tiers.host import TierHost
from forebay.tiers.supervise import Patience
from tests.tiers.fs_rig import FsRig, disk_usage
from tests.tiers.support import Made, Pool, numbered

BIG = 48 << 10
QUOTA = 4 << 20


class DyingDevice(Device):
    """Dies at a point that the directory's name tells, once there is a file named `arm` beside it."""

    def _die_at(self, point: str, path: str) -> None:
        root = self.paths.root
        is_chunk = path.startswith(str(self.paths.chunks))  # and not the file that a start tries the disk with
        if is_chunk and root.name == point and (root.parent / "arm").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def publish(self, temp: TempFile, path: str) -> None:
        self._die_at("before-naming", path)
        super().publish(temp, path)
        self._die_at("after-naming", path)

    def remove(self, path: str) -> None:
        self._die_at("before-unlinking", path)
        super().remove(path)
        self._die_at("after-unlinking", path)


class DyingTier(FsTier):
    """A file tier on such a device."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        def device(paths: Paths, found: FsOptions) -> Device:
            return DyingDevice(paths, found.odirect, found.fsync == "file")

        super().__init__(name, options, device=device)


class Session:
    """One process over one directory, until it is killed or stopped."""

    def __init__(self, pool: Pool, kind: str, directory: Path) -> None:
        self.pool = pool
        self.results: dict[int, JobResult] = {}
        self.host = TierHost(
            "f", kind, {"directory": str(directory), "quota_bytes": QUOTA},
            on_finished=lambda results: self.results.update({r.id: r for r in results}),
            on_changes=lambda changes: None, patience=Patience(backoff_first_s=60.0),
        )  # fmt: skip

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.005)

    def job(self, number: int, chunk: Made) -> StoreJob:
        return StoreJob(number, chunk.id, chunk.header.parent, 0, self.pool.put(chunk), chunk.length)

    async def store_until_death(
        self, chunks: list[Made], kill_after_s: float | None, *, begun: bool = False
    ) -> list[Made]:
        """Store all and wait until the process is dead. What it had confirmed by then. It is killed so long after it
        was asked or, with `begun`, after its first answer."""
        await self.host.start({0: self.pool.descriptor})
        self.host.store([self.job(i, chunk) for i, chunk in enumerate(chunks)])
        if kill_after_s is not None:
            if begun:
                await self.until(lambda: len(self.results) > 0)
            await asyncio.sleep(kill_after_s)
            assert self.host.pid is not None
            os.kill(self.host.pid, signal.SIGKILL)
        await self.until(lambda: not self.host.alive)
        await self.host.stop()
        return [chunks[i] for i, result in self.results.items() if result.ok]


def check_what_is_left(rig: FsRig, chunks: list[Made], confirmed: list[Made]) -> int:
    """Open the directory: everything confirmed is served, everything served is right, everything is counted."""
    with rig.opened() as driver:
        assert driver.value("bytes") == rig.usage()
        assert all(driver.serves(chunk) for chunk in confirmed), "a confirmed store was lost"
        served = sum(driver.serves(chunk) for chunk in chunks)
        driver.until(lambda: driver.value("reconciled") == 1, "the walk")
        assert driver.value("chunks") == served
        assert driver.value("bytes") == rig.usage()
        assert driver.value("corrupt") == 0, "a torn file had a chunk's name"
    report = check_directory(rig.directory, repair=False)
    assert report.clean
    assert (report.unindexed, report.vanished, report.leftovers) == (0, 0, [])
    return served


def test_a_kill_in_the_middle_of_stores_leaves_no_torn_file(pool: Pool, tmp_path: Path) -> None:
    rng = random.Random(7)
    chunks = [numbered(i, granule=20_000) for i in range(60)]
    served = []
    for round_ in range(40):
        if round_ >= 6 and any(0 < count < len(chunks) for count in served):
            break  # how far it has come by then depends on what else the machine does
        rig = FsRig(pool, tmp_path / f"{round_}", quota_bytes=QUOTA)
        session_pool = Pool(16 << 20)
        directory = rig.directory

        async def scenario(
            directory: Path = directory, session_pool: Pool = session_pool, begun: bool = round_ % 2 == 1
        ) -> list[Made]:
            session = Session(session_pool, "fs", directory)
            return await session.store_until_death(chunks, rng.uniform(0.0, 0.01 if begun else 0.06), begun=begun)

        confirmed = asyncio.run(scenario())
        assert disk_usage(directory) <= QUOTA
        served.append(check_what_is_left(rig, chunks, confirmed))
        session_pool.close()
    assert any(0 < count < len(chunks) for count in served), f"no kill landed in the middle: {served}"


@pytest.mark.parametrize("point", ["before-naming", "after-naming"])
def test_a_kill_around_the_naming_of_a_file(pool: Pool, tmp_path: Path, point: str) -> None:
    rig = FsRig(pool, tmp_path / point, quota_bytes=QUOTA)
    first, second = numbered(1, granule=BIG), numbered(2, granule=BIG)
    with rig.opened() as driver:
        driver.store(first)
    (tmp_path / "arm").touch()

    async def scenario() -> list[Made]:
        session = Session(pool, "tests.tiers.test_fs_kill:DyingTier", rig.directory)
        return await session.store_until_death([second], None)

    confirmed = asyncio.run(scenario())
    assert confirmed == []
    served = check_what_is_left(rig, [first, second], [first])
    assert served == (2 if point == "after-naming" else 1)


@pytest.mark.parametrize("point", ["before-unlinking", "after-unlinking"])
def test_a_kill_around_an_unlink_brings_nothing_back(pool: Pool, tmp_path: Path, point: str) -> None:
    rig = FsRig(pool, tmp_path / point, quota_bytes=QUOTA)
    chunks = [numbered(i, granule=BIG) for i in range(6)]

    async def scenario() -> None:
        session = Session(pool, "tests.tiers.test_fs_kill:DyingTier", rig.directory)
        await session.host.start({0: pool.descriptor})
        session.host.store([session.job(i, chunk) for i, chunk in enumerate(chunks)])
        await session.until(lambda: len(session.results) == len(chunks))
        (tmp_path / "arm").touch()
        await session.host.clear(b"", timeout_s=0.5)
        await session.until(lambda: not session.host.alive)
        await session.host.stop()

    asyncio.run(scenario())
    assert rig.files(), "the kill came before the last unlink"
    with rig.opened() as driver:
        assert not any(driver.has(chunk) or driver.serves(chunk) for chunk in chunks)
        driver.until(lambda: rig.files() == [], "the files to go")
        driver.until(lambda: driver.value("bytes") == rig.usage(), "the account")


def test_a_tier_that_dies_again_and_again_keeps_its_chunks(pool: Pool, tmp_path: Path) -> None:
    chunk = numbered(1)
    rig = FsRig(pool, tmp_path / "fs", quota_bytes=QUOTA)

    async def scenario() -> None:
        patience = Patience(backoff_first_s=0.01, backoff_max_s=0.02)
        results: list[JobResult] = []
        host = TierHost(
            "f", "fs", {"directory": str(rig.directory), "quota_bytes": QUOTA}, patience=patience,
            on_finished=results.extend, on_changes=lambda changes: None,
        )  # fmt: skip
        await host.start({0: pool.descriptor})
        host.store([StoreJob(1, chunk.id, chunk.header.parent, 0, pool.put(chunk), chunk.length)])
        async with asyncio.timeout(60):
            while not results:
                await asyncio.sleep(0.01)
            for _ in range(6):
                pid = host.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                while not host.alive or host.pid == pid:
                    await asyncio.sleep(0.01)
                found = await host.lookup([chunk.query()], 5.0)
                assert found[0].outcome == "hit"
        await host.stop()

    asyncio.run(scenario())

