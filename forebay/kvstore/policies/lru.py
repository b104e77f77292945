"""Least recently used, first out."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import EvictionPolicy


class Lru(EvictionPolicy):
    """An ordered dict a slot size: next victim at the front, last used at the back."""

    def __init__(self) -> None:
        self._orders: defaultdict[int, OrderedDict[Entry, None]] = defaultdict(OrderedDict)

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
        return next(iter(self._orders[slot_bytes]), None)

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def __iter__(self) -> Iterator[Entry]:
        return (entry for order in list(self._orders.values()) for entry in list(order))
