"""A tier in a dict: the reference that says in the fewest lines what a tier owes. Read it first.

It does everything at once in the calling thread, so nothing is ever in flight: no queue, no lock, no waker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from forebay.errors import CorruptChunk
from forebay.kvstore.header import ChunkHeader
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
from forebay.tiers.chunks import best_match, checked_slot, header_block, verify_payload
from forebay.tiers.registry import convert_options


class MemoryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`quota_bytes` bounds headers and payloads together."""

    quota_bytes: int = 256 << 20


@dataclass(slots=True)
class _Held:
    """One chunk: its header, the header's block, its payload."""

    header: ChunkHeader
    block: bytes
    payload: bytes
    cold: bool

    @property
    def length(self) -> int:
        return len(self.block) + len(self.payload)


def _covers(scope: ClearScope, header: ChunkHeader) -> bool:
    return scope.namespace in (b"", header.namespace) and scope.tenant in (None, header.tenant)


class MemoryTier(SecondaryTier):
    """Chunks in a dict with a byte quota; cold ones leave first, then the least recently used."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self.name = name
        self._quota = convert_options(name, options, MemoryOptions).quota_bytes
        self._extents: dict[int, memoryview] = {}
        self._chunks: OrderedDict[ChunkId, _Held] = OrderedDict()
        self._children: dict[ChunkId, set[ChunkId]] = {}
        self._bytes = 0
        self._finished: list[JobResult] = []
        self._changes: list[TierChange] = []
        self._counts: dict[str, float] = dict.fromkeys(
            ("stores_ok", "stores_refused", "loads_ok", "loads_missing", "loads_corrupt", "evicted"), 0
        )

    def attach_extent(self, extent: int, memory: memoryview) -> None:
        self._extents[extent] = memory

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        # Later chunks of a prompt are touched first, so that a chain's front outlives its end.
        return [self._find(query) for query in reversed(queries)][::-1]

    def _find(self, query: Query) -> LookupResult:
        chunk = ChunkId(query.group, query.key)
        siblings = self._children.get(ChunkId(query.group, query.parent), set())
        candidates = {c: self._chunks[c].header for c in (siblings if chunk not in self._chunks else (chunk,))}
        found = best_match(query, candidates)
        if found is None:
            return LookupResult("miss")
        self._chunks.move_to_end(found.chunk)
        held = self._chunks[found.chunk]
        return LookupResult("hit", found.chunk.key, found.matched, held.header.token_count, held.length)

    def submit_store(self, job: StoreJob) -> None:
        memory = self._extents[job.extent][job.offset : job.offset + job.length]
        try:
            slot = checked_slot(memory, job)
        except CorruptChunk:
            self._refuse(job, "corrupt")
            return
        if job.length > self._quota:
            self._refuse(job, "quota")
            return
        if job.chunk not in self._chunks:
            while self._bytes + job.length > self._quota:
                self._evict()
            held = _Held(slot.header, slot.block, bytes(slot.payload), job.cold)
            self._chunks[job.chunk] = held
            self._children.setdefault(ChunkId(job.chunk.group, job.parent), set()).add(job.chunk)
            self._bytes += held.length
            self._changes.append(TierChange(job.chunk, True, "", header_block(held.block)))
        if job.replaces:
            self._remove(ChunkId(job.chunk.group, job.replaces), "replaced")
        self._counts["stores_ok"] += 1
        self._finished.append(JobResult(job.id, True, length=job.length))

    def _refuse(self, job: StoreJob, reason: str) -> None:
        self._counts["stores_refused"] += 1
        self._finished.append(JobResult(job.id, False, reason))

    def _evict(self) -> None:
        coldest = next((c for c, held in self._chunks.items() if held.cold), next(iter(self._chunks)))
        self._counts["evicted"] += 1
        self._remove(coldest, "evicted")

    def submit_load(self, job: LoadJob) -> None:
        held = self._chunks.get(job.chunk)
        if held is None:
            self._counts["loads_missing"] += 1
            self._finished.append(JobResult(job.id, False, "missing"))
            return
        try:
            if len(held.payload) > job.capacity:
                raise CorruptChunk(f"payload of {len(held.payload)} bytes for a slot of {job.capacity}")
            verify_payload(held.header, memoryview(held.payload))
        except CorruptChunk:
            self._counts["loads_corrupt"] += 1
            self._remove(job.chunk, "corrupt")
            self._finished.append(JobResult(job.id, False, "corrupt"))
            return
        at = job.payload_offset
        self._extents[job.extent][at : at + len(held.payload)] = held.payload
        held.cold = False
        self._chunks.move_to_end(job.chunk)
        self._counts["loads_ok"] += 1
        self._finished.append(JobResult(job.id, True, "", held.block, len(held.payload)))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished, self._finished = self._finished, []
        return finished

    def take_changes(self) -> Iterable[TierChange]:
        changes, self._changes = self._changes, []
        return changes

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        for chunk in chunks:
            self._remove(chunk, reason)

    def clear(self, namespace: bytes) -> int:
        doomed = [c for c, held in self._chunks.items() if not namespace or held.header.namespace == namespace]
        self.forget(doomed, "cleared")
        return len(doomed)

    def clear_scope(self, scope: ClearScope) -> int:
        if scope.parent:
            return self._clear_below(scope, self._beginning(scope)) + self._clear_orphans(scope)
        doomed = [chunk for chunk, held in self._chunks.items() if _covers(scope, held.header)]
        self.forget(doomed, "cleared")
        return len(doomed)

    def _beginning(self, scope: ClearScope) -> list[ChunkId]:
        """Chunks that follow the scope's parent and begin with its tokens."""
        children = [c for g in range(scope.groups) for c in self._children.get(ChunkId(g, scope.parent), ())]
        headers = ((child, self._chunks[child].header) for child in children)
        return [c for c, header in headers if header.tokens.startswith(scope.tokens) and header.extra == scope.extra]

    def _clear_below(self, scope: ClearScope, chunks: list[ChunkId]) -> int:
        count = 0
        while chunks:
            chunk = chunks.pop()
            if chunk in self._chunks and _covers(scope, self._chunks[chunk].header):
                self._remove(chunk, "cleared")
                count += 1
                chunks += [c for g in range(scope.groups) for c in self._children.get(ChunkId(g, chunk.key), ())]
        return count

    def _clear_orphans(self, scope: ClearScope) -> int:
        """Nothing tells what a chunk without its parent goes on from: it has to go as well."""
        count = 0
        for chunk in list(self._chunks):
            held = self._chunks.get(chunk)
            if held is None or held.header.start <= scope.start:
                continue
            if not any(ChunkId(g, held.header.parent) in self._chunks for g in range(scope.groups)):
                count += self._clear_below(scope, [chunk])
        return count

    def _remove(self, chunk: ChunkId, reason: str) -> None:
        held = self._chunks.pop(chunk, None)
        if held is None:
            return
        self._bytes -= held.length
        parent = ChunkId(chunk.group, held.header.parent)
        self._children[parent].discard(chunk)
        if not self._children[parent]:
            del self._children[parent]
        self._changes.append(TierChange(chunk, False, reason, header_block(held.block)))

    def statistics(self) -> TierStats:
        values = {
            "bytes": float(self._bytes), "bytes_quota": float(self._quota),
            "chunks": float(len(self._chunks)), "queue_bytes": 0.0,
        }  # fmt: skip
        return TierStats({**values, **self._counts}, {"kind": "memory"})

    def close(self) -> None:
        self._extents.clear()
