"""A store's core with any number of chunks, and no bytes behind them: what a table costs, without its pool.

Chunks stand in chains of LINKS, each the only child of the one before. Keys are numbers, not hashes: nothing in a
lookup of exact chunks compares more than keys.
"""

from __future__ import annotations

import gc
import struct
from dataclasses import dataclass

from forebay.kvstore.core import StoreCore
from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.facts import HostFact
from forebay.kvstore.header import ChunkHeader, SlotState, header_bytes
from forebay.kvstore.identity import MATCH_UNIT, GroupGeometry, Namespace
from forebay.kvstore.layout import payload_bytes
from forebay.kvstore.slots import EXTENT_HEADER_BYTES, slot_bytes_for

CHUNK_TOKENS = 32
LINKS = 100
EXTENT_BYTES = 256 << 20
NAMESPACE = Namespace(
    weights=b"synthetic", groups=(GroupGeometry("full", "full", (0,), 1, 8, "float32"),), chunk_tokens=CHUNK_TOKENS
)
SLOT_BYTES = slot_bytes_for(NAMESPACE.groups[0], CHUNK_TOKENS, CHUNK_TOKENS)
SLOTS = (EXTENT_BYTES - EXTENT_HEADER_BYTES) // SLOT_BYTES


def key(number: int) -> bytes:
    """The key of chunk `number`; the root is that of -1."""
    return struct.pack("<q24x", number + 1)


def tokens_of(number: int) -> bytes:
    """The tokens of chunk `number`."""
    return struct.pack("<II", number, number) * (CHUNK_TOKENS // 2)


@dataclass
class NoMemory:
    """A pool without bytes: headers are made up when they are asked for."""

    def read_header(self, slot: SlotRef) -> ChunkHeader:
        """As `PoolMemory.read_header`."""
        number = slot.extent * SLOTS + (slot.offset - EXTENT_HEADER_BYTES) // SLOT_BYTES
        link = number % LINKS
        size = payload_bytes(NAMESPACE.groups[0], CHUNK_TOKENS)
        return ChunkHeader(
            namespace=NAMESPACE.id, group=0, key=key(number), parent=key(number - 1 if link else -1),
            start=link * CHUNK_TOKENS, tokens=tokens_of(number), tenant="", extra=b"", payload_length=size,
            checksums=bytes(8 * CHUNK_TOKENS // MATCH_UNIT),
        )  # fmt: skip

    def write_header(self, slot: SlotRef, block: bytes) -> None:
        """Nothing to write into."""

    def mark(self, slot: SlotRef, state: SlotState, generation: int) -> None:
        """Nothing to write into."""

    def cut(self, extent: int, slot_bytes: int) -> None:
        """Nothing to write into."""


def filled_core(chunks: int, **options: object) -> StoreCore:
    """A core that holds so many chunks (a multiple of LINKS), all of them read and evictable."""
    assert chunks % LINKS == 0
    memory = NoMemory()
    core = StoreCore(memory, tell=_nobody, **options)  # type: ignore[arg-type]
    gc.disable()
    for extent in range(-(-chunks // SLOTS)):
        core.place.add_extent(extent, EXTENT_BYTES)
        core.place.slots.cut(extent, SLOT_BYTES)
    core.register(NAMESPACE)
    namespace, head = NAMESPACE.id, header_bytes(CHUNK_TOKENS)
    size = payload_bytes(NAMESPACE.groups[0], CHUNK_TOKENS)
    last = key(-1)
    for number in range(chunks):
        link = number % LINKS
        extent, place = divmod(number, SLOTS)
        entry = Entry(
            namespace=namespace, group=0, key=key(number), parent=last if link else key(-1), start=link * CHUNK_TOKENS,
            token_count=CHUNK_TOKENS, tenant="", home=memory,
            slot=SlotRef(extent, EXTENT_HEADER_BYTES + place * SLOT_BYTES), slot_bytes=SLOT_BYTES, header_bytes=head,
            payload_length=size, generation=number + 1, state=SlotState.COMMITTED, verified=False,
        )  # fmt: skip
        core.adopt(entry)
        entry.verified = True
        last = entry.key
    gc.enable()
    core.saw_generation(chunks + 1)
    return core


def _nobody(fact: HostFact) -> None:
    """Nobody listens."""


def chain_tokens(chain: int) -> bytes:
    """The prompt of a chain."""
    return b"".join(tokens_of(number) for number in range(chain * LINKS, (chain + 1) * LINKS))


def chain_keys(chain: int) -> bytes:
    """The keys at the ends of a chain's chunks, joined."""
    return b"".join(key(number) for number in range(chain * LINKS, (chain + 1) * LINKS))
