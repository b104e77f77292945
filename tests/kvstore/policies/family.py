"""Chains of chunks without bytes, and a store reduced to what policies see of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.header import ChunkHeader, SlotState
from forebay.kvstore.policies.base import EvictionPolicy

CHUNK = 64
SIZES = (4096, 1024)


class Nowhere:
    def read_header(self, slot: SlotRef) -> ChunkHeader:
        raise NotImplementedError


def make_entry(key: bytes, parent: bytes = b"root", start: int = 0, size: int = SIZES[0], tokens: int = CHUNK) -> Entry:
    return Entry(
        namespace=b"n", group=0, key=key, parent=parent, start=start, token_count=tokens, tenant="",
        home=Nowhere(), slot=SlotRef(0, 0), slot_bytes=size, header_bytes=0, payload_length=size, generation=1,
        state=SlotState.COMMITTED,
    )  # fmt: skip


class Family:
    """A lineage that is searched through each time."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def parent(self, entry: Entry) -> Entry | None:
        return next((e for e in self.entries if e.key == entry.parent), None)

    def dependents(self, entry: Entry) -> list[Entry]:
        return [e for e in self.entries if e.parent == entry.key]

    def chain(self, entry: Entry) -> list[Entry]:
        """`entry` and all that it needs, deepest first."""
        found = [entry]
        while (parent := self.parent(found[-1])) is not None:
            found.append(parent)
        return found


@dataclass
class SmallStore:
    """Does to several policies what the daemon does: all hear the same, each gives its own answer."""

    family: Family
    policies: list[EvictionPolicy]
    pins: dict[Entry, int] = field(default_factory=dict)
    serial: int = 0

    def store(self, parent: Entry | None, size: int) -> Entry:
        self.serial += 1
        key = self.serial.to_bytes(4, "big")
        entry = make_entry(key, parent.key if parent else b"root", parent.end if parent else 0, size)
        return self.take_in(entry)

    def take_in(self, entry: Entry) -> Entry:
        self.family.entries.append(entry)
        self.pins[entry] = 0
        for policy in self.policies:
            policy.add(entry)
        return entry

    def pin(self, entry: Entry) -> None:
        self.pins[entry] += 1
        if self.pins[entry] == 1:
            for policy in self.policies:
                policy.remove(entry)

    def unpin(self, entry: Entry) -> None:
        self.pins[entry] -= 1
        if self.pins[entry] == 0:
            for policy in self.policies:
                policy.add(entry)

    def use(self, entry: Entry) -> None:
        chain = self.family.chain(entry)
        for link in chain:
            self.pin(link)
        for link in chain:
            self.unpin(link)

    def demote(self, entry: Entry) -> None:
        for policy in self.policies:
            policy.demote(entry)

    def victims(self, size: int) -> list[Entry | None]:
        return [policy.victim(size) for policy in self.policies]

    def evict(self, entry: Entry) -> None:
        """Its dependents in slots of other sizes first."""
        for dependent in self.family.dependents(entry):
            self.evict(dependent)
        for policy in self.policies:
            policy.evicted(entry)
        self.lose(entry)

    def lose(self, entry: Entry) -> None:
        self.family.entries.remove(entry)
        for policy in self.policies:
            policy.remove(entry)
            policy.forget(entry)
        del self.pins[entry]

    def pinned_below(self, entry: Entry) -> bool:
        return any(self.pins[e] or self.pinned_below(e) for e in self.family.dependents(entry))
