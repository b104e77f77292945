"""A store in memory with the client's API: the same promises, no process. Several clients may share one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.errors import StoreUnavailable
from forebay.kvstore.identity import MATCH_UNIT, Chain, Namespace, chain, unpack_tokens
from forebay.kvstore.layout import Shard, needed_from
from forebay.kvstore.protocol import (
    Aside,
    ChunkRead,
    Committed,
    Fetched,
    Found,
    Held,
    Joined,
    NewChunk,
    Reserved,
    Shared,
    Slot,
    Stats,
    Surveyed,
    Written,
)
from forebay.tiers.base import Query
from tests.workers.fake_tier import FakeTier


@dataclass
class Stored:
    """One chunk: what it is, its payload and checksums, and the slot's generation."""

    chunk: NewChunk
    payload: bytearray
    checksums: bytes = b""
    generation: int = 1
    promoted: str = ""


@dataclass
class Room:
    """What one lease has set aside: chunks that are `left`, those that are `lent` to what a tier has brought, by the
    leases that read it, and those that nobody reads any more."""

    left: int
    for_tiers: int
    lent: dict[int, int] = field(default_factory=dict)
    idle: int = 0

    @property
    def count(self) -> int:
        return self.left + sum(self.lent.values()) + self.idle

    def lend(self, lease: int, chunks: int) -> None:
        """As many of them as there is room for; the others have ordinary room."""
        for _ in range(chunks):
            if self.left and sum(self.lent.values()) + self.idle < self.for_tiers:
                self.left -= 1
            elif self.idle:
                self.idle -= 1
            else:
                return
            self.lent[lease] = self.lent.get(lease, 0) + 1

    def spend(self) -> bool:
        """One is to be stored."""
        if self.left:
            self.left -= 1
        elif self.idle:
            self.idle -= 1
        else:
            return False
        return True


@dataclass
class FakeStore:
    """What is stored, and switches for what may go wrong."""

    chunks: dict[tuple[int, bytes], Stored] = field(default_factory=dict)
    open: dict[int, Stored] = field(default_factory=dict)
    namespace: Namespace | None = None
    up: bool = True
    hung: bool = False
    refuse: str = ""
    room: int = 1 << 20
    """Whole chunks that may be set aside at a time, and ever."""
    most_room: int = 1 << 20
    greedy: bool = False
    """There is no ordinary room: a tier takes all that was set aside."""
    asides: dict[int, Room] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    leases: int = 0
    released: int = 0
    parts_released: int = 0
    lookups: int = 0
    reported: list[tuple[int, bytes]] = field(default_factory=list)
    touched: list[tuple[list[tuple[int, bytes]], str, float]] = field(default_factory=list)
    retained: list[float] = field(default_factory=list)
    order: list[NewChunk] = field(default_factory=list)
    clients: list[FakeStoreClient] = field(default_factory=list)
    next_id: int = 1

    def __post_init__(self) -> None:
        self.tier = FakeTier(self)

    def client(self) -> FakeStoreClient:
        """One more client of this store."""
        self.clients.append(FakeStoreClient(self))
        return self.clients[-1]

    def lose_connections(self) -> None:
        """The store dies: every connection is lost, what it held in memory stays."""
        self.up = False
        self.open.clear()
        self.asides.clear()
        for client in self.clients:
            client.connected = False

    def units(
        self, group: int, keys: list[bytes], chunks: dict[tuple[int, bytes], Stored] | None = None
    ) -> dict[int, Stored]:
        """For each unit of a prompt the chunk of `group` that has it: at each place the one that shares most."""
        found: dict[int, Stored] = {}
        shared: dict[int, int] = {}
        position = {key: index for index, key in enumerate(keys)}
        for (owner, _), stored in (self.chunks if chunks is None else chunks).items():
            first = stored.chunk.start // MATCH_UNIT
            wanted = self._matching(stored, first, keys, position)
            if owner == group:
                for unit in range(first, first + wanted):
                    if shared.get(unit, 0) < wanted:
                        found[unit], shared[unit] = stored, wanted
        return found

    def _matching(self, stored: Stored, first: int, keys: list[bytes], position: dict[bytes, int]) -> int:
        """How many units of this chunk the prompt shares."""
        parent_at = position.get(stored.chunk.parent, -1)
        if (parent_at + 1 if parent_at >= 0 else 0) != first:
            return 0
        mine = chain(stored.chunk.parent, stored.chunk.tokens)
        count = 0
        for unit, key in enumerate(mine, start=first):
            if unit >= len(keys) or keys[unit] != key:
                break
            count += 1
        return count


def _read(stored: Stored) -> ChunkRead:
    chunk = stored.chunk
    return ChunkRead(
        chunk.group, chunk.start, len(chunk.tokens) // 4, 0, 0, 0, len(stored.payload), stored.generation,
        chunk.key, stored.promoted,
    )  # fmt: skip


class FakeStoreClient:
    """See `AsyncStoreClient`."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.connected = False
        self.boot = b"boot"

    async def connect(self) -> None:
        if not self.store.up:
            raise StoreUnavailable("down")
        self.connected = True

    async def close(self) -> None:
        self.connected = False

    async def register(self, namespace: Namespace, label: str = "", *, shard: Shard | None = None) -> bytes:
        self._check()
        self.store.namespace = namespace
        return namespace.id

    async def lookup(
        self,
        namespace_id: bytes,
        root: bytes,
        tokens: bytes,
        keys: bytes,
        *,
        limit: int,
        deadline_ms: int,
        tenant: str = "",
    ) -> Found:
        self._check()
        self.store.lookups += 1
        while self.store.hung:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        self._check()
        namespace = self.store.namespace
        assert namespace is not None and namespace.id == namespace_id
        whole = Chain(root, unpack_tokens(tokens), chunk_tokens=namespace.chunk_tokens)
        split = whole.keys
        assert keys == whole.chunk_keys(len(split))
        have = [self.store.units(group, split) for group in range(len(namespace.groups))]
        for hit in range(limit, 0, -MATCH_UNIT):
            need = [needed_from(group, hit) // MATCH_UNIT for group in namespace.groups]
            if all(u in h for n, h in zip(need, have, strict=True) for u in range(n, hit // MATCH_UNIT)):
                return self._found(hit, need, have)
        return Found(rid=0, boot=self.boot, lease=0, hit=0, chunks=[], from_tier={})

    def _found(self, hit: int, need: list[int], have: list[dict[int, Stored]]) -> Found:
        chunks: dict[int, ChunkRead] = {}
        for first, units in zip(need, have, strict=True):
            for unit in range(first, hit // MATCH_UNIT):
                chunks[id(units[unit])] = _read(units[unit])
        self.store.leases += 1
        return Found(
            rid=0, boot=self.boot, lease=self.store.leases, hit=hit, chunks=list(chunks.values()), from_tier={}
        )

    async def survey(
        self, namespace_id: bytes, root: bytes, tokens: bytes, keys: bytes, *, limit: int, deadline_ms: int
    ) -> Surveyed:
        self._check()
        await asyncio.sleep(0)
        return self.store.tier.survey(root, tokens, limit)

    async def fetch(
        self, namespace_id: bytes, root: bytes, tokens: bytes, keys: bytes, *, limit: int,
        wanted: Sequence[tuple[int, int]], deadline_ms: int, tenant: str = "", tokens_from: int = 0, aside: int = 0,
    ) -> Fetched:  # fmt: skip
        self._check()
        chunks, gone = await self.store.tier.fetch(root, tokens, tokens_from, keys, wanted, deadline_ms)
        self._check()
        self.store.leases += 1
        if aside in self.store.asides:
            brought = sum(chunk.group == 0 and bool(chunk.promoted) for chunk in chunks)
            self.store.asides[aside].lend(self.store.leases, brought)
        return Fetched(rid=0, boot=self.boot, lease=self.store.leases, chunks=chunks, gone=gone)

    async def set_aside(
        self, namespace_id: bytes, tenant: str, group: int, chunks: int, *, extra: int = 0, lease_ms: int = 0,
        for_tiers: int = 0,
    ) -> Aside:  # fmt: skip
        self._check()
        while self.store.hung:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        self._check()
        ever, lease = chunks <= self.store.most_room, 0
        if ever and chunks + sum(room.count for room in self.store.asides.values()) <= self.store.room:
            self.store.leases += 1
            lease = self.store.leases
            self.store.asides[lease] = Room(chunks, chunks if self.store.greedy else for_tiers)
        return Aside(rid=0, boot=self.boot, lease=lease, lease_ms=lease_ms, ever=ever)

    def release(self, leases: Sequence[int]) -> None:
        self.store.released += len(leases)
        for lease in leases:
            self.store.asides.pop(lease, None)
            for room in self.store.asides.values():
                room.idle += room.lent.pop(lease, 0)

    def release_chunks(self, lease: int, chunks: Sequence[int]) -> None:
        self.store.parts_released += len(chunks)

    async def join(self, leases: Sequence[int], *, lease_ms: int = 0) -> Joined:
        self._check()
        self.store.joined |= set(leases)
        return Joined(rid=0, boot=self.boot, leases=[Shared(lease, 0, []) for lease in leases], lease_ms=lease_ms)

    async def hold(self, queries: Sequence[Query], *, lease_ms: int) -> Held:
        self._check()
        await asyncio.sleep(0)
        self._check()
        found = [self.store.chunks.get((query.group, query.key)) for query in queries]
        there = [stored for stored in found if stored is not None]
        self.store.leases += 1
        return Held(
            rid=0, boot=self.boot, lease=self.store.leases if there else 0,
            chunks=[_read(stored) for stored in there],
            places=[-1 if stored is None else there.index(stored) for stored in found],
        )  # fmt: skip

    def witness(self, chunk: ChunkRead) -> Callable[[], bool]:
        stored = self.store.chunks[chunk.group, chunk.key]
        return lambda: stored.generation == chunk.generation

    def touch_soon(self, chunks: Sequence[tuple[int, bytes]], *, tenant: str = "", retain_s: float = 0.0) -> None:
        self.store.touched.append((list(chunks), tenant, retain_s))

    async def reserve(
        self, namespace_id: bytes, tenant: str, chunks: Sequence[NewChunk], *, retain_s: float = 0.0, writers: int = 1,
        aside: int = 0,
    ) -> Reserved:  # fmt: skip
        self._check()
        assert writers == 1, "a worker alone shares no chunk"
        while self.store.hung:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        self._check()
        self.store.retained += [retain_s] * len(chunks)
        return Reserved(rid=0, boot=self.boot, slots=[self._reserve(chunk, aside) for chunk in chunks])

    def _reserve(self, chunk: NewChunk, aside: int) -> Slot:
        assert self.store.namespace is not None
        whole = len(chunk.tokens) == 4 * self.store.namespace.chunk_tokens
        kept = aside in self.store.asides and chunk.group == 0 and whole
        known = self.store.chunks.get((chunk.group, chunk.key))
        if self.store.refuse == "busy":
            return Slot("busy")
        if known is not None:
            return Slot("exists", generation=known.generation, kept=kept)
        if not (kept and self.store.asides[aside].spend()) and self.store.refuse:
            return Slot(self.store.refuse)  # type: ignore[arg-type]
        size = self.store.namespace.groups[chunk.group].granule_bytes * (len(chunk.tokens) // 4 // MATCH_UNIT)
        self.store.next_id += 1
        self.store.open[self.store.next_id] = Stored(chunk, bytearray(size))
        return Slot("reserved", self.store.next_id, generation=1, kept=kept)

    async def commit(self, chunks: Sequence[Written]) -> Committed:
        self._check()
        await asyncio.sleep(0)
        done = 0
        for written in chunks:
            stored = self.store.open.pop(written.reservation, None)
            if stored is not None:
                stored.checksums = written.checksums
                self.store.chunks[stored.chunk.group, stored.chunk.key] = stored
                self.store.order.append(stored.chunk)
                done += 1
        return Committed(rid=0, boot=self.boot, committed=done)

    def abort(self, reservations: Sequence[int]) -> None:
        for reservation in reservations:
            self.store.open.pop(reservation, None)

    def damaged(self, chunks: Sequence[tuple[int, bytes]]) -> None:
        for name in chunks:
            self.store.reported.append(name)
            self.store.chunks.pop(name, None)

    def payload(self, chunk: ChunkRead) -> memoryview:
        return memoryview(self.store.chunks[chunk.group, chunk.key].payload)

    def checksums(self, chunk: ChunkRead) -> bytes:
        return self.store.chunks[chunk.group, chunk.key].checksums

    def room(self, slot: Slot, length: int) -> memoryview:
        stored = self.store.open[slot.reservation]
        assert len(stored.payload) == length
        return memoryview(stored.payload)

    def intact(self, chunk: ChunkRead) -> bool:
        return self.store.chunks[chunk.group, chunk.key].generation == chunk.generation

    async def stats(self) -> Stats:
        raise NotImplementedError

    def _check(self) -> None:
        if not self.connected:
            raise StoreUnavailable("not connected")
