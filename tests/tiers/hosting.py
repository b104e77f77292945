"""A tier's process with its host, and what it has told, for tests."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from forebay.tiers.base import JobResult, LoadJob, StoreJob, TierChange
from forebay.tiers.host import TierHost
from forebay.tiers.supervise import Patience
from tests.tiers.support import Made, Pool

ODD = "tests.tiers.odd_tiers:"
HASTY = Patience(heartbeat_s=0.1, hang_s=0.5, stop_s=1.0, store_s=30.0, backoff_first_s=0.05, backoff_max_s=0.2)


@dataclass
class Watched:
    """A host and what it told, with the time and whether its process lived then."""

    pool: Pool
    host: TierHost = field(init=False)
    results: list[JobResult] = field(default_factory=list)
    changes: list[TierChange] = field(default_factory=list)
    downs: list[str] = field(default_factory=list)
    alive_when_told: list[bool] = field(default_factory=list)
    suspect: int = 0

    def finished(self, results: list[JobResult]) -> None:
        self.results.extend(results)
        self.alive_when_told.extend(process_exists(self.suspect) for _ in results)

    def store_job(self, number: int, chunk: Made) -> StoreJob:
        return StoreJob(number, chunk.id, chunk.header.parent, 0, self.pool.put(chunk), chunk.length)

    def load_job(self, number: int, chunk: Made, deadline_s: float = 10.0) -> LoadJob:
        at = self.pool.slot(len(chunk.payload))
        return LoadJob(number, chunk.id, 0, at, len(chunk.payload), deadline_s)

    async def until(self, true: Callable[[], bool], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < end, "waited too long"
            await asyncio.sleep(0.01)

    async def kill_and_wait(self) -> None:
        """Kill the tier's process and wait for its successor."""
        pid = self.host.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: self.host.alive and self.host.pid != pid)

    async def kill(self) -> None:
        """Kill the tier's process and wait until that is known."""
        os.kill(self.suspect, signal.SIGKILL)
        await self.until(lambda: not self.host.alive)

    def ids(self) -> list[int]:
        return [result.id for result in self.results]


def process_exists(pid: int) -> bool:
    return pid > 0 and os.path.exists(f"/proc/{pid}")


@asynccontextmanager
async def hosted(
    pool: Pool, kind: str, options: dict[str, Any] | None = None, **arguments: Any
) -> AsyncIterator[Watched]:
    watched = Watched(pool)
    watched.host = TierHost(
        "t", kind, options or {}, on_finished=watched.finished, on_changes=watched.changes.extend,
        on_down=watched.downs.append, **{"patience": HASTY, **arguments},
    )  # fmt: skip
    await watched.host.start({0: pool.descriptor})
    watched.suspect = watched.host.pid or 0
    try:
        yield watched
    finally:
        await watched.host.stop()
