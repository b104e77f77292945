"""Shelves: the evictable chunks of one session in slots of one size, and the pool of all shelves of a size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import Lineage
from forebay.kvstore.policies.foresight.sessions import Session


class Shelf:
    """Deepest chunk first. `members` are those in the heap: True for who may be evicted."""

    __slots__ = ("_heap", "_serial", "evictable", "members", "pool", "session", "share", "stamp")

    def __init__(self, pool: Pool, session: Session, serial: int) -> None:
        self.pool, self.session = pool, session
        self.members: dict[Entry, bool] = {}
        self.evictable = 0
        self.stamp = 0
        self.share = 0.0
        self._heap: list[tuple[int, int, Entry]] = []
        self._serial = serial

    def put(self, entry: Entry) -> None:
        """`entry` may be evicted from now on."""
        if entry not in self.members:
            if len(self._heap) > 2 * self.evictable + 64:
                self._sweep()
            heappush(self._heap, (-entry.start, next(self.pool.ticket), entry))
        self.members[entry] = True
        self.evictable += 1

    def take(self, entry: Entry) -> None:
        """`entry` may not be evicted any more, if it might before. It keeps its place in case it comes back."""
        if self.members.get(entry):
            self.members[entry] = False
            self.evictable -= 1

    def deepest(self) -> Entry | None:
        """The evictable entry that goes furthest."""
        if not self.evictable and self._heap:  # all are pinned: no need to pop them one by one
            self._heap.clear()
            self.members.clear()
        while self._heap:
            entry = self._heap[0][2]
            if self.members[entry]:
                return entry
            heappop(self._heap)
            del self.members[entry]
        return None

    def beyond(self, start: int) -> Iterator[Entry]:
        """Takes out the entries from this token on, deepest first."""
        while (entry := self.deepest()) is not None and entry.start >= start:
            heappop(self._heap)
            del self.members[entry]
            self.evictable -= 1
            yield entry

    def _sweep(self) -> None:
        self._heap = [item for item in self._heap if self.members[item[2]]]
        heapify(self._heap)
        self.members = {item[2]: True for item in self._heap}

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
            shelf = session.holders[self] = Shelf(self, session, next(self.ticket))
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

    def rank(self, shelf: Shelf) -> None:
        """Find the shelf's place anew: its session's worth or its deepest chunk has changed."""
        self._blocked.pop(shelf, None)
        deepest = shelf.deepest()
        shelf.stamp = next(self.ticket)
        if deepest is None:
            self._drop(shelf)
            return
        session = shelf.session
        shelf.share = self._worth(deepest)
        rank = session.worth * shelf.share if session.worth > 0 else session.worth
        heappush(self._heap, (rank, session.last, shelf.stamp, shelf.stamp, shelf))
        if len(self._heap) > 4 * self._shelves + 64:
            self._heap = [item for item in self._heap if item[3] == item[4].stamp]
            heapify(self._heap)

    def _drop(self, shelf: Shelf) -> None:
        """An empty shelf is made anew when it is needed; pinned chunks that still name it bring it back."""
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
            if stamp == shelf.stamp and deepest is None:
                self._drop(shelf)
            elif stamp == shelf.stamp:
                self._blocked[shelf] = None
        return self._beside_the_blocked()

    def _beside_the_blocked(self) -> Entry | None:
        """Every shelf's deepest chunk is needed: some other one may not be."""
        entries = (entry for shelf in self._blocked for entry, here in shelf.members.items() if here)
        return next((entry for entry in entries if not self._needed(entry)), None)

    def _needed(self, entry: Entry) -> bool:
        """Does a chunk need it that is pinned, another session's, or in a slot of this size?"""
        own = entry.note
        assert isinstance(own, Shelf)
        for dependent in self._lineage.dependents(entry):
            shelf = dependent.note
            if not isinstance(shelf, Shelf) or not shelf.members.get(dependent):
                return True
            if shelf.session is not own.session or shelf.pool is self:
                return True
        return False

    def in_order(self) -> list[Entry]:
        """All that may be evicted, as things stand: worst shelf first, deepest first."""
        shelves = {item[4] for item in self._heap if item[3] == item[4].stamp} | set(self._blocked)
        ranked = sorted(shelves, key=lambda shelf: (shelf.session.worth, shelf.session.last, shelf.stamp))
        return [
            entry
            for shelf in ranked
            for entry in sorted((e for e, here in shelf.members.items() if here), key=lambda e: -e.start)
        ]
