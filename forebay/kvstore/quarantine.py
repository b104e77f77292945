"""Slots that somebody may still be writing, though nobody waits for what is written. Pure.

A write into mapped memory can't be revoked. So a slot whose writer was given up on (a deadline, a connection that
ended before its process) is held until that process says that it has stopped, or is dead. Held slots count against
the share of the pool that stores may take.
"""

from __future__ import annotations

from collections.abc import Iterator

from forebay.kvstore.entry import SlotRef


class Quarantine:
    """Slots by writer, and within a writer by the reservation that they were promised under."""

    def __init__(self) -> None:
        self._slots: dict[bytes, dict[int, SlotRef]] = {}
        self.count = 0
        self._unnamed = 0

    def __len__(self) -> int:
        return self.count

    def __contains__(self, owner: bytes) -> bool:
        return owner in self._slots

    def __iter__(self) -> Iterator[bytes]:
        """The writers, as they are now."""
        return iter(list(self._slots))

    def hold(self, owner: bytes, slot: SlotRef, reservation: int = 0) -> None:
        """Keep a slot. Without a reservation (it was made by an earlier daemon) only `take_all` gives it back."""
        if not reservation:
            self._unnamed -= 1
            reservation = self._unnamed
        slots = self._slots.setdefault(owner, {})
        assert reservation not in slots
        slots[reservation] = slot
        self.count += 1

    def take(self, owner: bytes, reservation: int) -> SlotRef | None:
        """The slot of a reservation whose writer has stopped, if it is held."""
        slots = self._slots.get(owner)
        slot = slots.pop(reservation, None) if slots is not None and reservation > 0 else None
        if slot is None:
            return None
        self.count -= 1
        if not slots:
            del self._slots[owner]
        return slot

    def take_all(self, owner: bytes) -> list[SlotRef]:
        """All slots of a writer that is dead, or writes nothing any more."""
        slots = list(self._slots.pop(owner, {}).values())
        self.count -= len(slots)
        return slots

    def slots_of(self, owner: bytes) -> list[SlotRef]:
        """What is held of one writer."""
        return list(self._slots.get(owner, {}).values())
