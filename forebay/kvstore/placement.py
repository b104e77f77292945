"""Finding room for a chunk: a free slot, an uncut extent, the coldest victim, or a whole colder extent.

The byte budget is hard: extents are all there is. Full means evict, else refuse the store; never wait,
never grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.policies.base import EvictionPolicy
from forebay.kvstore.policies.lru import Lru
from forebay.kvstore.slots import Extent, SlotAllocator


@dataclass
class Placement:
    """Slots, and which of them may be taken from whom.

    `evict` is the core's: it must remove the entry everywhere and give its slot back. `cut` writes an
    extent's new slot size into the extent, before any of its slots is used.
    """

    evict: Callable[[Entry, str], None]
    cut: Callable[[int, int], None]
    new_policy: Callable[[], EvictionPolicy] = Lru
    slots: SlotAllocator = field(default_factory=SlotAllocator)
    residents: dict[int, set[Entry]] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    stamp: int = 0

    def __post_init__(self) -> None:
        self.policy = self.new_policy()

    def add_extent(self, extent: int, size: int) -> None:
        """Take an uncut extent into the budget."""
        self.slots.add_extent(extent, size)
        self.residents[extent], self.busy[extent] = set(), 0

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
            return None
        self.evict(victim, "evicted")
        return self.slots.take(slot_bytes) or self._retake(slot_bytes)

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

    def _coldest_extent(self, slot_bytes: int, colder_than: int | None) -> Extent | None:
        """The least recently used extent of another size that nothing holds; walks extents, not entries.

        With `colder_than` it must be colder as a whole than that: sizes compete by recency, so capacity
        follows the traffic an extent at a time.
        """
        movable = [
            extent
            for extent in self.slots.extents.values()
            if extent.slot_bytes not in (0, slot_bytes) and not self.busy[extent.id]
        ]
        coldest = min(movable, key=lambda extent: extent.last_used, default=None)
        if coldest is None or (colder_than is not None and coldest.last_used >= colder_than):
            return None
        return coldest

    def _evict_all(self, extent: Extent) -> None:
        for entry in list(self.residents[extent.id]):
            self.evict(entry, "evicted")
        assert extent.used == 0, "an extent that nothing holds is empty once its entries are evicted"

    def settle(self, entry: Entry) -> None:
        """`entry` lives in its slot now, and counts as busy until it is `released`."""
        self.residents[entry.slot.extent].add(entry)
        self.busy[entry.slot.extent] += 1

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
        self.policy.add(entry)

    def pinned(self, entry: Entry) -> None:
        """Somebody needs `entry`: it can't be evicted."""
        self.busy[entry.slot.extent] += 1
        self.policy.remove(entry)

    def demote(self, entry: Entry) -> None:
        """`entry` is the first to go, if it may go at all."""
        entry.stamp = 0
        self.policy.demote(entry)

    def leave(self, entry: Entry, *, keep_slot: bool = False) -> None:
        """`entry` is gone. Its slot is free, or with `keep_slot` stays held (quarantine)."""
        evictable = entry.pins == 0
        self.residents[entry.slot.extent].discard(entry)
        if evictable:
            self.policy.remove(entry)
        if keep_slot:
            if evictable:
                self.busy[entry.slot.extent] += 1
            return
        if not evictable:
            self.busy[entry.slot.extent] -= 1
        self.slots.give_back(entry.slot)
