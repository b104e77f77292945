"""Chunks and a pool for the tiers' tests, and two ways to drive a tier: in this process, and in its own."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from forebay.kvstore.header import ChunkHeader, SlotState, encode_header, granule_checksums
from forebay.kvstore.identity import MATCH_UNIT, chain, pack_tokens
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

NAMESPACE = b"n" * 32
ROOT = b"r" * 32
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Made:
    """A chunk as a worker would commit it."""

    header: ChunkHeader
    payload: bytes

    @property
    def id(self) -> ChunkId:
        return ChunkId(self.header.group, self.header.key)

    @property
    def block(self) -> bytes:
        return encode_header(self.header)

    @property
    def length(self) -> int:
        return len(self.block) + len(self.payload)

    def query(self) -> Query:
        return Query(self.header.group, self.header.key, self.header.parent, self.header.tokens)


def make_chunk(
    tokens: Sequence[int] = range(32),
    *,
    granule: int = 4096,
    parent: bytes = ROOT,
    group: int = 0,
    namespace: bytes = NAMESPACE,
    start: int = 0,
    seed: int | None = None,
    tenant: str = "",
) -> Made:
    """A chunk of these tokens, its payload random but the same for the same arguments."""
    packed = pack_tokens(tokens)
    key = chain(parent, packed)[-1]
    size = len(tokens) // MATCH_UNIT * granule
    payload = random.Random(f"{key.hex()} {group} {seed}").randbytes(size)
    sums = granule_checksums(memoryview(payload), granule)
    return Made(ChunkHeader(namespace, group, key, parent, start, packed, tenant, b"", size, sums), payload)


def numbered(number: int, **arguments: Any) -> Made:
    """A chunk like no other number's."""
    return make_chunk([number * 1000 + i for i in range(32)], **arguments)


class Pool:
    """One extent, and slots cut from it in turn. What surrounds a slot is filled so that a stray write shows."""

    def __init__(self, size: int = 8 << 20) -> None:
        self.descriptor = os.memfd_create("pool")
        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size)
        self.memory = memoryview(self._map)
        self._at = 4096

    def slot(self, size: int) -> int:
        """Offset of `size` fresh bytes at a page boundary; the next slot begins where this one ends."""
        size = -(-size // 4096) * 4096
        if self._at + size + 4096 > len(self.memory):
            self._at = 4096
        at = self._at
        self._at += size + 4096
        self.memory[at - 4096 : at + size + 4096] = b"\xee" * (size + 8192)
        return at

    def put(self, chunk: Made) -> int:
        """A slot that holds this chunk, as it lies in a real pool: with a generation."""
        at = self.slot(chunk.length)
        block = encode_header(chunk.header, state=SlotState.COMMITTED, generation=77)
        self.memory[at : at + len(block)] = block
        self.memory[at + len(block) : at + chunk.length] = chunk.payload
        return at

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class Loaded:
    """A load's result and what it left in the slot."""

    result: JobResult
    payload: bytes


class Engine(Protocol):
    """What differs between a tier in this process and one in its own."""

    def begin(self, jobs: Sequence[StoreJob | LoadJob]) -> None: ...
    def lookup_once(self, queries: Sequence[Query]) -> list[LookupResult]: ...
    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None: ...
    def clear(self, namespace: bytes) -> int | None: ...

    def clear_scope(self, scope: ClearScope) -> int | None: ...
    def stats(self) -> TierStats: ...
    def pump(self, results: list[JobResult], changes: list[TierChange]) -> None: ...
    def close(self) -> None: ...


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


class InProcess:
    """A tier object called directly, as its process would."""

    def __init__(self, tier: SecondaryTier, pool: Pool) -> None:
        self.tier = tier
        tier.attach_extent(0, pool.memory)

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


class OwnProcess:
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
        results.extend(self._results)
        changes.extend(self._changes)
        self._results.clear()
        self._changes.clear()

    def close(self) -> None:
        self._run(self.host.stop())
        self.loop.close()
