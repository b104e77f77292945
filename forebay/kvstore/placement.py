"""Finding room for a chunk: a free slot, an uncut extent, the coldest victim, or a whole colder extent.

The byte budget is hard: extents are all there is. Full means evict, else refuse the store; never wait,
never grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.policies.base import EvictionPolicy
from forebay.kvstore.policies.lru import Lru
from forebay.kvstore.slots import EXTENT_HEADER_BYTES, Extent, SlotAllocator

PAGE_SLOTS = 64
"""How many slots a step of a walk looks at."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries of the pool, and where to go on (0: this was the last page)."""

    entries: list[Entry]
    cursor: int


@dataclass
class Placement:
    """Slots, and which of them may be taken from whom.

    `evict` is the core's: it must remove the entry everywhere and give its slot back. `cut` writes an
    extent's new slot size into the extent, before any of its slots is used.

    `kept` entries (soft pins, retention) are taken only when nothing else is left; what is `pinned` never.
    `residents` has an entry or None for each slot of an extent, in the order of their offsets.
    """

    evict: Callable[[Entry, str], None]
    cut: Callable[[int, int], None]
    new_policy: Callable[[], EvictionPolicy] = Lru
    slots: SlotAllocator = field(default_factory=SlotAllocator)
    residents: dict[int, list[Entry | None]] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    kept: set[Entry] = field(default_factory=set)
    kept_in: dict[int, int] = field(default_factory=dict)
    stamp: int = 0

    def __post_init__(self) -> None:
        self.policy = self.new_policy()
        self.last_resort: EvictionPolicy = Lru()

    def add_extent(self, extent: int, size: int) -> None:
        """Take an uncut extent into the budget."""
        self.slots.add_extent(extent, size)
        self.residents[extent], self.busy[extent], self.kept_in[extent] = [], 0, 0

    def take(self, slot_bytes: int) -> SlotRef | None:
        """A slot of this size, evicting if need be; None if nothing may be evicted. May call `evict`."""
        slot = self.slots.take(slot_bytes)
        if slot is not None:
            return slot
        if self._cut_one(slot_bytes):
            return self.slots.take(slot_bytes)
        victim = self.policy.victim(slot_bytes)
        extent = self._coldest_extent(slot_bytes, victim.stamp if victim else None)
        if extent is not None:
            self._evict_all(extent)
            return self.slots.take(slot_bytes) if self._cut_one(slot_bytes) else None
        if victim is None:
            return self._take_kept(slot_bytes)
        self.evict(victim, "evicted")
        return self.slots.take(slot_bytes) or self._retake(slot_bytes)

    def _take_kept(self, slot_bytes: int) -> SlotRef | None:
        """Everything else is in use: what is only kept softly has to go."""
        victim = self.last_resort.victim(slot_bytes)
        if victim is not None:
            self.evict(victim, "evicted")
            return self.slots.take(slot_bytes) or self._retake(slot_bytes)
        extent = self._coldest_extent(slot_bytes, None, kept_too=True)
        if extent is None:
            return None
        self._evict_all(extent)
        return self._retake(slot_bytes)

    def _retake(self, slot_bytes: int) -> SlotRef | None:
        # The victim was the last in its extent, which thereby became uncut.
        return self.slots.take(slot_bytes) if self._cut_one(slot_bytes) else None

    def _cut_one(self, slot_bytes: int) -> bool:
        extent = self.slots.any_uncut()
        if extent is None:
            return False
        self.cut(extent, slot_bytes)
        self.slots.cut(extent, slot_bytes)
        return True

    def _coldest_extent(self, slot_bytes: int, colder_than: int | None, *, kept_too: bool = False) -> Extent | None:
        """The least recently used extent of another size that nothing holds; walks extents, not entries.

        With `colder_than` it must be colder as a whole than that: sizes compete by recency, so capacity
        follows the traffic an extent at a time.
        """
        movable = [
            extent
            for extent in self.slots.extents.values()
            if extent.slot_bytes not in (0, slot_bytes)
            and not self.busy[extent.id]
            and (kept_too or not self.kept_in[extent.id])
        ]
        coldest = min(movable, key=lambda extent: extent.last_used, default=None)
        if coldest is None or (colder_than is not None and coldest.last_used >= colder_than):
            return None
        return coldest

    def _evict_all(self, extent: Extent) -> None:
        for entry in list(self.residents[extent.id]):
            if entry is not None:
                self.evict(entry, "evicted")
        assert extent.used == 0, "an extent that nothing holds is empty once its entries are evicted"

    def settle(self, entry: Entry) -> None:
        """`entry` lives in its slot now, and counts as busy until it is `released`."""
        extent = self.slots.extents[entry.slot.extent]
        if len(self.residents[extent.id]) != extent.capacity:  # it has been cut anew
            self.residents[extent.id] = [None] * extent.capacity
        self.residents[extent.id][self._number(entry.slot)] = entry
        self.busy[extent.id] += 1

    def _number(self, slot: SlotRef) -> int:
        return (slot.offset - EXTENT_HEADER_BYTES) // self.slots.extents[slot.extent].slot_bytes

    def hold_slot(self, slot: SlotRef) -> None:
        """A slot without an entry (quarantine) keeps its extent from being moved."""
        self.busy[slot.extent] += 1

    def drop_slot(self, slot: SlotRef) -> None:
        """A quarantined slot is free again."""
        self.busy[slot.extent] -= 1
        self.slots.give_back(slot)

    def released(self, entry: Entry) -> None:
        """Nobody pins `entry` any more: it may be evicted, and was just used."""
        self.busy[entry.slot.extent] -= 1
        self.stamp += 1
        entry.stamp = self.stamp
        self.slots.extents[entry.slot.extent].last_used = self.stamp
        self._order(entry).add(entry)

    def pinned(self, entry: Entry) -> None:
        """Somebody needs `entry`: it can't be evicted."""
        self.busy[entry.slot.extent] += 1
        self._order(entry).remove(entry)

    def _order(self, entry: Entry) -> EvictionPolicy:
        return self.last_resort if entry in self.kept else self.policy

    def keep(self, entry: Entry) -> None:
        """From now on `entry` is taken only when nothing else is left. It must not be kept already."""
        if entry.pins == 0:
            self.policy.remove(entry)
            self.last_resort.add(entry)
        self.kept.add(entry)
        self.kept_in[entry.slot.extent] += 1

    def unkeep(self, entry: Entry) -> None:
        """`entry` is worth as much as any other again. It must be kept."""
        self.kept.remove(entry)
        self.kept_in[entry.slot.extent] -= 1
        if entry.pins == 0:
            self.last_resort.remove(entry)
            self.policy.add(entry)

    def demote(self, entry: Entry) -> None:
        """`entry` is the first to go, if it may go at all."""
        entry.stamp = 0
        self.policy.demote(entry)

    def leave(self, entry: Entry, *, keep_slot: bool = False) -> None:
        """`entry` is gone. Its slot is free, or with `keep_slot` stays held (quarantine)."""
        evictable = entry.pins == 0
        self.residents[entry.slot.extent][self._number(entry.slot)] = None
        if evictable:
            self._order(entry).remove(entry)
        if entry in self.kept:
            self.kept.remove(entry)
            self.kept_in[entry.slot.extent] -= 1
        if keep_slot:
            if evictable:
                self.busy[entry.slot.extent] += 1
            return
        if not evictable:
            self.busy[entry.slot.extent] -= 1
        self.slots.give_back(entry.slot)

    # --- walking ---------------------------------------------------------------------------------------

    def walk(self) -> Iterator[list[Entry]]:
        """Every entry that is here all the while, exactly once, at most PAGE_SLOTS a step. Entries may come
        and go between steps."""
        for extent in sorted(self.residents):
            number = 0
            while number < len(row := self.residents[extent]):
                yield [entry for entry in row[number : number + PAGE_SLOTS] if entry is not None]
                number += PAGE_SLOTS

    def page(self, cursor: int, slots: int) -> Page:
        """The entries in the next `slots` slots, from where an earlier page ended (0: the beginning)."""
        extent, number = divmod(cursor, 1 << 32)
        following = sorted(e for e in self.residents if e >= extent)
        found: list[Entry] = []
        for extent_id in following:
            row = self.residents[extent_id]
            start = number if extent_id == extent else 0
            part = row[start : start + slots]
            found += [entry for entry in part if entry is not None]
            slots -= len(part)
            if start + len(part) < len(row):
                return Page(found, extent_id << 32 | (start + len(part)))
        return Page(found, 0)
