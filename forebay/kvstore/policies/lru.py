"""Least recently used, first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import EvictionPolicy


class Lru(EvictionPolicy):
    """An ordered dict: next victim at the front, last used at the back."""

    def __init__(self) -> None:
        self._order: OrderedDict[Entry, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        assert entry not in self._order
        self._order[entry] = None

    def demote(self, entry: Entry) -> None:
        if entry in self._order:
            self._order.move_to_end(entry, last=False)

    def remove(self, entry: Entry) -> None:
        self._order.pop(entry, None)

    def victim(self) -> Entry | None:
        return next(iter(self._order), None)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._order))
