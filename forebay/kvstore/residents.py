"""Which entry lives in which slot, and walks over all of them that never stop at the whole table. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.slots import EXTENT_HEADER_BYTES, Extent, SlotAllocator

PAGE_SLOTS = 64
"""How many slots a step of a walk looks at."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries of the pool, and where to go on (0: this was the last page)."""

    entries: list[Entry]
    cursor: int


class Residents:
    """An entry or None for each slot of an extent, in the order of their offsets."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._rows: dict[int, list[Entry | None]] = {}

    def add_extent(self, extent: int) -> None:
        """Take an extent in; it is empty."""
        self._rows[extent] = []

    def of(self, extent: int) -> list[Entry]:
        """All entries of an extent."""
        return [entry for entry in self._rows[extent] if entry is not None]

    def put(self, entry: Entry) -> None:
        """`entry` lives in its slot now."""
        extent = self._slots.extents[entry.slot.extent]
        if len(self._rows[extent.id]) != extent.capacity:  # it has been cut anew
            self._rows[extent.id] = [None] * extent.capacity
        self._rows[extent.id][_number(extent, entry.slot)] = entry

    def drop(self, entry: Entry) -> None:
        """`entry` doesn't live there any more."""
        extent = self._slots.extents[entry.slot.extent]
        self._rows[extent.id][_number(extent, entry.slot)] = None

    def walk(self) -> Iterator[list[Entry]]:
        """Every entry that is here all the while, exactly once, at most PAGE_SLOTS a step. Entries may come
        and go between steps."""
        for extent in sorted(self._rows):
            number = 0
            while number < len(row := self._rows[extent]):
                yield [entry for entry in row[number : number + PAGE_SLOTS] if entry is not None]
                number += PAGE_SLOTS

    def page(self, cursor: int, slots: int) -> Page:
        """The entries in the next `slots` slots, from where an earlier page ended (0: the beginning)."""
        extent, number = divmod(cursor, 1 << 32)
        following = sorted(e for e in self._rows if e >= extent)
        found: list[Entry] = []
        for extent_id in following:
            row = self._rows[extent_id]
            start = number if extent_id == extent else 0
            part = row[start : start + slots]
            found += [entry for entry in part if entry is not None]
            slots -= len(part)
            if start + len(part) < len(row):
                return Page(found, extent_id << 32 | (start + len(part)))
        return Page(found, 0)


def _number(extent: Extent, slot: SlotRef) -> int:
    return (slot.offset - EXTENT_HEADER_BYTES) // extent.slot_bytes
