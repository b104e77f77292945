"""Stores, loads and asks, each call to its end, and checks of what must hold at every one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from forebay.testing.conformance.chunks import Made, Pool
from forebay.testing.conformance.engines import PATIENCE_S, Engine
from forebay.tiers.base import JobResult, LoadJob, LookupResult, Query, StoreJob, TierChange

T = TypeVar("T")

PAGE = 4096


@dataclass(frozen=True)
class Loaded:
    """A load's result and what it left in the slot."""

    result: JobResult
    payload: bytes


class Driver:
    """Stores, loads and asks, each call to its end. `results` and `changes` are all that came so far."""

    def __init__(self, pool: Pool, engine: Engine) -> None:
        self.pool = pool
        self.engine = engine
        self.changes: list[TierChange] = []
        self.results: list[JobResult] = []
        self._more_pools: dict[int, Pool] = {}
        self._job = 0
        self._closed = False

    def next_id(self) -> int:
        """A job id that wasn't used yet."""
        self._job += 1
        return self._job

    def attach(self) -> int:
        """One more extent; returns its number."""
        extent = 1 + len(self._more_pools)
        self._more_pools[extent] = Pool(1 << 20)
        self.engine.attach(extent, self._more_pools[extent])
        return extent

    def pool_of(self, extent: int) -> Pool:
        """The memory of this extent."""
        return self._more_pools[extent] if extent else self.pool

    # --- waiting ---------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what has finished and changed since the last time."""
        self.engine.pump(self.results, self.changes)

    def until(self, true: Callable[[], bool], what: str = "it") -> None:
        """Take results and changes until `true`; fails if that takes too long."""
        end = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < end, f"waited {PATIENCE_S} s for {what}"
            self.pump()

    def within_patience(self, call: Callable[[], T]) -> T:
        """What `call` returns, from a thread of its own; fails if it doesn't return."""
        answers: list[T] = []
        thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"a call that must not block has not returned in {PATIENCE_S} s"
        assert answers, "the call raised; its traceback is above"
        return answers[0]

    def finish(self, jobs: Sequence[StoreJob | LoadJob]) -> dict[int, JobResult]:
        """Submit jobs and wait for their results, each exactly one."""
        self.engine.begin(jobs)
        return self.results_of(jobs)

    def results_of(self, jobs: Sequence[StoreJob | LoadJob]) -> dict[int, JobResult]:
        """Wait for the results of submitted jobs, each exactly one."""
        wanted = {job.id for job in jobs}
        self.until(lambda: wanted <= {result.id for result in self.results}, "results")
        found = {result.id: result for result in self.results if result.id in wanted}
        assert len([r for r in self.results if r.id in wanted]) == len(wanted), "a job finished twice"
        return found

    def expect_no_more(self) -> None:
        """No result is left or comes twice."""
        for _ in range(5):
            self.pump()
        ids = [result.id for result in self.results]
        assert len(ids) == len(set(ids)), "a job finished twice"

    # --- stores and loads ------------------------------------------------------------------------------

    def store_job(self, chunk: Made, *, replaces: bytes = b"", cold: bool = False) -> StoreJob:
        """A job for this chunk, which lies in a slot of the pool now."""
        at = self.pool.put(chunk)
        return StoreJob(self.next_id(), chunk.id, chunk.header.parent, 0, at, chunk.length, replaces, cold)

    def store(self, chunk: Made, *, replaces: bytes = b"", cold: bool = False) -> JobResult:
        """Store a chunk; the result."""
        job = self.store_job(chunk, replaces=replaces, cold=cold)
        return self.finish([job])[job.id]

    def load_job(
        self, chunk: Made, *, capacity: int | None = None, deadline_s: float = PATIENCE_S, extent: int = 0
    ) -> LoadJob:
        """A job that loads this chunk into a fresh slot."""
        capacity = len(chunk.payload) if capacity is None else capacity
        at = self.pool_of(extent).slot(capacity)
        return LoadJob(self.next_id(), chunk.id, extent, at, capacity, deadline_s)

    def load(
        self, chunk: Made, *, capacity: int | None = None, deadline_s: float = PATIENCE_S, extent: int = 0
    ) -> Loaded:
        """Load into a fresh slot; what lies around it must not change."""
        job = self.load_job(chunk, capacity=capacity, deadline_s=deadline_s, extent=extent)
        result = self.finish([job])[job.id]
        self._check_surroundings(job)
        memory, at = self.pool_of(extent).memory, job.payload_offset
        if result.ok:
            behind = memory[at + result.length : at + job.capacity]
            assert behind == b"\xee" * len(behind), "bytes of the slot behind the payload were written"
        return Loaded(result, bytes(memory[at : at + result.length]))

    def check_load(self, job: LoadJob, chunk: Made, result: JobResult) -> bool:
        """Did it succeed? Then with the right bytes; in any case nothing around the slot has changed."""
        self._check_surroundings(job)
        if result.ok:
            at = job.payload_offset
            assert result.length == len(chunk.payload), "a load of another length"
            assert self.pool_of(job.extent).memory[at : at + result.length] == chunk.payload, "wrong bytes were served"
        return result.ok

    def _check_surroundings(self, job: LoadJob) -> None:
        memory, at = self.pool_of(job.extent).memory, job.payload_offset
        end = at + -(-job.capacity // PAGE) * PAGE + PAGE
        assert set(memory[at - PAGE : at]) == {0xEE}, "bytes before the slot were written"
        assert set(memory[at + job.capacity : end]) == {0xEE}, "bytes behind the slot were written"

    def serves(self, chunk: Made) -> bool:
        """True if the chunk loads, its bytes then being right; False if it is a miss."""
        loaded = self.load(chunk)
        if loaded.result.ok:
            assert loaded.payload == chunk.payload, "wrong bytes were served"
        return loaded.result.ok

    # --- questions -------------------------------------------------------------------------------------

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

    def value(self, name: str) -> float:
        """One of the tier's figures, 0 if it has none of that name."""
        return self.engine.stats().values.get(name, 0.0)

    # --- the end ---------------------------------------------------------------------------------------

    def end(self) -> None:
        """Close the tier and take its last words."""
        self.close()
        self.engine.last_words(self.results, self.changes)

    def close(self) -> None:
        """Close the tier; twice is fine."""
        if not self._closed:
            self._closed = True
            self.engine.close()
            for pool in self._more_pools.values():
                pool.close()
