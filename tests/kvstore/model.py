"""A core in memory that can be killed and started again, a tier for it, and what the dumb model knows of both."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from forebay.kvstore.aside import Aside
from forebay.kvstore.cascade import Cascade, Load, TierTraffic
from forebay.kvstore.core import Client, StoreCore
from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.facts import HostFact
from forebay.kvstore.header import (
    ChunkHeader,
    SlotState,
    decode_header,
    encode_header,
    granule_checksums,
    mark_slot,
)
from forebay.kvstore.identity import chunk_keys, pack_tokens, root_key
from forebay.kvstore.limits import Limits
from forebay.kvstore.lookup import Prompt
from forebay.kvstore.protocol import NewChunk, Slot
from forebay.kvstore.readopt import readopt
from forebay.kvstore.slots import EXTENT_HEADER_BYTES
from forebay.tiers.base import ChunkId, LoadJob, LookupResult, Query, StoreJob
from tests.kvstore.support import CHUNK, FakeMemory, namespace

TIER = "files"
TIER_OWNER = b"tier" * 4
LIMITS = Limits(pin_share=0.2, retain_share=0.15)


@dataclass
class Pool(FakeMemory):
    """Extents that outlive a core, with what an extent's header says of its cut."""

    cuts: dict[int, int] = field(default_factory=dict)

    def cut(self, extent: int, slot_bytes: int) -> None:
        memory = memoryview(self.extents[extent])
        for offset in range(EXTENT_HEADER_BYTES, self.extent_bytes - slot_bytes + 1, slot_bytes):
            mark_slot(memory[offset : offset + 64], SlotState.FREE, 0)
        self.cuts[extent] = slot_bytes

    def map(self, extent: int) -> memoryview:
        return memoryview(self.extents[extent])

    def cut_of(self, extent: int) -> int:
        return self.cuts.get(extent, 0)


@dataclass(eq=False)
class Granted:
    """A slot that a process may write: `chunk` into `slot`. Given up on, it is a zombie that may go on writing."""

    client: Client
    slot: Slot
    chunk: NewChunk

    @property
    def ref(self) -> SlotRef:
        return SlotRef(self.slot.extent, self.slot.slot_offset)


@dataclass(eq=False)
class Leased:
    """A lease as its holder knows it: chunks with their bytes and generations, and when it ends."""

    client: Client
    lease: int
    seen: list[tuple[Entry, bytes, int]]
    until: float


@dataclass(eq=False)
class Promised:
    """Room that was set aside, as its holder knows it: slots that are `left`, those that are lent to tiers among them,
    chunks that it has stored with it, and when it ends."""

    client: Client
    lease: int
    tenant: str
    group: int
    left: int
    kept: list[Entry]
    until: float

    @property
    def room(self) -> Aside:
        """What the core has of it."""
        aside = self.client.leases[self.lease].aside
        assert aside is not None
        return aside

    @property
    def can_store(self) -> bool:
        """Is there a slot, or one whose chunk nobody reads?"""
        idle = (e for e in self.room.lent if e.state is SlotState.COMMITTED and e.pins == 1)
        return bool(self.room.slots) or next(idle, None) is not None


@dataclass(eq=False)
class Waiting:
    """A lookup that waits for loads."""

    loads: list[Load]
    held: list[Entry]


@dataclass
class Files:
    """The dumb tier: what it has, the jobs that it hasn't reported yet, and the results of those that are done."""

    chunks: dict[ChunkId, tuple[bytes, bytes]] = field(default_factory=dict)
    jobs: list[StoreJob | LoadJob] = field(default_factory=list)
    done: dict[int, bytes] = field(default_factory=dict)

    def lookup(self, query: Query) -> LookupResult:
        """Exact keys only."""
        block, payload = self.chunks.get(ChunkId(query.group, query.key), (b"", b""))
        tokens = len(query.tokens) // 4
        return (
            LookupResult("hit", query.key, tokens, tokens, len(block) + len(payload)) if block else LookupResult("miss")
        )


class World:
    """One pool, one core after another, clients, a tier."""

    def __init__(self, extents: int) -> None:
        self.memory, self.namespace = Pool(), namespace()
        self.extents = extents
        for extent in range(extents):
            self.memory.extents[extent] = bytearray(self.memory.extent_bytes)
        self.now, self.boots, self.names = 0.0, 0, 0
        self.files = Files()
        self.zombies: list[Granted] = []
        self.start(set())

    def start(self, alive: set[bytes]) -> None:
        """A new core over the pool as it is. `alive` are processes that may still write."""
        self.boots += 1
        self.facts: list[HostFact] = []
        self.core = StoreCore(
            self.memory, tell=self.facts.append, limits=LIMITS, first_generation=self.boots << 40,
            clock=lambda: self.now,
        )  # fmt: skip
        for extent in range(self.extents):
            if not self.memory.cut_of(extent):
                self.core.place.add_extent(extent, self.memory.extent_bytes)
        if self.boots == 1:
            self.namespace_id = self.core.register(self.namespace)
        self.core.remember(self.namespace)
        readopt(self.core, self.memory, sorted(self.memory.cuts), lambda owner: [owner] if owner in alive else [])  # type: ignore[arg-type]
        self.cascade = Cascade(self.core)
        self.cascade.tiers[TIER] = TierTraffic(TIER, TIER_OWNER)
        self.files.jobs.clear()
        self.files.done.clear()
        self.clients = [self.client() for _ in range(3)]
        self.granted: list[Granted] = []
        self.leases: list[Leased] = []
        self.asides: list[Promised] = []
        self.waiting: list[Waiting] = []

    def client(self) -> Client:
        """A connection of a process that is new."""
        self.names += 1
        client = Client(self.names.to_bytes(16, "big"), b"engine" if self.names % 2 else b"")
        self.core.leases.attach(client)
        return client

    # --- prompts ---------------------------------------------------------------------------------------

    def prompt(self, tokens: list[int], limit: int | None = None, lease_s: float = 0.0) -> Prompt:
        root, packed = root_key(self.namespace_id), pack_tokens(tokens)
        keys = chunk_keys(root, packed, CHUNK)
        limit = len(tokens) if limit is None else limit
        return Prompt(self.namespace_id, self.namespace, root, packed, keys, limit, lease_s=lease_s)

    def chunks(self, tokens: list[int]) -> list[NewChunk]:
        prompt = self.prompt(tokens)
        return [prompt.chunk(g, p) for p in range(prompt.positions) for g in range(len(self.namespace.groups))]

    # --- bytes -----------------------------------------------------------------------------------------

    def payload(self, group: int, key: bytes, tokens: int) -> bytes:
        """The only right bytes under this key."""
        length = self.namespace.groups[group].granule_bytes * (tokens // 16)
        return random.Random(bytes([group]) + key).randbytes(length)

    def right(self, entry: Entry) -> bytes:
        return self.payload(entry.group, entry.key, entry.token_count)

    def bytes_of(self, entry: Entry) -> bytes:
        memory = self.memory.extents[entry.slot.extent]
        return bytes(memory[entry.payload_offset : entry.payload_offset + entry.payload_length])

    def write(self, slot: Slot, data: bytes) -> None:
        self.memory.extents[slot.extent][slot.payload_offset : slot.payload_offset + len(data)] = data

    def checksums(self, group: int, data: bytes) -> bytes:
        return granule_checksums(memoryview(data), self.namespace.groups[group].granule_bytes)

    def header(self, slot: SlotRef) -> ChunkHeader:
        return decode_header(memoryview(self.memory.extents[slot.extent])[slot.offset :])

    # --- the tier --------------------------------------------------------------------------------------

    def do_job(self, job: StoreJob | LoadJob) -> bytes:
        """Carry a job out, if that hasn't been done; its header block, b"" if it fails."""
        if job.id in self.files.done:
            return self.files.done.pop(job.id)
        memory = self.memory.extents[job.extent]
        if isinstance(job, StoreJob):
            slot = bytes(memory[job.offset : job.offset + job.length])
            header = decode_header(slot)
            block = encode_header(header)
            self.files.chunks[job.chunk] = block, slot[len(block) :]
            return block
        block, payload = self.files.chunks.get(job.chunk, (b"", b""))
        if not block or len(payload) > job.capacity:
            return b""
        memory[job.payload_offset : job.payload_offset + len(payload)] = payload
        return block

    def have_in_tier(self, chunk: NewChunk, tenant: str) -> None:
        """The tier has this chunk, as some earlier store left it there."""
        data = self.payload(chunk.group, chunk.key, len(chunk.tokens) // 4)
        header = ChunkHeader(
            namespace=self.namespace_id, group=chunk.group, key=chunk.key, parent=chunk.parent, start=chunk.start,
            tokens=chunk.tokens, tenant=tenant, extra=chunk.extra, payload_length=len(data),
            checksums=self.checksums(chunk.group, data), owner=b"",
        )  # fmt: skip
        self.files.chunks.setdefault(ChunkId(chunk.group, chunk.key), (encode_header(header), data))

    # --- what must add up ------------------------------------------------------------------------------

    def pins_expected(self) -> Counter[Entry]:
        """Pins by entry, counted by whoever has them."""
        found: Counter[Entry] = Counter()
        for client in self.clients:
            for hold in client.leases.values():
                found.update(entry for entry in hold.entries if entry is not None)
        found.update(self.cascade.tiers[TIER].stores.values())
        for waiting in self.waiting:
            found.update(waiting.held)
            found.update(load.entry for load in waiting.loads if load.ok)
        for entry in self.core.table:
            if entry.state in (SlotState.RESERVED, SlotState.PROMOTING):
                found[entry] += 1
            found[entry] += self.core.pins.is_hard(entry)
            found[entry] += entry in self.core.aside.lent
        return +found
