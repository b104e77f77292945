"""Small stores in memory for the core's tests: no files, no sockets, no time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from forebay.kvstore.core import Client, StoreCore
from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.facts import HostFact
from forebay.kvstore.header import ChunkHeader, SlotState, decode_header, granule_checksums, mark_slot
from forebay.kvstore.identity import GroupGeometry, Namespace, chunk_keys, pack_tokens, root_key
from forebay.kvstore.limits import Limits
from forebay.kvstore.lookup import Prompt
from forebay.kvstore.protocol import NewChunk, Slot

CHUNK = 32


def namespace(*, window: int = 40, weights: bytes = b"w" * 32, **changes: object) -> Namespace:
    """A tiny hybrid: one full layer and two window layers."""
    groups = (
        GroupGeometry("full", "full", (2,), 1, 8, "float32"),
        GroupGeometry("window", "window", (0, 1), 1, 8, "float32", window),
    )
    return Namespace(weights=weights, groups=groups, chunk_tokens=CHUNK, **changes)  # type: ignore[arg-type]


@dataclass
class FakeMemory:
    """Extents as bytearrays, with the same marks as the real pool."""

    extent_bytes: int = 1 << 16
    extents: dict[int, bytearray] = field(default_factory=dict)

    def write_header(self, slot: SlotRef, block: bytes) -> None:
        self.extents[slot.extent][slot.offset : slot.offset + len(block)] = block

    def read_header(self, slot: SlotRef) -> ChunkHeader:
        return decode_header(memoryview(self.extents[slot.extent])[slot.offset :])

    def mark(self, slot: SlotRef, state: SlotState, generation: int) -> None:
        mark_slot(memoryview(self.extents[slot.extent])[slot.offset : slot.offset + 64], state, generation)

    def cut(self, extent: int, slot_bytes: int) -> None:
        pass


def bare_entry(**fields: Any) -> Entry:
    """A committed entry without a pool, for what looks at its facts alone."""
    plain: dict[str, Any] = dict(
        namespace=b"", group=0, key=b"", parent=b"", start=0, token_count=0, tenant="", home=FakeMemory(),
        slot=SlotRef(0, 0), slot_bytes=4096, header_bytes=0, payload_length=0, generation=1,
        state=SlotState.COMMITTED,
    )  # fmt: skip
    return Entry(**plain | fields)


@dataclass
class SmallStore:
    """A core over fake memory, and what it told."""

    extents: int = 4
    memory: FakeMemory = field(default_factory=FakeMemory)
    facts: list[HostFact] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    policy: str = "lru"

    def __post_init__(self) -> None:
        self.now = 0.0
        self.core = StoreCore(
            self.memory, tell=self.facts.append, limits=self.limits, clock=lambda: self.now, policy=self.policy
        )
        for extent in range(self.extents):
            self.memory.extents[extent] = bytearray(self.memory.extent_bytes)
            self.core.place.add_extent(extent, self.memory.extent_bytes)
        self.namespace = namespace()
        self.namespace_id = self.core.register(self.namespace)
        self.client = Client(b"c" * 16)

    def prompt(
        self,
        tokens: list[int],
        salt: bytes = b"",
        limit: int | None = None,
        extra: bytes = b"",
        lease_s: float = 0.0,
    ) -> Prompt:
        root, packed = root_key(self.namespace_id, salt), pack_tokens(tokens)
        limit = len(tokens) if limit is None else limit
        keys = chunk_keys(root, packed, CHUNK, extra)
        return Prompt(self.namespace_id, self.namespace, root, packed, keys, limit, extra, lease_s)

    def chunks(self, tokens: list[int], salt: bytes = b"") -> list[NewChunk]:
        """Every chunk of a prompt in every group, parents first, the tail last."""
        prompt = self.prompt(tokens, salt)
        return [prompt.chunk(g, p) for p in range(prompt.positions) for g in range(len(self.namespace.groups))]

    def payload(self, chunk: NewChunk) -> bytes:
        """The bytes that the tests store under this key."""
        length = self.namespace.groups[chunk.group].granule_bytes * (len(chunk.tokens) // 64)
        return random.Random(bytes([chunk.group]) + chunk.key).randbytes(length)

    def store(self, chunk: NewChunk, client: Client | None = None) -> Entry | None:
        """Reserve, write and commit one chunk; None if it was refused."""
        client = client or self.client
        slot = self.core.reserve(client, self.namespace_id, "", chunk)
        return self.write_and_commit(client, slot, chunk) if slot.status == "reserved" else None

    def write_and_commit(self, client: Client, slot: Slot, chunk: NewChunk) -> Entry:
        """Write a reserved chunk's bytes and make it visible."""
        data = self.payload(chunk)
        self.memory.extents[slot.extent][slot.payload_offset : slot.payload_offset + len(data)] = data
        granule = self.namespace.groups[chunk.group].granule_bytes
        entry = self.core.commit(client, slot.reservation, granule_checksums(memoryview(data), granule))
        assert entry is not None
        self.core.unpin(entry)
        return entry

    def store_prompt(self, tokens: list[int], salt: bytes = b"") -> None:
        for chunk in self.chunks(tokens, salt):
            self.store(chunk)

    def bytes_of(self, entry: Entry) -> bytes:
        memory = self.memory.extents[entry.slot.extent]
        return bytes(memory[entry.payload_offset : entry.payload_offset + entry.payload_length])
