"""Slots that connections may write: given out, shared, ended, given up. Pure.

    reserve --> write --> commit            the chunk is published
                  |-----> abort             the slot is free
                  `-----> given up          a deadline, a connection's end: the slot waits until nobody can be writing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forebay.kvstore.deadlines import Deadlines
from forebay.kvstore.entry import Entry
from forebay.kvstore.leases import Client, Hold, Reservation, SharedWrite

if TYPE_CHECKING:
    from forebay.kvstore.departures import Departures


class Reservations:
    """All reservations of a store. `bytes` are those of their slots, `shared` the writes of several connections.

    `discard(entry, keep_slot=...)` is the core's: it drops an unfinished entry, whose slot may go to quarantine.
    """

    def __init__(self, departures: Departures, discard: Callable[..., None]) -> None:
        self._departures, self._discard = departures, discard
        self._deadlines: Deadlines[Reservation] = Deadlines()
        self.shared: dict[Entry, SharedWrite] = {}
        self.bytes = 0

    def open(self, entry: Entry, group: bytes, writers: int) -> None:
        """`entry` is to be written, by one connection or by several of a group."""
        self.bytes += entry.slot_bytes
        if writers > 1:
            assert group, "who shares a write belongs to an engine"
            self.shared[entry] = SharedWrite(group, writers)

    def may_join(self, client: Client, entry: Entry, writers: int) -> bool:
        """Is this client one of the connections that write an entry, and has no part of it yet?"""
        shared = self.shared.get(entry)
        return shared is not None and shared.may_join(client, writers)

    def give(
        self, client: Client, entry: Entry, number: int, retain_s: float, until: float, hold: Hold | None = None
    ) -> None:
        """A client may write an entry that is open, or its part of it; `hold` keeps it from its commit on."""
        shared = self.shared.get(entry)
        reservation = Reservation(number, client, entry, retain_s, shared=shared, hold=hold)
        client.reservations[number] = reservation
        reservation.bucket = self._deadlines.set(reservation, until)
        if shared is not None:
            shared.parts[number] = reservation

    def part_written(self, client: Client, number: int) -> bool:
        """A client has written its part of a chunk that it shares. True if it is the last one: it hashes the chunk and
        commits it. What isn't known has ended: its slot leaves quarantine."""
        found = client.reservations.get(number)
        if found is None:
            self._departures.stopped(number, client.id)
        if found is None or found.shared is None or found.written:
            return False
        found.written = True
        return found.shared.complete

    def end(self, client: Client, number: int) -> Reservation | None:
        """Its writer has stopped, or, of a shared write, all have. None if it had ended before (its slot leaves
        quarantine then), or if others are still to write: then it has come to nothing."""
        found = client.reservations.get(number)
        if found is None:
            self._departures.stopped(number, client.id)
            return None
        if found.shared is not None and not found.shared.complete:
            self.give_up(found, writing=False)
            return None
        for part in parts_of(found):
            del part.client.reservations[part.id]
            self._deadlines.drop(part, part.bucket)
        self._close(found.entry)
        return found

    def give_up(self, reservation: Reservation, *, writing: bool) -> None:
        """Nobody waits for this chunk any more; its key is free. The slot isn't, if its client may be `writing`, or
        somebody else who shares the write."""
        self._deadlines.drop(reservation, reservation.bucket)
        self._gave_up(reservation, writing)

    def expire_one(self, now: float) -> bool:
        """Give up one whose time is over; False if there is none."""
        reservation = self._deadlines.take(now)
        if reservation is not None:
            self._gave_up(reservation, writing=True)
        return reservation is not None

    def _gave_up(self, reservation: Reservation, writing: bool) -> None:
        """`reservation` has no deadline any more."""
        entry, held = reservation.entry, False
        for part in parts_of(reservation):
            del part.client.reservations[part.id]
            if part is not reservation:
                self._deadlines.drop(part, part.bucket)
            if not part.written and (writing or part is not reservation):
                self._departures.hold(part.client.id, entry.slot, entry.slot_bytes, part.id)
                held = True
        self._close(entry)
        self._discard(entry, keep_slot=held)

    def _close(self, entry: Entry) -> None:
        self.bytes -= entry.slot_bytes
        self.shared.pop(entry, None)


def parts_of(reservation: Reservation) -> list[Reservation]:
    """All reservations of the same write, itself included."""
    return [reservation] if reservation.shared is None else list(reservation.shared.parts.values())
