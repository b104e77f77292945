"""One chunk as the daemon knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from forebay.kvstore.header import SlotState

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


@dataclass(slots=True, eq=False)
class Entry:
    """A chunk in the pool, from its reservation to its removal. Owned and mutated by the core alone.

    `pins` counts whoever needs the bytes to stay (leases, cascade jobs, verification); only an entry with
    none is known to the eviction policy. `verified` is false for an adopted
    chunk that hasn't been read yet. `replaces` is the key of the shorter chunk that this one grew out of.
    `account` is whose bytes its slot counts among.
    """

    namespace: bytes
    group: int
    key: bytes
    parent: bytes
    start: int
    tokens: bytes
    extra: bytes
    tenant: str
    slot: SlotRef
    slot_bytes: int
    payload_offset: int
    payload_length: int
    generation: int
    state: SlotState
    checksums: bytes = b""
    verified: bool = True
    announced: bool = False
    pins: int = 0
    stamp: int = 0
    replaces: bytes = b""
    account: Account | None = None
    tiers: set[str] = field(default_factory=set)

    @property
    def id(self) -> EntryId:
        return EntryId(self.group, self.key)

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 4

    @property
    def end(self) -> int:
        return self.start + self.token_count
