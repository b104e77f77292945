"""Least recently used, first out; tails before their prefixes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import EvictionPolicy, Lineage, NoLineage
from forebay.kvstore.policies.descent import Descent
from forebay.kvstore.policies.order import Order


class Lru(EvictionPolicy):
    """An order a slot size."""

    def __init__(self, lineage: Lineage | None = None) -> None:
        self._orders: defaultdict[int, Order[Entry]] = defaultdict(Order)
        self._descent = Descent(lineage or NoLineage(), lambda entry: entry in self._orders[entry.slot_bytes])

    def add(self, entry: Entry) -> None:
        self._orders[entry.slot_bytes].append(entry)

    def demote(self, entry: Entry) -> None:
        self._orders[entry.slot_bytes].move_first(entry)

    def remove(self, entry: Entry) -> None:
        self._orders[entry.slot_bytes].discard(entry)

    def victim(self, slot_bytes: int) -> Entry | None:
        order = self._orders[slot_bytes]
        for _ in range(len(order)):
            coldest = order.first
            assert coldest is not None
            leaf = self._descent.leaf(coldest)
            if leaf is not None:
                return leaf
            order.move_last(coldest)  # what a pinned entry needs is in use
        return None

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def __iter__(self) -> Iterator[Entry]:
        return (entry for order in list(self._orders.values()) for entry in list(order))
