"""Shelves: the evictable chunks of one session in slots of one size, and the pool of all shelves of a size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import Lineage
from forebay.kvstore.policies.foresight.sessions import Session

_start = attrgetter("start")


class Shelf:
    """A session's chunks in slots of one size, by where they begin. A chunk's `note` is its shelf, and so is its
    `order` while it may be evicted; pinned ones keep their place, so that using a session costs no insertions."""

    __slots__ = ("_gone", "_line", "evictable", "pool", "session", "share", "stamp")

    def __init__(self, pool: Pool, session: Session) -> None:
        self.pool, self.session = pool, session
        self.evictable = 0
        self.stamp = 0
        self.share = 0.0
        self._line: list[Entry] = []
        self._gone = 0

    def __len__(self) -> int:
        """Chunks that are here, pinned ones too, and some that are gone."""
        return len(self._line)

    def put(self, entry: Entry) -> None:
        """`entry` may be evicted from now on."""
        at = bisect_left(self._line, entry.start, key=_start)
        while at < len(self._line) and self._line[at].start == entry.start and self._line[at] is not entry:
            at += 1
        if at == len(self._line) or self._line[at] is not entry:
            self._line.insert(at, entry)
        entry.note = entry.order = self
        self.evictable += 1

    def take(self, entry: Entry) -> None:
        """`entry` may not be evicted any more, if it might before. It keeps its place in case it comes back."""
        if entry.order is self:
            entry.order = None
            self.evictable -= 1

    def leave(self, entry: Entry) -> None:
        """`entry` doesn't come back."""
        self.take(entry)
        entry.note = None
        self._gone += 1
        if 2 * self._gone > len(self._line):
            self._line = [other for other in self._line if other.note is self]
            self._gone = 0

    def deepest(self) -> Entry | None:
        """The evictable entry that goes furthest."""
        while self.evictable:
            entry = self._line[-1]
            if entry.order is self:
                return entry
            self._line.pop()
            self._gone -= entry.note is not self
        return None

    def beyond(self, start: int) -> Iterator[Entry]:
        """The evictable entries from this token on, deepest first; each leaves."""
        while (entry := self.deepest()) is not None and entry.start >= start:
            self.leave(entry)
            yield entry

    def __iter__(self) -> Iterator[Entry]:
        """Those that may be evicted, deepest first."""
        return (entry for entry in reversed(self._line) if entry.order is self)

    def worth_changed(self) -> None:
        """See `Holder`."""
        self.pool.rank(self)


class Pool:
    """The shelves of one slot size, the least worth first. `worth` gives a chunk's own share in that."""

    def __init__(self, lineage: Lineage, worth: Callable[[Entry], float]) -> None:
        self._lineage, self._worth = lineage, worth
        self._heap: list[tuple[float, float, int, int, Shelf]] = []
        self._blocked: dict[Shelf, None] = {}
        self._shelves = 0
        self.ticket = count()
        self.evictable = 0

    def shelf(self, session: Session) -> Shelf:
        """This session's shelf, which may be new."""
        shelf = session.holders.get(self)
        if shelf is None:
            shelf = session.holders[self] = Shelf(self, session)
            self._shelves += 1
        assert isinstance(shelf, Shelf)
        return shelf

    def put(self, shelf: Shelf, entry: Entry) -> None:
        """`entry` may be evicted, as one of `shelf`."""
        deepest = shelf.deepest()
        shelf.put(entry)
        self.evictable += 1
        if deepest is None or entry.start > deepest.start:
            self.rank(shelf)

    def take(self, shelf: Shelf, entry: Entry) -> None:
        """`entry` may not be evicted any more, if it might before."""
        before = shelf.evictable
        shelf.take(entry)
        self.evictable += shelf.evictable - before
        self.wake(shelf)

    def leave(self, shelf: Shelf, entry: Entry) -> None:
        """`entry`, one of `shelf`, is gone or another's, pinned or not."""
        before = shelf.evictable
        shelf.leave(entry)
        self.evictable += shelf.evictable - before
        if not len(shelf):
            self._drop(shelf)
        self.wake(shelf)

    def rank(self, shelf: Shelf) -> None:
        """Find the shelf's place anew: its session's worth or its deepest chunk has changed."""
        self._blocked.pop(shelf, None)
        deepest = shelf.deepest()
        shelf.stamp = next(self.ticket)
        if deepest is None:
            return
        session = shelf.session
        shelf.share = self._worth(deepest)
        rank = session.worth * shelf.share if session.worth > 0 else session.worth
        heappush(self._heap, (rank, session.last, shelf.stamp, shelf.stamp, shelf))
        if len(self._heap) > 4 * self._shelves + 64:
            self._heap = [item for item in self._heap if item[3] == item[4].stamp]
            heapify(self._heap)

    def _drop(self, shelf: Shelf) -> None:
        """An empty shelf is made anew when it is needed."""
        if shelf.session.holders.pop(self, None) is not None:
            self._shelves -= 1

    def wake(self, shelf: Shelf) -> None:
        """Its deepest chunk may be another one, or something that needed it has gone or come back."""
        if shelf in self._blocked:
            self.rank(shelf)

    @property
    def waiting(self) -> bool:
        """Are there shelves whose deepest chunk somebody else needs?"""
        return bool(self._blocked)

    def victim(self) -> Entry | None:
        """The deepest chunk of the shelf that is worth least, unless a chunk of another session needs it."""
        while self._heap:
            _, _, _, stamp, shelf = self._heap[0]
            deepest = shelf.deepest() if stamp == shelf.stamp else None
            if deepest is not None and self._worth(deepest) != shelf.share:
                self.rank(shelf)
                continue
            if deepest is not None and not self._needed(deepest):
                return deepest
            heappop(self._heap)
            if deepest is not None:
                self._blocked[shelf] = None
        return self._beside_the_blocked()

    def _beside_the_blocked(self) -> Entry | None:
        """Every shelf's deepest chunk is needed: some other one may not be."""
        entries = (entry for shelf in self._blocked for entry in shelf)
        return next((entry for entry in entries if not self._needed(entry)), None)

    def _needed(self, entry: Entry) -> bool:
        """Does a chunk need it that is pinned, another session's, or in a slot of this size?"""
        own = entry.note
        assert isinstance(own, Shelf)
        for dependent in self._lineage.dependents(entry):
            shelf = dependent.note
            if not isinstance(shelf, Shelf) or dependent.order is not shelf:
                return True
            if shelf.session is not own.session or shelf.pool is self:
                return True
        return False

    def in_order(self) -> list[Entry]:
        """All that may be evicted, as things stand: worst shelf first, deepest first."""
        shelves = {item[4] for item in self._heap if item[3] == item[4].stamp} | set(self._blocked)
        ranked = sorted(shelves, key=lambda shelf: (shelf.session.worth, shelf.session.last, shelf.stamp))
        return [entry for shelf in ranked for entry in shelf]
