"""Connections that are gone: what they held is let go of in steps, and their slots once nobody can write into them.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.kvstore.chores import REMOVAL
from forebay.kvstore.entry import SlotRef
from forebay.kvstore.leases import Client
from forebay.kvstore.quarantine import Quarantine

if TYPE_CHECKING:
    from forebay.kvstore.core import StoreCore


@dataclass(slots=True, eq=False)
class Drop:
    """A connection that is gone, while what it held is being let go of. `writing`: its process may still write."""

    client: Client
    writing: bool


class Departures:
    """All drops under way, and the quarantine that they lead to. `quarantined_bytes` are those of its slots."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self._dropping: dict[bytes, list[Drop]] = {}
        # Several may be writing into one slot: it is free when the last of them has stopped.
        self._writers: dict[SlotRef, int] = {}
        self.quarantine = Quarantine()
        self.quarantined_bytes = 0

    def drop(self, client: Client, *, writing: bool) -> None:
        """See `StoreCore.drop_client`."""
        drop = Drop(client, writing)
        self._dropping.setdefault(client.id, []).append(drop)
        self._core.chores.add(self._steps(drop, self._core.leases.detach(client)))

    def _steps(self, drop: Drop, leases: Iterator[int]) -> Iterator[int]:
        client = drop.client
        while client.reservations:
            self._core.reservations.give_up(next(iter(client.reservations.values())), writing=drop.writing)
            yield REMOVAL
        yield from leases
        drops = self._dropping[client.id]
        drops.remove(drop)
        if not drops:
            del self._dropping[client.id]

    def may_write(self, owner: bytes) -> bool:
        """Does anything wait for this process to stop writing, or to die?"""
        return owner in self.quarantine or owner in self._dropping

    # --- quarantine ------------------------------------------------------------------------------------

    def hold(self, owner: bytes, slot: SlotRef, slot_bytes: int, reservation: int = 0) -> None:
        """Put a slot into quarantine."""
        self.quarantine.hold(owner, slot, reservation)
        if slot not in self._writers:
            self.quarantined_bytes += slot_bytes
        self._writers[slot] = self._writers.get(slot, 0) + 1

    @property
    def slots(self) -> int:
        """How many slots are held."""
        return len(self._writers)

    def stopped(self, reservation: int, owner: bytes) -> None:
        """The writer of an ended reservation has stopped: its slot leaves quarantine, if it is there."""
        slot = self.quarantine.take(owner, reservation)
        if slot is not None:
            self._end(slot)

    def all_stopped(self, owner: bytes) -> int:
        """See `StoreCore.end_quarantine`."""
        for drop in self._dropping.get(owner, ()):
            drop.writing = False
        slots = self.quarantine.take_all(owner)
        if slots:
            self._core.chores.add(self._end_all(slots))
        return len(slots)

    def _end_all(self, slots: Sequence[SlotRef]) -> Iterator[int]:
        for slot in slots:
            self._end(slot)
            yield REMOVAL

    def _end(self, slot: SlotRef) -> None:
        self._writers[slot] -= 1
        if self._writers[slot]:
            return
        del self._writers[slot]
        self.quarantined_bytes -= self._core.place.slots.extents[slot.extent].slot_bytes
        self._core.free_slot(slot)
