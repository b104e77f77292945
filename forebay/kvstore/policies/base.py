"""The interface of an eviction policy, and the naive one that serves as the tests' oracle.

A policy orders the entries that may be evicted. It never sees a pinned or unfinished one: the core takes an
entry out when it is pinned and puts it back when the last pin goes, so no policy can evict what was promised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from forebay.kvstore.entry import Entry


class EvictionPolicy(ABC):
    """Orders evictable entries of all slot sizes. All methods are O(log n) or better but `__iter__`."""

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """`entry` is evictable from now on, and was just used. It must not be known yet."""

    @abstractmethod
    def demote(self, entry: Entry) -> None:
        """`entry` is the least worth keeping. Ignored if unknown."""

    @abstractmethod
    def remove(self, entry: Entry) -> None:
        """`entry` is pinned or gone. Ignored if unknown."""

    @abstractmethod
    def victim(self, slot_bytes: int) -> Entry | None:
        """The entry in a slot of this size to evict next, or None. Doesn't remove it."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Entry]:
        """All entries; those of one slot size come next victim first."""


class NaiveLru(EvictionPolicy):
    """A list in order of use: the executable specification of `Lru`."""

    def __init__(self) -> None:
        self._order: list[Entry] = []

    def add(self, entry: Entry) -> None:
        assert entry not in self._order
        self._order.append(entry)

    def demote(self, entry: Entry) -> None:
        if entry in self._order:
            self._order.remove(entry)
            self._order.insert(0, entry)

    def remove(self, entry: Entry) -> None:
        if entry in self._order:
            self._order.remove(entry)

    def victim(self, slot_bytes: int) -> Entry | None:
        return next((entry for entry in self._order if entry.slot_bytes == slot_bytes), None)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._order))
