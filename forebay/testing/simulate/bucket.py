"""An object store: everything takes long, others delete things, and listings are of yesterday."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.kvstore.header import ChunkHeader
from forebay.testing.simulate.loop import Process
from forebay.testing.simulate.tierbase import SimTier, Trouble, answer, split_blob
from forebay.tiers.base import ChunkId, LookupResult, Query, StoreJob

if TYPE_CHECKING:
    from forebay.testing.simulate.world import World


class Bucket:
    """The objects, shared by all nodes. `seen` is what a listing says, which lags behind."""

    def __init__(self, world: World) -> None:
        self.objects: dict[ChunkId, bytes] = {}
        self.seen: dict[ChunkId, ChunkHeader] = {}
        self.lengths: dict[ChunkId, int] = {}
        self._world = world

    def put(self, chunk: ChunkId, blob: bytes) -> None:
        """Store an object; the first one under a name stays."""
        if chunk in self.objects:
            return
        self.objects[chunk] = blob
        late = self._world.strikes("bucket_lists_late", 0.5, self._world.tier_rng)
        self._world.loop.call_later(0.5 if late else 0.0, self._list, chunk, context=self._world.kernel)

    def _list(self, chunk: ChunkId) -> None:
        if chunk in self.objects:
            blob = self.objects[chunk]
            self.seen[chunk], self.lengths[chunk] = split_blob(blob)[0], len(blob)

    def delete(self, chunk: ChunkId) -> None:
        """Remove an object, now, and from listings at some later time."""
        self.objects.pop(chunk, None)
        late = self._world.strikes("bucket_lists_late", 0.5, self._world.tier_rng)
        self._world.loop.call_later(0.5 if late else 0.0, self._unlist, chunk, context=self._world.kernel)

    def _unlist(self, chunk: ChunkId) -> None:
        if chunk not in self.objects:
            self.seen.pop(chunk, None)


class BucketTier(SimTier):
    """Lookups are answered `retry` until the store has said what it lists."""

    def __init__(self, world: World, process: Process, name: str, bucket: Bucket) -> None:
        super().__init__(world, process, name)
        self._bucket = bucket
        self._known: dict[tuple[int, bytes], tuple[float, LookupResult]] = {}
        self._asking: set[tuple[int, bytes]] = set()

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        return [self._find(query) for query in queries]

    def _find(self, query: Query) -> LookupResult:
        name = (query.group, query.key)
        known = self._known.get(name)
        if known is not None and known[0] > self.world.loop.time():
            return known[1]
        if name not in self._asking:
            self._asking.add(name)
            self.process.spawn(self._ask(name, query))
        return LookupResult("retry")

    async def _ask(self, name: tuple[int, bytes], query: Query) -> None:
        await self.world.sleep(self.rng.choice((0.002, 0.02)))
        result = self.lied([answer(query, self._bucket.seen, self._bucket.lengths)])[0]
        while len(self._known) >= 64:
            del self._known[next(iter(self._known))]
        self._known[name] = (self.world.loop.time() + self.rng.choice((0.02, 0.3)), result)
        self._asking.discard(name)
        self._wake()

    async def keep(self, job: StoreJob, blob: bytes) -> None:
        await self.world.sleep(self.rng.choice((0.005, 0.05)))
        block = split_blob(blob)[1]
        known = job.chunk in self._bucket.objects
        self._bucket.put(job.chunk, blob)
        if not known:
            self.changed(job.chunk, True, "", block)
        if job.replaces:
            self.lost(ChunkId(job.chunk.group, job.replaces), "replaced")

    async def fetch(self, chunk: ChunkId) -> bytes:
        await self.world.sleep(self.rng.choice((0.003, 0.03)))
        if chunk not in self._bucket.objects:
            raise Trouble("missing")
        return self._bucket.objects[chunk]

    def someone_else(self, chunk: ChunkId) -> ChunkId | None:
        others = [other for other in self._bucket.objects if other != chunk]
        return self.rng.choice(others) if others else None

    def lost(self, chunk: ChunkId, reason: str) -> None:
        if chunk in self._bucket.objects:
            self._bucket.delete(chunk)
            self._known.pop((chunk.group, chunk.key), None)
            self.changed(chunk, False, reason)

    def clear(self, namespace: bytes) -> int:
        doomed = [c for c, blob in self._bucket.objects.items() if namespace in (b"", split_blob(blob)[0].namespace)]
        for chunk in doomed:
            self.lost(chunk, "cleared")
        return len(doomed)
