"""This host's store as peers see it: chunks are pinned and read in place, or room is reserved and written.

The tier's process is a client of its own daemon here. What it pins is held by leases that end by themselves, and by
its connection; what it reserves is quarantined until this process says that it has stopped, or is dead.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from forebay.errors import CorruptChunk, ForebayError, RequestRefused
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.header import ChunkHeader, SlotState, decode_header, mark_slot
from forebay.kvstore.identity import decode_namespace
from forebay.kvstore.protocol import ChunkRead, Held, NewChunk, Written
from forebay.tiers.base import ChunkId, ClearScope, LookupResult, Query
from forebay.tiers.chunks import best_match
from forebay.tiers.p2p.answers import MISS, RETRY
from forebay.tiers.p2p.wire import exact

log = logging.getLogger("forebay.tier.p2p")

LOAN_S = 60.0
"""How long an open chunk stays pinned if it is never closed."""
LENT_LEASES_MAX = 512
LENT_SHARE_LEFT = 0.25
"""With less of its time left a pin isn't taken over by who comes to read."""
RECONNECT_S = 0.25


@dataclass(frozen=True, slots=True)
class Loan:
    """A pinned chunk: its header block with the slot's own fields reset, and its payload in place. `address` is where
    the payload lies for whoever may read this process's memory. `give_back` ends it, once; on the loop, unless
    `anywhere`."""

    block: bytes
    payload: memoryview
    extent: int
    offset: int
    give_back: Callable[[], None]
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """A reserved slot. Exactly one of `commit` and `abort` ends it."""

    payload: memoryview
    reservation: int
    connection: int = 0


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why there is none: have, busy, full, namespace, corrupt, io."""

    reason: str


class Source(Protocol):
    """What the serving side needs of a store. Never raises for what happens to one chunk."""

    async def find(self, queries: Sequence[Query]) -> list[LookupResult]:
        """What memory has; hits stay for a short while. `retry`: it can't say now."""

    async def lend(self, chunk: ChunkId) -> Loan | None:
        """Pin this chunk."""

    def lend_at_once(self, chunk: ChunkId) -> Loan | None:
        """A loan of what is pinned already, from any thread. None: `lend` has to be asked."""

    async def reserve(self, header: ChunkHeader, namespace: bytes) -> Room | NoRoom:
        """Room for a chunk that is pushed here."""

    async def commit(self, room: Room, checksums: bytes) -> bool:
        """The room's bytes are complete and verified."""

    def abort(self, room: Room) -> None:
        """The room isn't written any more."""

    def writable(self, room: Room) -> bool:
        """May the room still be written? Ask before each piece, on the loop."""

    def write(self, room: Room, at: int, piece: memoryview) -> bool:
        """Copy a piece to `at` of the room, from any thread; False if it may not be written any more."""

    async def clear(self, scope: ClearScope) -> int:
        """Forget all of this, in memory and in the tiers; how many chunks memory lost. Raises ForebayError."""

    def damaged(self, chunk: ChunkId) -> None:
        """Somebody has read wrong bytes: the store shall look at this chunk itself."""

    def figures(self) -> dict[str, float]:
        """Gauges and counters."""


@dataclass(slots=True, eq=False)
class _Lent:
    """What was said to be there, pinned until `until`, and for as long as it has `users` after that."""

    lease: int
    size: int
    until: float
    chunks: dict[ChunkId, ChunkRead]
    users: int = 0
    renewed: bool = False
    over: bool = False


@dataclass
class StoreSource(Source):
    """The real one. `extents` are those of the tier, which are the daemon's; `namespaces` encodings by id."""

    address: str
    extents: Mapping[int, memoryview]
    namespaces: Mapping[bytes, bytes]
    lend_s: float
    lend_bytes: int
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("lent", "asked", "lent_no_pin", "rooms", "store_lost"), 0)
    )

    def __post_init__(self) -> None:
        self._client = AsyncStoreClient(self.address, kind="peer")
        self._lent: deque[_Lent] = deque()
        self._by_chunk: dict[ChunkId, _Lent] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._lent_bytes = 0
        self._registered: set[bytes] = set()
        self._connection = 0
        self._welcomed = False
        self._renewing: set[asyncio.Task[None]] = set()

    async def keep_connected(self) -> None:
        """Connect, and again whenever the connection is lost. The store starts its tiers before it serves."""
        while True:
            if not self._client.connected:
                self._forget_connection()
                try:
                    await self._client.connect()
                    self._welcomed = True
                except ForebayError as error:
                    self.counts["store_lost"] += 1
                    log.debug("p2p: this host's store isn't there yet: %s", error)
            self._end_lent(asyncio.get_running_loop().time())
            await asyncio.sleep(RECONNECT_S)

    def _forget_connection(self) -> None:
        """Leases have ended with it. To connect is to say that nothing from before is being written: so from here on
        nothing is."""
        self._welcomed = False
        self._registered.clear()
        with self._lock:  # and so not in the middle of a `write`
            self._connection += 1
            self._lent.clear()
            self._by_chunk.clear()
            self._lent_bytes = 0

    async def close(self) -> None:
        """Let go of everything."""
        await self._client.close()

    @property
    def connected(self) -> bool:
        """Is our store there, and are we welcome?"""
        return self._welcomed and self._client.connected

    # --- reading ---------------------------------------------------------------------------------------

    async def find(self, queries: Sequence[Query]) -> list[LookupResult]:
        self.counts["asked"] += len(queries)
        if not self.connected:
            return [RETRY] * len(queries)  # our store may have it: a miss would say that it hasn't
        try:
            held = await self._client.hold(queries, lease_ms=max(1, int(self.lend_s * 1000)))
        except ForebayError:
            return [RETRY] * len(queries)
        results = [
            MISS if place < 0 else self._result(query, held.chunks[place])
            for query, place in zip(queries, held.places, strict=True)
        ]
        if held.lease:
            self._lend_for_a_while(held)
        return results

    def _result(self, query: Query, chunk: ChunkRead) -> LookupResult:
        try:
            header = decode_header(self._block(chunk))
        except KeyError:  # in an extent that isn't mapped yet
            return RETRY
        except CorruptChunk:
            return MISS
        chunk_id = ChunkId(query.group, chunk.key)
        found = best_match(query, {chunk_id: header})
        if found is None:
            return MISS
        length = chunk.payload_offset - chunk.slot_offset + chunk.length
        return LookupResult("hit", chunk.key, found.matched, header.token_count, length)

    def _lend_for_a_while(self, held: Held) -> None:
        now = asyncio.get_running_loop().time()
        self._end_lent(now)
        size = sum(chunk.length for chunk in held.chunks)
        if self._lent_bytes + size > self.lend_bytes or len(self._lent) >= LENT_LEASES_MAX:
            self.counts["lent_no_pin"] += 1
            self._client.release([held.lease])
            return
        chunks = {ChunkId(chunk.group, chunk.key): chunk for chunk in held.chunks}
        lent = _Lent(held.lease, size, now + self.lend_s, chunks)
        with self._lock:
            self._lent.append(lent)
            self._by_chunk.update(dict.fromkeys(chunks, lent))
            self._lent_bytes += size

    def _end_lent(self, now: float) -> None:
        """Those whose time is over count no more; a lease that was renewed meanwhile ends with its last user."""
        with self._lock:
            while self._lent and self._lent[0].until <= now:
                lent = self._lent.popleft()
                self._lent_bytes -= lent.size
                lent.over = True
                for chunk in lent.chunks:
                    if self._by_chunk.get(chunk) is lent:
                        del self._by_chunk[chunk]
                if lent.renewed and not lent.users:
                    self._client.release([lent.lease])

    def lend_at_once(self, chunk: ChunkId) -> Loan | None:
        """For who was told of the chunk a moment ago: the daemon isn't asked again."""
        with self._lock:
            lent = self._by_chunk.get(chunk)
            left = lent.until - self._loop.time() if lent is not None else 0.0
            if lent is None or left < LENT_SHARE_LEFT * self.lend_s or not self.connected:
                return None
            try:
                loan = self._loan(chunk, lent.chunks[chunk], lambda: self._used(lent), anywhere=True)
            except (CorruptChunk, KeyError):
                return None
            lent.users += 1
            self.counts["lent"] += 1
            first, lent.renewed = not lent.renewed, True
        if first:
            self._loop.call_soon_threadsafe(self._renew_soon, lent.lease)
        return loan

    def _renew_soon(self, lease: int) -> None:
        task = self._loop.create_task(self._renew(lease))
        self._renewing.add(task)
        task.add_done_callback(self._renewing.discard)

    async def _renew(self, lease: int) -> None:
        # What is sent first is done first: the lease is renewed long before it ends.
        with suppress(ForebayError):
            await self._client.join([lease], lease_ms=int(LOAN_S * 1000))

    def _used(self, lent: _Lent) -> None:
        with self._lock:
            lent.users -= 1
            last = lent.over and not lent.users
        if last:
            self._loop.call_soon_threadsafe(self._client.release, [lent.lease])

    def _block(self, chunk: ChunkRead) -> memoryview:
        return self.extents[chunk.extent][chunk.slot_offset : chunk.payload_offset]

    async def lend(self, chunk: ChunkId) -> Loan | None:
        loan = self.lend_at_once(chunk)
        if loan is not None or not self.connected:
            return loan
        try:
            held = await self._client.hold([exact(chunk)], lease_ms=int(LOAN_S * 1000))
        except ForebayError:
            return None
        if not held.lease:
            return None
        try:
            loan = self._loan(chunk, held.chunks[0], lambda: self._client.release([held.lease]))
        except (CorruptChunk, KeyError):
            self._client.release([held.lease])
            return None
        self.counts["lent"] += 1
        return loan

    def _loan(
        self, chunk: ChunkId, read: ChunkRead, give_back: Callable[[], None], *, anywhere: bool = False
    ) -> Loan:
        block = bytearray(self._block(read))
        header = decode_header(memoryview(block))
        if (header.group, header.key, header.payload_length) != (chunk.group, chunk.key, read.length):
            raise CorruptChunk("the slot holds another chunk than the one that was promised")
        mark_slot(memoryview(block), SlotState.COMMITTED, 0)
        payload = self.extents[read.extent][read.payload_offset : read.payload_offset + read.length]
        return Loan(bytes(block), payload, read.extent, read.payload_offset, give_back, anywhere)

    # --- writing ---------------------------------------------------------------------------------------

    async def reserve(self, header: ChunkHeader, namespace: bytes) -> Room | NoRoom:
        if not self.connected:
            return NoRoom("io")
        chunk = NewChunk(header.group, header.key, header.parent, header.start, header.tokens, header.extra)
        try:
            if not await self._knows(header.namespace, namespace):
                return NoRoom("namespace")
            (slot,) = (await self._client.reserve(header.namespace, header.tenant, [chunk])).slots
        except RequestRefused as error:
            self._registered.discard(header.namespace)
            return NoRoom("namespace" if error.code == "namespace" else "corrupt")
        except ForebayError:
            return NoRoom("io")
        if slot.status != "reserved":
            return NoRoom("have" if slot.status in ("exists", "busy") else "full")
        self.counts["rooms"] += 1
        memory = self.extents.get(slot.extent)
        if memory is None:  # granted a moment ago
            self._client.abort([slot.reservation])
            return NoRoom("busy")
        payload = memory[slot.payload_offset : slot.payload_offset + header.payload_length]
        return Room(payload, slot.reservation, self._connection)

    async def _knows(self, namespace: bytes, encoded: bytes) -> bool:
        """Is the namespace registered with our store, or is it now?"""
        if namespace in self._registered:
            return True
        try:
            spec = decode_namespace(self.namespaces.get(namespace) or encoded)
        except ValueError:
            return False
        if spec.id != namespace:
            return False
        await self._client.register(spec)
        self._registered.add(namespace)
        return True

    async def commit(self, room: Room, checksums: bytes) -> bool:
        try:
            return (await self._client.commit([Written(room.reservation, checksums)])).committed == 1
        except ForebayError:
            return False

    def abort(self, room: Room) -> None:
        with suppress(ForebayError):
            self._client.abort([room.reservation])

    def writable(self, room: Room) -> bool:
        return room.connection == self._connection and self.connected

    def write(self, room: Room, at: int, piece: memoryview) -> bool:
        with self._lock:
            if not self.writable(room):
                return False
            room.payload[at : at + len(piece)] = piece
        return True

    async def clear(self, scope: ClearScope) -> int:
        if scope.parent and not await self._knows(scope.namespace, b""):
            return 0  # prefixes are those of a namespace, and of this one nothing has been here
        cleared = await self._client.clear(
            scope.namespace, tenant=scope.tenant, root=scope.parent, start=scope.start, tokens=scope.tokens,
            extra=scope.extra,
        )  # fmt: skip
        return cleared.chunks

    def damaged(self, chunk: ChunkId) -> None:
        self._client.damaged([(chunk.group, chunk.key)])

    def figures(self) -> dict[str, float]:
        return {
            **{f"source.{name}": float(count) for name, count in self.counts.items()},
            "source.lent_bytes": float(self._lent_bytes), "source.lent_leases": float(len(self._lent)),
            "source.connected": float(self.connected),
        }  # fmt: skip
