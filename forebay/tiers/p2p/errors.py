"""What can go wrong with a peer. None of these leaves the tier: each becomes a miss, or a chunk that isn't pushed."""

from __future__ import annotations

from forebay.errors import ForebayError


class PeerError(ForebayError):
    """Base of all."""


class PeerLost(PeerError):
    """The peer doesn't answer (in time), or not as the protocol wants it."""


class NoAnswer(PeerLost):
    """Nothing came in time."""


class PeerRefused(PeerError):
    """The peer is there, and doesn't do it now."""


class NotThere(PeerError):
    """The peer hasn't got the chunk."""


class Damaged(PeerError):
    """The payload isn't what its header says: it was damaged there, or on its way, or the peer lies."""


class TooLate(PeerError):
    """The deadline has passed."""


class Unfenced(PeerError):
    """A transfer was given up that may still write into the pool: only the end of this process stops it."""
