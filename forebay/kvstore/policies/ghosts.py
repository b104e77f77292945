"""Keys of what was evicted, oldest first: a bounded memory without bytes."""

from __future__ import annotations

from collections import OrderedDict

from forebay.kvstore.entry import Entry, EntryId

GHOSTS_MAX = 1 << 16
"""Keys that one policy remembers in each of its lists, whatever the pool's size."""


class Ghosts:
    """At most `limit` keys. The oldest make room."""

    def __init__(self, limit: int = GHOSTS_MAX) -> None:
        self.limit = limit
        self._keys: OrderedDict[EntryId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, entry: Entry) -> None:
        """Remember that `entry` was here."""
        self._keys.pop(entry.id, None)
        self._keys[entry.id] = None
        self.trim(self.limit)

    def take(self, entry: Entry) -> bool:
        """Was it here? It is forgotten by this."""
        return self._keys.pop(entry.id, True) is None

    def trim(self, size: int) -> None:
        """Forget the oldest until at most `size` are left."""
        while len(self._keys) > max(size, 0):
            self._keys.popitem(last=False)
