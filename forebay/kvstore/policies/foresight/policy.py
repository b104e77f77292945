"""The policy: chunks go by what their session's next turn is worth, for each byte of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import EvictionPolicy, Lineage, LookedUp, NoLineage
from forebay.kvstore.policies.foresight.sessions import Session, Sessions
from forebay.kvstore.policies.foresight.shelves import Pool, Shelf


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """What computing a chunk again costs, in tokens' worth of the linear part of a model.

    A token at position p costs 1 + p / `attention_tokens`: that is where attention over what lies before costs as much
    as everything else. None: attention costs nothing.
    """

    attention_tokens: float | None = None

    def saved_per_byte(self, entry: Entry) -> float:
        """What a hit on this chunk saves, for each byte of its slot."""
        cost = float(entry.token_count)
        if self.attention_tokens is not None:
            cost *= 1 + (entry.start + cost / 2) / self.attention_tokens
        return cost / entry.slot_bytes


class Foresight(EvictionPolicy):
    """Keeps the sessions whose next turn is expected soonest, whole or from the front; others give up their tails.

    `sessions` is shared by all instances of a store: lookups are told to it once.
    """

    def __init__(
        self,
        lineage: Lineage | None = None,
        sessions: Sessions | None = None,
        cost: RecomputeCost | None = None,
    ) -> None:
        self._lineage = lineage or NoLineage()
        self.sessions = Sessions() if sessions is None else sessions
        self._cost = cost or RecomputeCost()
        self._pools: dict[int, Pool] = {}

    def _pool(self, slot_bytes: int) -> Pool:
        pool = self._pools.get(slot_bytes)
        if pool is None:
            pool = self._pools[slot_bytes] = Pool(self._lineage, self._cost.saved_per_byte)
        return pool

    def add(self, entry: Entry) -> None:
        pool, shelf = self._pool(entry.slot_bytes), entry.note
        session = shelf.session if isinstance(shelf, Shelf) else self._owner(entry)
        shelf = pool.shelf(session)
        assert entry.order is None, "in one order at a time"
        pool.put(shelf, entry)
        self._wake_parent(entry)

    def _owner(self, entry: Entry) -> Session:
        """Whose a chunk is that was just stored: who missed it, or whose its parent is."""
        awaited = self.sessions.expecting(entry.key)
        if awaited is not None:
            return awaited
        parent = self._lineage.parent(entry)
        if parent is not None and isinstance(parent.note, Shelf):
            return parent.note.session
        # Chunks of an earlier boot come in any order, and perhaps by the million.
        return self.sessions.anonymous() if entry.verified else self.sessions.nobody

    def demote(self, entry: Entry) -> None:
        shelf = entry.note
        if isinstance(shelf, Shelf) and entry.order is shelf:
            _move(entry, self.sessions.nobody)

    def remove(self, entry: Entry) -> None:
        shelf = entry.note
        if isinstance(shelf, Shelf):
            shelf.pool.take(shelf, entry)

    def forget(self, entry: Entry) -> None:
        shelf = entry.note
        if isinstance(shelf, Shelf):
            shelf.pool.leave(shelf, entry)
        self._wake_parent(entry)

    def _wake_parent(self, entry: Entry) -> None:
        if any(pool.waiting for pool in self._pools.values()):
            parent = self._lineage.parent(entry)
            if parent is not None and isinstance(parent.note, Shelf):
                parent.note.pool.wake(parent.note)

    def victim(self, slot_bytes: int) -> Entry | None:
        return self._pool(slot_bytes).victim()

    def observe(self, lookup: LookedUp) -> None:
        """Tell the sessions, and give the session what it used; what it has left behind is nobody's.

        Once for each lookup, to any instance: the entries may be in several.
        """
        session, known = self.sessions.observe(lookup)
        used = set(lookup.entries)
        end = max((entry.end for entry in lookup.entries), default=0)
        self._leave_behind(session, max(end, known * lookup.chunk_tokens), used)
        for entry in used:
            if isinstance(entry.note, Shelf) and entry.note.session is not session:
                _move(entry, session)
        self.sessions.expect(lookup.keys, end // lookup.chunk_tokens, session)

    def _leave_behind(self, session: Session, start: int, used: set[Entry]) -> None:
        for shelf in list(session.holders.values()):
            assert isinstance(shelf, Shelf)
            for entry in list(shelf.beyond(start)):
                shelf.pool.evictable -= 1
                shelf.pool.put(shelf.pool.shelf(self.sessions.nobody), entry)

    def gauges(self) -> Mapping[str, int]:
        return {
            "sessions": len(self.sessions),
            "awaited": self.sessions.expected,
            "kinds": len(self.sessions.habits),
        }

    def __len__(self) -> int:
        return sum(pool.evictable for pool in self._pools.values())

    def __iter__(self) -> Iterator[Entry]:
        return (entry for pool in list(self._pools.values()) for entry in pool.in_order())


def _move(entry: Entry, session: Session) -> None:
    """A chunk becomes another session's, pinned or not."""
    old = entry.note
    assert isinstance(old, Shelf)
    pool, here = old.pool, entry.order is old
    pool.leave(old, entry)
    new = entry.note = pool.shelf(session)
    if here:
        pool.put(new, entry)
