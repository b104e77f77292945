"""Least recently used, first out; tails before their prefixes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import EvictionPolicy, Lineage, NoLineage
from forebay.kvstore.policies.descent import Descent


class Lru(EvictionPolicy):
    """An ordered dict a slot size: next victim at the front, last used at the back."""

    def __init__(self, lineage: Lineage | None = None) -> None:
        self._orders: defaultdict[int, OrderedDict[Entry, None]] = defaultdict(OrderedDict)
        self._descent = Descent(lineage or NoLineage(), self._known)

    def _known(self, entry: Entry) -> bool:
        return entry in self._orders[entry.slot_bytes]

    def add(self, entry: Entry) -> None:
        order = self._orders[entry.slot_bytes]
        assert entry not in order
        order[entry] = None

    def demote(self, entry: Entry) -> None:
        order = self._orders[entry.slot_bytes]
        if entry in order:
            order.move_to_end(entry, last=False)

    def remove(self, entry: Entry) -> None:
        self._orders[entry.slot_bytes].pop(entry, None)

    def victim(self, slot_bytes: int) -> Entry | None:
        order = self._orders[slot_bytes]
        for _ in range(len(order)):
            coldest = next(iter(order))
            leaf = self._descent.leaf(coldest)
            if leaf is not None:
                return leaf
            order.move_to_end(coldest)  # what a pinned entry needs is in use
        return None

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def __iter__(self) -> Iterator[Entry]:
        return (entry for order in list(self._orders.values()) for entry in list(order))
