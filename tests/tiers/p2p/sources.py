"""A store in a dict, in the place of a daemon: what a p2p tier serves its peers from."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.errors import CorruptChunk
from forebay.kvstore.header import ChunkHeader, encode_header
from forebay.testing.conformance import Made
from forebay.tiers.base import ChunkId, ClearScope, LookupResult, Query
from forebay.tiers.chunks import best_match, verify_payload
from forebay.tiers.p2p.answers import MISS
from forebay.tiers.p2p.source import Loan, NoRoom, Room


@dataclass
class Kept:
    header: ChunkHeader
    block: bytes
    payload: bytearray


@dataclass
class DictSource:
    """The tier's loop uses it, tests look into it. While `gate` is shut nothing answers."""

    chunks: dict[ChunkId, Kept] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    lent: int = 0
    rooms: dict[int, ChunkHeader] = field(default_factory=dict)
    asked: int = 0
    room_for: int = 1 << 30
    cleared: list[ClearScope] = field(default_factory=list)
    told_damaged: list[ChunkId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()
        self._serial = 0

    def put(self, chunk: Made) -> None:
        self.chunks[chunk.id] = Kept(chunk.header, chunk.block, bytearray(chunk.payload))

    async def _opened(self) -> None:
        while not self.gate.is_set():
            await asyncio.sleep(0.001)

    async def find(self, queries: Sequence[Query]) -> list[LookupResult]:
        await self._opened()
        self.asked += len(queries)
        return [self._find(query) for query in queries]

    def _find(self, query: Query) -> LookupResult:
        of_group = {c: kept.header for c, kept in self.chunks.items() if c.group == query.group}
        found = best_match(query, of_group)
        if found is None:
            return MISS
        kept = self.chunks[found.chunk]
        length = len(kept.block) + len(kept.payload)
        return LookupResult("hit", found.chunk.key, found.matched, kept.header.token_count, length)

    async def lend(self, chunk: ChunkId) -> Loan | None:
        await self._opened()
        kept = self.chunks.get(chunk)
        if kept is None:
            return None
        self.lent += 1
        return Loan(kept.block, memoryview(kept.payload), 0, 0, self._give_back)

    def lend_at_once(self, chunk: ChunkId) -> Loan | None:
        return None

    def _give_back(self) -> None:
        self.lent -= 1

    async def reserve(self, header: ChunkHeader, namespace: bytes) -> Room | NoRoom:
        await self._opened()
        if ChunkId(header.group, header.key) in self.chunks:
            return NoRoom("have")
        if header.payload_length > self.room_for:
            return NoRoom("full")
        self._serial += 1
        self.rooms[self._serial] = header
        return Room(memoryview(bytearray(header.payload_length)), self._serial)

    async def commit(self, room: Room, checksums: bytes) -> bool:
        header = self.rooms.pop(room.reservation)
        payload = room.payload.obj
        assert isinstance(payload, bytearray) and checksums == header.checksums
        self.chunks[ChunkId(header.group, header.key)] = Kept(header, encode_header(header), payload)
        return True

    def abort(self, room: Room) -> None:
        self.rooms.pop(room.reservation, None)

    def writable(self, room: Room) -> bool:
        return room.reservation in self.rooms

    def write(self, room: Room, at: int, piece: memoryview) -> bool:
        if not self.writable(room):
            return False
        room.payload[at : at + len(piece)] = piece
        return True

    async def clear(self, scope: ClearScope) -> int:
        await self._opened()
        self.cleared.append(scope)
        gone = [chunk for chunk, kept in self.chunks.items() if scope.namespace in (b"", kept.header.namespace)]
        for chunk in gone:
            del self.chunks[chunk]
        return len(gone)

    def damaged(self, chunk: ChunkId) -> None:
        self.told_damaged.append(chunk)
        kept = self.chunks.get(chunk)
        try:
            if kept is not None:
                verify_payload(kept.header, memoryview(kept.payload))
        except CorruptChunk:
            del self.chunks[chunk]

    def figures(self) -> dict[str, float]:
        return {"source.lent": float(self.lent)}
