"""Tails before their prefixes: from the entry that an order would evict to one that nobody needs.

order says: evict a         a - b - c - d       d goes, then c, then b, then a
                                  \\ t            t is a tail in a slot of another size: it goes along with b
"""

from __future__ import annotations

from collections.abc import Callable

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import Lineage


class Descent:
    """Walks down chains. The way down is kept, so that evicting a chain costs one step an entry."""

    def __init__(self, lineage: Lineage, evictable: Callable[[Entry], bool]) -> None:
        self._lineage, self._evictable = lineage, evictable
        self._ways: dict[int, list[Entry]] = {}

    def leaf(self, entry: Entry) -> Entry | None:
        """`entry`, or what needs it and is in a slot of the same size; None if something pinned needs it."""
        way = self._ways.get(entry.slot_bytes)
        if way is None or not way or way[0] is not entry:
            way = self._ways[entry.slot_bytes] = [entry]
        while len(way) > 1 and not self._evictable(way[-1]):
            way.pop()
        while True:
            below = self._next(way[-1])
            if below is way[-1]:
                return below
            if below is None:
                del self._ways[entry.slot_bytes]
                return None
            way.append(below)

    def _next(self, entry: Entry) -> Entry | None:
        """What has to go before `entry`: itself if nothing, None if something pinned."""
        dependents = self._lineage.dependents(entry)
        same = None
        for dependent in dependents:
            if not self._evictable(dependent):
                return None
            if dependent.slot_bytes != entry.slot_bytes:
                if not self._all_evictable(dependent):
                    return None
            elif same is None:
                same = dependent
        return same or entry

    def _all_evictable(self, entry: Entry) -> bool:
        below = [entry]
        for above in below:
            below += self._lineage.dependents(above)
        return all(map(self._evictable, below))
