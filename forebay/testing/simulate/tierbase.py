"""What the simulated tiers share: jobs that take virtual time, and the ways in which tiers go wrong.

Chunks are checked with the functions that the real tiers use. A load is copied into the pool piece by piece and then
verified there, so it writes late if it is late.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from forebay.errors import CorruptChunk
from forebay.kvstore.header import ChunkHeader, decode_header, header_bytes
from forebay.testing.simulate.loop import Process
from forebay.tiers import chunks
from forebay.tiers.base import (
    ChunkId,
    JobResult,
    LoadJob,
    LookupResult,
    Query,
    SecondaryTier,
    StoreJob,
    TierChange,
    TierStats,
)

if TYPE_CHECKING:
    from forebay.testing.simulate.world import World


class Trouble(Exception):
    """A job failed; the argument is the result's reason."""


def split_blob(blob: bytes) -> tuple[ChunkHeader, bytes, bytes]:
    """Header, header block and payload of stored bytes. Raises CorruptChunk."""
    found = decode_header(blob)
    size = header_bytes(found.token_count, len(found.extra))
    block = blob[:size]
    return chunks.stored_header(block), block, blob[size:]


class SimTier(SecondaryTier):
    """Jobs as tasks of the tier's process. Subclasses say where chunks are kept."""

    def __init__(self, world: World, process: Process, name: str) -> None:
        self.name = name
        self.world, self.process = world, process
        self.rng: random.Random = world.tier_rng
        self.extents: dict[int, memoryview] = {}
        self._finished: list[JobResult] = []
        self._changes: list[TierChange] = []
        self._wake = lambda: None
        self.forgotten: set[ChunkId] = set()

    # --- for subclasses --------------------------------------------------------------------------------

    async def keep(self, job: StoreJob, blob: bytes) -> None:
        """Store a chunk's bytes. Raises Trouble."""
        raise NotImplementedError

    async def fetch(self, chunk: ChunkId) -> bytes:
        """A chunk's bytes as they are there. Raises Trouble."""
        raise NotImplementedError

    def lost(self, chunk: ChunkId, reason: str) -> None:
        """What was fetched is no good: take it out."""

    def someone_else(self, chunk: ChunkId) -> ChunkId | None:
        """Another chunk that is there, for mixing them up."""
        return None

    # --- time and trouble ------------------------------------------------------------------------------

    def trouble(self, fault: str, share: float) -> bool:
        """Does this fault happen now?"""
        return self.world.strikes(fault, share, self.rng)

    async def _takes_time(self) -> None:
        wait = self.rng.choice((0.0002, 0.001, 0.005))
        if self.trouble("tier_slow", 0.1):
            wait = self.rng.choice((0.05, 0.3, 0.9))
        await self.world.sleep(wait)

    def changed(self, chunk: ChunkId, stored: bool, reason: str = "", block: bytes = b"") -> None:
        """Something became true."""
        self._changes.append(TierChange(chunk, stored, reason, chunks.header_block(block) if block else b""))
        self._wake()

    def done(self, result: JobResult) -> None:
        """A job is finished."""
        self._finished.append(result)
        self._wake()

    # --- the interface ---------------------------------------------------------------------------------

    def attach_extent(self, extent: int, memory: memoryview) -> None:
        self.extents[extent] = memory

    def set_waker(self, wake: object) -> None:
        self._wake = wake  # type: ignore[assignment]

    def submit_store(self, job: StoreJob) -> None:
        self.process.spawn(self._store(job))

    def submit_load(self, job: LoadJob) -> None:
        self.process.spawn(self._load(job))

    async def _store(self, job: StoreJob) -> None:
        try:
            await self._takes_time()
            if self.trouble("tier_error", 0.1):
                raise Trouble("io")
            memory = self.extents[job.extent][job.offset : job.offset + job.length]
            slot = chunks.checked_slot(memory, job)
            payload = bytes(slot.payload[: len(slot.payload) // 2])
            await self.world.sleep(self.rng.choice((0.0, 0.001)))
            payload += bytes(slot.payload[len(slot.payload) // 2 :])
            await self.keep(job, slot.block + payload)
        except Trouble as trouble:
            self.done(JobResult(job.id, False, str(trouble)))
        except CorruptChunk:
            self.done(JobResult(job.id, False, "corrupt"))
        else:
            self.world.count(f"tier.{self.name}.stored")
            self.done(JobResult(job.id, True, length=job.length))

    async def _load(self, job: LoadJob) -> None:
        due = self.world.loop.time() + job.deadline_s
        try:
            await self._takes_time()
            if self.trouble("tier_error", 0.1):
                raise Trouble("io")
            block, length = await self._bring(job)
        except Trouble as trouble:
            self.done(JobResult(job.id, False, str(trouble)))
        except CorruptChunk:
            self.world.count(f"tier.{self.name}.corrupt")
            self.lost(job.chunk, "corrupt")
            self.done(JobResult(job.id, False, "corrupt"))
        else:
            late = self.world.loop.time() > due
            self.world.count(f"tier.{self.name}.{'late' if late else 'loaded'}")
            self.done(JobResult(job.id, False, "late") if late else JobResult(job.id, True, "", block, length))

    async def _bring(self, job: LoadJob) -> tuple[bytes, int]:
        other = self.someone_else(job.chunk) if self.trouble("tier_wrong_chunk", 0.25) else None
        blob = await self.fetch(other or job.chunk)
        if self.trouble("tier_wrong_bytes", 0.3):
            blob = _flipped(blob, self.rng)
        found, block, payload = split_blob(blob)
        # A tier that mixes chunks up doesn't notice: then the daemon has to.
        if other is None and (found.group, found.key) != (job.chunk.group, job.chunk.key):
            raise CorruptChunk("another chunk lies there")
        if len(payload) > job.capacity:
            raise CorruptChunk("more than the slot takes")
        await self._copy(job, payload)
        room = self.extents[job.extent][job.payload_offset : job.payload_offset + len(payload)]
        chunks.verify_payload(found, room)
        return block, len(payload)

    async def _copy(self, job: LoadJob, payload: bytes) -> None:
        memory, half = self.extents[job.extent], len(payload) // 2
        memory[job.payload_offset : job.payload_offset + half] = payload[:half]
        await self._takes_time()
        memory[job.payload_offset + half : job.payload_offset + len(payload)] = payload[half:]

    def lied(self, results: list[LookupResult]) -> list[LookupResult]:
        """The answers, or others."""
        if not results or not self.trouble("tier_lies", 0.15):
            return results
        at = self.rng.randrange(len(results))
        result = results[at]
        lies = [LookupResult("miss")]
        if result.outcome == "hit":
            key, matched, tokens, length = result.key, result.matched, result.tokens, result.length
            lies += [
                LookupResult("hit", key, tokens, tokens, length),
                LookupResult("hit", self.rng.randbytes(32), matched, tokens, length),
                LookupResult("hit", key, matched, tokens + 16, length),
                LookupResult("hit", key, matched, tokens, length + 4096),
                LookupResult("hit", key, matched + 16, tokens, length),
                LookupResult("hit", key, matched, matched, length),
                LookupResult("hit", b"", 7, 13, -5),
                LookupResult("hit", key, 1 << 40, 1 << 40, 1 << 50),
            ]
        results[at] = self.rng.choice(lies)
        return results

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self._finished = self._finished, []
        return finished

    def take_changes(self) -> Iterable[TierChange]:
        changes, self._changes = self._changes, []
        return changes

    def statistics(self) -> TierStats:
        return TierStats({"bytes": 0.0, "bytes_quota": 0.0, "chunks": 0.0, "queue_bytes": 0.0}, {"kind": "simulated"})

    def close(self) -> None:
        self.extents.clear()

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        for chunk in chunks:
            self.lost(chunk, reason)


def _flipped(blob: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(blob))
    return blob[:at] + bytes([blob[at] ^ (1 << rng.randrange(8))]) + blob[at + 1 :]


def answer(query: Query, headers: dict[ChunkId, ChunkHeader], lengths: dict[ChunkId, int]) -> LookupResult:
    """The best of these chunks for a query."""
    exact = ChunkId(query.group, query.key)
    candidates = {c: h for c, h in headers.items() if c.group == query.group and h.parent == query.parent}
    found = chunks.best_match(query, {exact: headers[exact]} if exact in headers else candidates)
    if found is None:
        return LookupResult("miss")
    held = headers[found.chunk]
    return LookupResult("hit", found.chunk.key, found.matched, held.token_count, lengths[found.chunk])
