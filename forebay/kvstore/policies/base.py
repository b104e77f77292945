"""The interface of an eviction policy, and the naive one that serves as the tests' oracle.

A policy orders the entries that may be evicted. It never sees a pinned or unfinished one: the core takes an
entry out when it is pinned and puts it back when the last pin goes, so no policy can evict what was promised.

    add            remove, add             evicted, remove, forget
    stored  ---->  used, used again ---->  gone, to make room (`forget` alone: gone for another reason)

    observe        a lookup, as the daemon saw it, before the entries that it used come back
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forebay.kvstore.entry import Entry


class Lineage(Protocol):
    """Who needs whom, as the chunk table knows it."""

    def parent(self, entry: Entry) -> Entry | None:
        """The committed chunk that `entry` goes on from, if it is here."""

    def dependents(self, entry: Entry) -> Sequence[Entry]:
        """The committed chunks right after `entry` that can't serve a hit without it. Don't mutate."""


class NoLineage:
    """Nobody needs anybody: for entries whose chains nobody knows, and for tests of an order alone."""

    def parent(self, entry: Entry) -> Entry | None:
        """None."""

    def dependents(self, entry: Entry) -> Sequence[Entry]:
        """None."""
        return ()


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A lookup: the keys of the prompt's chunks in order (each of `chunk_tokens` tokens, the last one perhaps fewer),
    the entries that serve its hit, and when, in seconds."""

    keys: Sequence[bytes]
    entries: Sequence[Entry]
    now: float
    chunk_tokens: int


class EvictionPolicy(ABC):
    """Orders evictable entries of all slot sizes. All methods are O(log n) amortised or better but `__iter__`.

    An entry's `note` belongs to its policy, from `add` to `forget`.
    """

    @abstractmethod
    def add(self, entry: Entry) -> None:
        """`entry` is evictable from now on, and was just used; the first time, stored. Not while it is known."""

    @abstractmethod
    def demote(self, entry: Entry) -> None:
        """`entry` is the least worth keeping. Ignored if unknown."""

    def put_back(self, entry: Entry) -> None:
        """`entry` is evictable again, was not used, and is the least worth keeping."""
        self.add(entry)
        self.demote(entry)

    @abstractmethod
    def remove(self, entry: Entry) -> None:
        """`entry` is pinned or gone. Ignored if unknown."""

    @abstractmethod
    def victim(self, slot_bytes: int) -> Entry | None:
        """The entry in a slot of this size to evict next, or None. Doesn't remove it.

        Never one of whose dependents any is pinned, or is in a slot of this size; those in slots of other sizes
        must be evicted before it.
        """

    def evicted(self, entry: Entry) -> None:
        """`entry` is about to be removed and forgotten to make room: the time to remember it by its key."""

    def forget(self, entry: Entry) -> None:
        """`entry` is gone, whether it is known or pinned. Idempotent."""

    def observe(self, lookup: LookedUp) -> None:
        """A lookup was answered. Its entries may be pinned or not."""

    def gauges(self) -> Mapping[str, int]:
        """How full the tables are that remember what isn't here any more, by name."""
        return {}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Entry]:
        """All entries; those of one slot size come next victim first, as far as the order is known."""


class NaiveLru(EvictionPolicy):
    """A list in order of use: the executable specification of `Lru`."""

    def __init__(self, lineage: Lineage | None = None) -> None:
        self._lineage = lineage or NoLineage()
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
        """The leaf that the coldest entry leads to; what leads to a pinned entry was used just now."""
        for entry in [e for e in self._order if e.slot_bytes == slot_bytes]:
            leaf = self._leaf(entry)
            if leaf is not None:
                return leaf
            self._order.remove(entry)
            self._order.append(entry)
        return None

    def _leaf(self, entry: Entry) -> Entry | None:
        dependents = self._lineage.dependents(entry)
        others = [e for e in dependents if e.slot_bytes != entry.slot_bytes]
        if not all(e in self._order for e in (*dependents, *self._below(others))):
            return None
        same = [e for e in dependents if e.slot_bytes == entry.slot_bytes]
        return self._leaf(same[0]) if same else entry

    def _below(self, entries: Sequence[Entry]) -> list[Entry]:
        found = [e for entry in entries for e in self._lineage.dependents(entry)]
        return found + self._below(found) if found else []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._order))
