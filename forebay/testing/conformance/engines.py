"""Two ways to reach a tier: as an object in this process, and through the process and host that a store uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from forebay.testing.conformance.chunks import Pool
from forebay.tiers.base import (
    ChunkId,
    ClearScope,
    JobResult,
    LoadJob,
    LookupResult,
    Query,
    SecondaryTier,
    StoreJob,
    TierChange,
    TierStats,
)
from forebay.tiers.host import TierHost

T = TypeVar("T")

PATIENCE_S = 60.0
"""How long a call may take before it counts as a hang."""


class Engine(Protocol):
    """What differs between a tier in this process and one in its own."""

    def attach(self, extent: int, pool: Pool) -> None: ...
    def begin(self, jobs: Sequence[StoreJob | LoadJob]) -> None: ...
    def lookup_once(self, queries: Sequence[Query]) -> list[LookupResult]: ...
    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None: ...
    def clear(self, namespace: bytes) -> int | None: ...
    def clear_scope(self, scope: ClearScope) -> int | None: ...
    def stats(self) -> TierStats: ...
    def pump(self, results: list[JobResult], changes: list[TierChange]) -> None: ...
    def close(self) -> None: ...
    def last_words(self, results: list[JobResult], changes: list[TierChange]) -> None: ...


class InProcess(Engine):
    """A tier object called directly, as its process would."""

    def __init__(self, tier: SecondaryTier, pool: Pool) -> None:
        self.tier = tier
        tier.attach_extent(0, pool.memory)

    def attach(self, extent: int, pool: Pool) -> None:
        self.tier.attach_extent(extent, pool.memory)

    def begin(self, jobs: Sequence[StoreJob | LoadJob]) -> None:
        for job in jobs:
            if isinstance(job, StoreJob):
                self.tier.submit_store(job)
            else:
                self.tier.submit_load(job)

    def lookup_once(self, queries: Sequence[Query]) -> list[LookupResult]:
        return self.tier.lookup(queries)

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        self.tier.forget(chunks, reason)

    def clear(self, namespace: bytes) -> int | None:
        return self.tier.clear(namespace)

    def clear_scope(self, scope: ClearScope) -> int | None:
        return self.tier.clear_scope(scope)

    def stats(self) -> TierStats:
        return self.tier.statistics()

    def pump(self, results: list[JobResult], changes: list[TierChange]) -> None:
        changes.extend(self.tier.take_changes())
        got = list(self.tier.get_finished_jobs())
        results.extend(got)
        if not got:
            time.sleep(0.001)

    def close(self) -> None:
        self.tier.close()

    def last_words(self, results: list[JobResult], changes: list[TierChange]) -> None:
        changes.extend(self.tier.take_changes())
        results.extend(self.tier.get_finished_jobs())


class OwnProcess(Engine):
    """A tier behind a TierHost. The loop runs only while a call is waiting."""

    def __init__(self, make: Callable[..., TierHost], pool: Pool) -> None:
        self.loop = asyncio.new_event_loop()
        self._results: list[JobResult] = []
        self._changes: list[TierChange] = []

        async def start() -> TierHost:
            host = make(on_finished=self._results.extend, on_changes=self._changes.extend)
            await host.start({0: pool.descriptor})
            return host

        try:
            self.host = self._run(start())
        except BaseException:
            self.loop.close()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    def attach(self, extent: int, pool: Pool) -> None:
        self.host.attach(extent, pool.descriptor)

    def begin(self, jobs: Sequence[StoreJob | LoadJob]) -> None:
        async def submit() -> None:
            for job in jobs:
                if isinstance(job, StoreJob):
                    self.host.store([job])
                else:
                    self.host.load([job])

        self._run(submit())

    def lookup_once(self, queries: Sequence[Query]) -> list[LookupResult]:
        return self._run(self.host.lookup(queries, 5.0))

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        self.host.forget(chunks, reason)

    def clear(self, namespace: bytes) -> int | None:
        return self._run(self.host.clear(namespace))

    def clear_scope(self, scope: ClearScope) -> int | None:
        return self._run(self.host.clear_scope(scope))

    def stats(self) -> TierStats:
        return self._run(self.host.stats())

    def pump(self, results: list[JobResult], changes: list[TierChange]) -> None:
        self._run(asyncio.sleep(0.002))
        self.last_words(results, changes)

    def last_words(self, results: list[JobResult], changes: list[TierChange]) -> None:
        results.extend(self._results)
        changes.extend(self._changes)
        self._results.clear()
        self._changes.clear()

    def close(self) -> None:
        self._run(self.host.stop())
        self.loop.close()
