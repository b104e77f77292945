"""One chunk as the daemon knows it: small, since a pool may hold a million.

What only a few look at (tokens, extra, checksums) stays where it is anyway, in the slot's header in the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from forebay.kvstore.header import ChunkHeader, SlotState

if TYPE_CHECKING:
    from forebay.kvstore.tenancy import Account


class EntryId(NamedTuple):
    """What the table is keyed by. The key ends a chain that began at the namespace, so it needs no more."""

    group: int
    key: bytes


class SlotRef(NamedTuple):
    """A slot of the pool: byte `offset` of an extent."""

    extent: int
    offset: int


class Home(Protocol):
    """Where slots are."""

    def read_header(self, slot: SlotRef) -> ChunkHeader:
        """The header in this slot, verified. Raises CorruptChunk."""


NO_TIERS: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Entry:
    """A chunk in the pool, from its reservation to its removal. Owned and mutated by the core alone.

    `pins` counts whoever needs the bytes to stay (leases, cascade jobs, verification); only an entry with
    none is known to the eviction policy. `hits` are lookups that it served, where a tier wants to know.
    `verified` is false for an adopted chunk that hasn't been read yet. `replaces` is the key of the shorter chunk that
    this one grew out of. `tiers` are those that have it, a set that entries share. `account` is whose bytes its slot
    counts among, `note` what the eviction policy keeps of it, `order`, `older` and `newer` are its place in one.
    """

    namespace: bytes
    group: int
    key: bytes
    parent: bytes
    start: int
    token_count: int
    tenant: str
    home: Home
    slot: SlotRef
    slot_bytes: int
    header_bytes: int
    payload_length: int
    generation: int
    state: SlotState
    verified: bool = True
    announced: bool = False
    pins: int = 0
    stamp: int = 0
    hits: int = 0
    replaces: bytes = b""
    account: Account | None = None
    note: object = field(default=None, repr=False)
    order: object = field(default=None, repr=False)
    older: Entry | None = field(default=None, repr=False)
    newer: Entry | None = field(default=None, repr=False)
    tiers: frozenset[str] = NO_TIERS

    @property
    def id(self) -> EntryId:
        return EntryId(self.group, self.key)

    @property
    def end(self) -> int:
        return self.start + self.token_count

    @property
    def payload_offset(self) -> int:
        """Where the payload begins in the extent."""
        return self.slot.offset + self.header_bytes

    def header(self) -> ChunkHeader:
        """What the slot's header says: tokens, extra, checksums. Raises CorruptChunk."""
        return self.home.read_header(self.slot)
