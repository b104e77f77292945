"""Several file tiers over one directory, as the stores of several processes or machines would have them."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.tiers.base import TierChange
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.tier import FsTier
from tests.tiers.fs_rig import FsRig
from tests.tiers.support import PATIENCE_S, Driver, Made, Pool

QUICK: dict[str, Any] = {"dead_after_s": 30.0, "takeover_s": 0.2}
"""Whoever lives beats in time on a busy machine, too. Who is to be seen dead is made so by `hasten`."""


def used(directory: Path) -> int:
    """What all files of all seats take; manifests aside."""
    total = 0
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if name != ".state"]
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Several:
    """Tiers by number, each with a state directory of its own. `die` ends one as SIGKILL would: its threads look no
    more, its locks are gone, nothing is said to the others."""

    def __init__(self, pool: Pool, folder: Path, **options: Any) -> None:
        self.pool, self.folder = pool, folder
        self.directory = folder / "shared"
        self.options = {**QUICK, **options}
        self.rigs: dict[int, FsRig] = {}

    def open(self, number: int, **options: Any) -> Driver:
        state = str(self.folder / f"state-{number}")
        rig = FsRig(self.pool, self.directory, state_dir=state, **{**self.options, **options})
        self.rigs[number] = rig
        return rig.open()

    def tier(self, number: int) -> FsTier:
        return self.rigs[number].tier

    def paths(self, number: int) -> Paths:
        return self.tier(number)._paths

    def file(self, number: int, chunk: Made) -> Path:
        """Where this store would have the chunk itself."""
        return Path(self.paths(number).chunk(chunk.id))

    def close(self, number: int) -> None:
        self.rigs.pop(number).close()

    def die(self, number: int) -> None:
        rig = self.rigs.pop(number)
        tier = rig.tier
        tier._keeper._closing = True
        tier._keeper._kicked.set()
        tier._neighbours.stop()
        tier._keeper._thread.join(5.0)
        assert tier._writers.close(5.0) and tier._readers.close(5.0)
        tier._shelf.manifest._env.close()
        for mirror in tier._neighbours._all.values():
            mirror.manifest._env.close()
        os.close(tier._lock)
        os.close(tier._state_lock)

    def hasten(self, number: int, dead_after_s: float = 0.3) -> None:
        """Have this one take a beat that stands still for a dead one's so soon."""
        self.tier(number)._neighbours._onlooker.dead_after_s = dead_after_s

    def until(self, true: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < end, f"waited {PATIENCE_S} s for {what}"
            for rig in self.rigs.values():
                assert rig.driver is not None
                rig.driver.pump()

    def settled(self, stores: int) -> None:
        """Everybody knows everybody, the quota is dealt out, and all names have been compared."""

        def true() -> bool:
            values = [rig.tier.statistics().values for rig in self.rigs.values()]
            parts = {value["bytes_quota"] for value in values}
            return (
                all(value["stores"] == stores and value["neighbours_complete"] for value in values)
                and len(parts) == 1 and parts.pop() <= self.options.get("quota_bytes", 10 << 30) / stores
            )  # fmt: skip

        self.until(true, f"{stores} stores to know each other")

    def shut(self) -> None:
        for number in list(self.rigs):
            self.close(number)
        shutil.rmtree(self.directory, ignore_errors=True)


class Watchman:
    """Walks the directory again and again in a thread; `most` is the most that it has seen."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ended = threading.Event()
        self.most = self.rounds = 0
        self._thread = threading.Thread(target=self._walk, daemon=True)
        self._thread.start()

    def _walk(self) -> None:
        while not self._ended.is_set():
            self.most = max(self.most, used(self._directory))
            self.rounds += 1

    def stop(self) -> int:
        self._ended.set()
        self._thread.join(10)
        assert self.rounds > 3
        return self.most


def told(driver: Driver, chunk: Made) -> list[TierChange]:
    """What this store has told its daemon about a chunk."""
    driver.pump()
    return [change for change in driver.changes if change.chunk == chunk.id]
