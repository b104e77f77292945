"""What the core tells the outside: facts about chunks, and work for tiers. All are told after they are true."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.header import ChunkHeader, SlotState


@dataclass(frozen=True, slots=True)
class HostFact:
    """A chunk has become readable in host memory, or has left it. `reason` of a removal: evicted, corrupt,
    cleared, replaced."""

    stored: bool
    entry: Entry
    reason: str = ""


class PoolMemory(Protocol):
    """The pool's bytes, as far as the core touches them: slot headers and extent headers only."""

    def write_header(self, slot: SlotRef, block: bytes) -> None:
        """Write a whole header block at the slot's front."""

    def read_header(self, slot: SlotRef) -> ChunkHeader:
        """The header in this slot, verified. Raises CorruptChunk."""

    def mark(self, slot: SlotRef, state: SlotState, generation: int) -> None:
        """Change state and generation of the slot."""

    def cut(self, extent: int, slot_bytes: int) -> None:
        """Record the extent's slot size in its header."""


@dataclass
class Counters:
    """Monotonic counters by dotted name."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount`; a counter begins at 0."""
        self.values[name] = self.values.get(name, 0) + amount
