"""Slots: how extents are cut, which are free. Pure bookkeeping, no memory is touched here.

    extent   [ 4 KiB extent header | slot 0 | slot 1 | ... | rest too small for a slot ]

An extent has one slot size at a time. An empty one gives its size up and may be cut anew.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from forebay.kvstore.entry import SlotRef
from forebay.kvstore.header import header_bytes
from forebay.kvstore.identity import MATCH_UNIT, GroupGeometry
from forebay.kvstore.layout import ALIGNMENT, payload_bytes, round_up

EXTENT_HEADER_BYTES = ALIGNMENT


def slot_bytes_for(group: GroupGeometry, tokens: int, chunk_tokens: int, extra_length: int = 0) -> int:
    """Bytes of the slot for a chunk of `tokens` tokens.

    Four sizes a group (an eighth, a quarter, a half, a whole chunk): few enough that extents aren't
    scattered over many sizes, close enough that a tail doesn't take a whole chunk's room. A recurrent state takes
    the same room whatever its chunk's length.
    """
    assert 0 < tokens <= chunk_tokens, (tokens, chunk_tokens)
    parts = [min(round_up(chunk_tokens // share, MATCH_UNIT), chunk_tokens) for share in (8, 4, 2, 1)]
    room = chunk_tokens if group.recurrent else next(part for part in parts if part >= tokens)
    return round_up(header_bytes(room, extra_length) + payload_bytes(group, room), ALIGNMENT)


@dataclass(slots=True)
class Extent:
    """One extent's cut. `slot_bytes` is 0 while it is uncut; `free` is an ordered set of offsets; `last_used`
    is the newest stamp of its entries."""

    id: int
    size: int
    slot_bytes: int = 0
    free: dict[int, None] = field(default_factory=dict)
    used: int = 0
    last_used: int = 0

    @property
    def capacity(self) -> int:
        return self.slots_of(self.slot_bytes) if self.slot_bytes else 0

    def slots_of(self, slot_bytes: int) -> int:
        """How many slots of this size it has if it is cut to that."""
        return (self.size - EXTENT_HEADER_BYTES) // slot_bytes


class SlotAllocator:
    """Hands out slots. `extents` and `total_bytes` are public for reading; only this class mutates them."""

    def __init__(self) -> None:
        self.extents: dict[int, Extent] = {}
        self.total_bytes = 0
        self._largest = 0
        self._uncut: set[int] = set()
        self._open: defaultdict[int, set[int]] = defaultdict(set)

    def add_extent(self, extent: int, size: int) -> None:
        """Take an uncut extent in."""
        assert extent not in self.extents
        self.extents[extent] = Extent(extent, size)
        self.total_bytes += size
        self._largest = max(self._largest, size - EXTENT_HEADER_BYTES)
        self._uncut.add(extent)

    def cut(self, extent_id: int, slot_bytes: int) -> None:
        """Cut an uncut extent into slots of `slot_bytes`, all of them free."""
        extent = self.extents[extent_id]
        assert extent_id in self._uncut and extent.size - EXTENT_HEADER_BYTES >= slot_bytes > 0
        self._uncut.remove(extent_id)
        extent.slot_bytes = slot_bytes
        extent.free = {EXTENT_HEADER_BYTES + i * slot_bytes: None for i in reversed(range(extent.capacity))}
        self._open[slot_bytes].add(extent_id)

    def take(self, slot_bytes: int) -> SlotRef | None:
        """A free slot of an extent that is cut to this size, or None."""
        open_extents = self._open.get(slot_bytes)
        if not open_extents:
            return None
        extent = self.extents[next(iter(open_extents))]
        offset, _ = extent.free.popitem()
        extent.used += 1
        if not extent.free:
            open_extents.remove(extent.id)
        return SlotRef(extent.id, offset)

    def claim(self, slot: SlotRef) -> None:
        """Mark a given free slot as used (re-adoption)."""
        extent = self.extents[slot.extent]
        del extent.free[slot.offset]
        extent.used += 1
        if not extent.free:
            self._open[extent.slot_bytes].discard(extent.id)

    def give_back(self, slot: SlotRef) -> None:
        """A slot is free again; an extent without any used slot becomes uncut."""
        extent = self.extents[slot.extent]
        assert slot.offset not in extent.free, slot
        extent.free[slot.offset] = None
        extent.used -= 1
        self._open[extent.slot_bytes].add(extent.id)
        if extent.used == 0:
            self._uncut_now(extent)

    def uncut_if_empty(self, extent_id: int) -> None:
        """An extent without any used slot becomes uncut (re-adoption)."""
        extent = self.extents[extent_id]
        if extent.slot_bytes and extent.used == 0:
            self._uncut_now(extent)

    def any_uncut(self) -> int | None:
        """Id of some uncut extent, or None."""
        return next(iter(self._uncut), None)

    def fits(self, slot_bytes: int) -> bool:
        """Could any extent be cut to this size?"""
        return slot_bytes <= self._largest

    def _uncut_now(self, extent: Extent) -> None:
        self._open[extent.slot_bytes].discard(extent.id)
        extent.slot_bytes, extent.free, extent.last_used = 0, {}, 0
        self._uncut.add(extent.id)

    @property
    def free_bytes(self) -> int:
        """Bytes of free slots and of extents that aren't cut."""
        return sum(len(e.free) * e.slot_bytes if e.slot_bytes else e.size for e in self.extents.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of slots in use."""
        return sum(extent.used * extent.slot_bytes for extent in self.extents.values())
