"""Who has dialled us, and what each of them has open here. Everything has a cap, and an end in time."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.kvstore.header import ChunkHeader
from forebay.tiers.p2p.source import Loan, Room

GUESTS_MAX = 256
OPENS_MAX = 64
PUSHES_MAX = 16
LINKS_OF_A_KEEPER = 2
SILENT_S = 10.0
"""A guest that has said nothing for so long is gone; who dials pings every second."""


@dataclass(slots=True)
class Push:
    """A chunk that is being pushed here: pieces come in order."""

    header: ChunkHeader
    room: Room
    received: int = 0


@dataclass(slots=True)
class Guest:
    """One connection of a peer. `busy` counts requests under way; with `nixl` it may have our metadata."""

    name: str
    boot: bytes
    ticket: bytes
    heard_at: float
    loans: dict[int, Loan] = field(default_factory=dict)
    pushes: dict[int, Push] = field(default_factory=dict)
    busy: int = 0
    nixl: bool = False
    keeper: bytes = b""


class Guests:
    """By the routing id of their connection. `abort` gives a room back."""

    def __init__(self, clock: Callable[[], float], abort: Callable[[Room], None]) -> None:
        self._clock, self._abort = clock, abort
        self._by_identity: dict[bytes, Guest] = {}
        self._by_ticket: dict[bytes, Guest] = {}
        self.turned_away = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    def welcome(self, identity: bytes, name: str, boot: bytes, keeper: bytes = b"") -> Guest | None:
        """Take a connection in, anew if it was here before; None if there are too many. It ends those of the same
        keeper but the latest."""
        self.remove(identity)
        same = [i for i, guest in self._by_identity.items() if keeper and guest.keeper == keeper]
        for older in same[: len(same) - (LINKS_OF_A_KEEPER - 1)]:
            self.remove(older)
        if len(self._by_identity) >= GUESTS_MAX:
            self.turned_away += 1
            return None
        guest = Guest(name, boot, secrets.token_bytes(16), self._clock(), keeper=keeper)
        self._by_identity[identity] = guest
        self._by_ticket[guest.ticket] = guest
        return guest

    def get(self, identity: bytes) -> Guest | None:
        """The guest on this connection, who has just been heard."""
        guest = self._by_identity.get(identity)
        if guest is not None:
            guest.heard_at = self._clock()
        return guest

    def of_ticket(self, ticket: bytes) -> Guest | None:
        """Whose ticket this is."""
        return self._by_ticket.get(ticket)

    def remove(self, identity: bytes) -> None:
        """A connection is gone: all that it had open ends."""
        guest = self._by_identity.pop(identity, None)
        if guest is None:
            return
        del self._by_ticket[guest.ticket]
        for loan in guest.loans.values():
            loan.give_back()
        for push in guest.pushes.values():
            self._abort(push.room)
        guest.loans.clear()
        guest.pushes.clear()

    def sweep(self) -> None:
        """Remove those that have been silent for too long."""
        now = self._clock()
        for identity in [i for i, guest in self._by_identity.items() if now - guest.heard_at > SILENT_S]:
            self.remove(identity)

    def remove_all(self) -> None:
        """Everybody leaves."""
        for identity in list(self._by_identity):
            self.remove(identity)

    def figures(self) -> dict[str, float]:
        """Gauges."""
        guests = self._by_identity.values()
        return {
            "guests": float(len(guests)),
            "guest_opens": float(sum(len(guest.loans) for guest in guests)),
            "guest_pushes": float(sum(len(guest.pushes) for guest in guests)),
            "guests_turned_away": float(self.turned_away),
        }
