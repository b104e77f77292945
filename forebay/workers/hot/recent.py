"""Which chunks' rows were read last, over all requests: who comes back to them will read them again."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

from forebay.kvstore.identity import KEY_BYTES

REMEMBERED_MAX = 1 << 16
"""Chunks, by their keys."""

AHEAD_MAX = 64
"""So many of one request are noted, and brought ahead of need: those that its last steps have chosen from."""


class Recent:
    """Bounded; what was read longest ago is forgotten first. `keys` are those of a prompt's chunks, joined."""

    def __init__(self) -> None:
        # Each with the number of its note: the dict's order is theirs.
        self._keys: dict[bytes, int] = {}
        self._notes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, keys: bytes, positions: Iterable[int]) -> None:
        """A request has read rows at these chunk positions, the latest last."""
        for position in list(positions)[-AHEAD_MAX:]:
            key = _key(keys, position)
            if key:  # not that of a chunk that has hardly begun
                self._keys.pop(key, None)
                self._notes += 1
                self._keys[key] = self._notes
        while len(self._keys) > REMEMBERED_MAX:
            del self._keys[next(iter(self._keys))]

    def among(self, keys: bytes, positions: Iterable[int]) -> list[int]:
        """Those of a prompt's chunk positions that were read, the latest first, at most AHEAD_MAX of them."""
        known = ((self._keys.get(_key(keys, position)), position) for position in positions)
        read = [(number, position) for number, position in known if number is not None]
        return [position for _, position in nlargest(AHEAD_MAX, read)]


def _key(keys: bytes, position: int) -> bytes:
    return keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
