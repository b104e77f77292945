"""Stores, loads and asks, each call to its end, and checks of what must hold at every one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.testing.conformance.chunks import Made, Pool
from forebay.testing.conformance.engines import PATIENCE_S, Engine
from forebay.tiers.base import JobResult, LoadJob, LookupResult, Query, StoreJob, TierChange


@dataclass(frozen=True)
class Loaded:
    """A load's result and what it left in the slot."""

    result: JobResult
    payload: bytes


class Driver:
    """Stores, loads and asks, each call to its end."""

    def __init__(self, pool: Pool, engine: Engine) -> None:
        self.pool = pool
        self.engine = engine
        self.changes: list[TierChange] = []
        self.results: list[JobResult] = []
        self._job = 0

    def next_id(self) -> int:
        self._job += 1
        return self._job

    def pump(self) -> None:
        self.engine.pump(self.results, self.changes)

    def until(self, true: Callable[[], bool], what: str = "it") -> None:
        """Take results and changes until `true`; fails if that takes too long."""
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < end, f"waited {PATIENCE_S} s for {what}"
            self.pump()

    def finish(self, jobs: Sequence[StoreJob | LoadJob]) -> dict[int, JobResult]:
        """Submit jobs and wait for their results, each exactly one."""
        wanted = {job.id for job in jobs}
        self.engine.begin(jobs)
        self.until(lambda: wanted <= {result.id for result in self.results}, "results")
        found = {result.id: result for result in self.results if result.id in wanted}
        assert len([r for r in self.results if r.id in wanted]) == len(wanted), "a job finished twice"
        return found

    def store_job(self, chunk: Made, *, replaces: bytes = b"", cold: bool = False) -> StoreJob:
        at = self.pool.put(chunk)
        return StoreJob(self.next_id(), chunk.id, chunk.header.parent, 0, at, chunk.length, replaces, cold)

    def store(self, chunk: Made, *, replaces: bytes = b"", cold: bool = False) -> JobResult:
        job = self.store_job(chunk, replaces=replaces, cold=cold)
        return self.finish([job])[job.id]

    def load(self, chunk: Made, *, capacity: int | None = None, deadline_s: float = PATIENCE_S) -> Loaded:
        """Load into a fresh slot; what lies around it must not change."""
        capacity = len(chunk.payload) if capacity is None else capacity
        at = self.pool.slot(capacity)
        job = LoadJob(self.next_id(), chunk.id, 0, at, capacity, deadline_s)
        result = self.finish([job])[job.id]
        size = -(-capacity // 4096) * 4096
        assert set(self.pool.memory[at - 4096 : at]) == {0xEE}, "bytes before the slot were written"
        behind = self.pool.memory[at + capacity : at + size + 4096]
        assert set(behind) == {0xEE}, "bytes behind the slot were written"
        return Loaded(result, bytes(self.pool.memory[at : at + result.length]))

    def lookup(self, *queries: Query) -> list[LookupResult]:
        """Answers, once none is `retry` any more."""
        answers: list[LookupResult] = []

        def known() -> bool:
            answers[:] = self.engine.lookup_once(queries)
            return all(answer.outcome != "retry" for answer in answers)

        self.until(known, "a lookup")
        return answers

    def has(self, chunk: Made) -> bool:
        """Does an exact lookup hit?"""
        (found,) = self.lookup(chunk.query())
        return found.outcome == "hit" and found.key == chunk.header.key

    def serves(self, chunk: Made) -> bool:
        """True if the chunk loads, its bytes then being right; False if it is a miss."""
        loaded = self.load(chunk)
        if loaded.result.ok:
            assert loaded.payload == chunk.payload, "wrong bytes were served"
        return loaded.result.ok

    def value(self, name: str) -> float:
        return self.engine.stats().values.get(name, 0.0)

    def close(self) -> None:
        self.engine.close()
