"""A peer as a tier: chunks of another node's memory, pinned there while they are copied. It stores nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.errors import CorruptChunk
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import ChunkHeader, SlotState, encode_header
from forebay.kvstore.service import StoreService
from forebay.testing.simulate.loop import Process
from forebay.testing.simulate.pool import SimPool
from forebay.testing.simulate.tierbase import SimTier, Trouble, answer
from forebay.tiers.base import ChunkId, LookupResult, Query, StoreJob

if TYPE_CHECKING:
    from forebay.testing.simulate.node import Node
    from forebay.testing.simulate.world import World


def readable(entry: Entry) -> ChunkHeader | None:
    """The chunk's header, unless it has rotted in the peer's memory."""
    try:
        return entry.header()
    except CorruptChunk:
        return None


class PeerTier(SimTier):
    """Reads what the other daemons hold. A call runs in the peer's process, after a while, if it lives by then."""

    def __init__(self, world: World, process: Process, name: str, node: Node) -> None:
        super().__init__(world, process, name)
        self._others = [other for other in world.nodes if other is not node]
        self._known: dict[tuple[int, bytes], tuple[float, LookupResult]] = {}
        self._asking: set[tuple[int, bytes]] = set()

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        return [self._find(query) for query in queries]

    def _find(self, query: Query) -> LookupResult:
        name = (query.group, query.key)
        known = self._known.pop(name, None)
        if known is not None and known[0] > self.world.loop.time():
            return known[1]
        if name not in self._asking:
            self._asking.add(name)
            self.process.spawn(self._ask(name, query))
        return LookupResult("retry")

    async def _ask(self, name: tuple[int, bytes], query: Query) -> None:
        await self.world.sleep(self.rng.choice((0.0005, 0.01)))
        headers, lengths = {}, {}
        for node in self._others:
            daemon = node.running
            if daemon is None or daemon.service is None or daemon.process.stopped:
                continue
            for entry in daemon.service.core.table.children(query.group, query.parent):
                chunk = ChunkId(entry.group, entry.key)
                if entry.verified and entry.state is SlotState.COMMITTED and (header := readable(entry)):
                    headers[chunk] = header
                    lengths[chunk] = entry.payload_offset - entry.slot.offset + entry.payload_length
        self._known[name] = (self.world.loop.time() + 0.5, self.lied([answer(query, headers, lengths)])[0])
        self._asking.discard(name)
        self._wake()

    async def fetch(self, chunk: ChunkId) -> bytes:
        for node in self._others:
            daemon = node.running
            if daemon is None or daemon.service is None:
                continue
            answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            daemon.process.spawn(self._lend(daemon.service, daemon.pool, chunk, answer))
            try:
                blob = await asyncio.wait_for(answer, 0.5)
            except TimeoutError as error:
                raise Trouble("io") from error
            if blob:
                return blob
        raise Trouble("missing")

    async def _lend(self, service: StoreService, pool: SimPool, chunk: ChunkId, answer: asyncio.Future[bytes]) -> None:
        """In the peer's process: the chunk's bytes, pinned while they leave; nothing if it isn't there."""
        core, blob = service.core, b""
        entry = core.table.get(chunk.group, chunk.key)
        if entry is not None and entry.verified and entry.state is SlotState.COMMITTED:
            core.pin(entry)
            await self.world.sleep(self.rng.choice((0.0005, 0.02)))
            view = pool.views[entry.slot.extent]
            end = entry.payload_offset + entry.payload_length
            if header := readable(entry):
                blob = encode_header(header) + bytes(view[entry.payload_offset : end])
            core.unpin(entry)
        if not answer.done():
            answer.set_result(blob)

    async def keep(self, job: StoreJob, blob: bytes) -> None:
        raise Trouble("quota")

    def clear(self, namespace: bytes) -> int:
        return 0
