"""A list whose items carry their own links: every operation is O(1) in the worst case, at 24 bytes an item.

    first (coldest) ... last (hottest)

A dict of a million items that is reordered at each use builds its table anew from time to time, which stops the daemon
for a tenth of a second; a list never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar


class Linked(Protocol):
    """What can be in one order at a time. The fields are the order's."""

    order: Any
    older: Any
    newer: Any


T = TypeVar("T", bound=Linked)


class _End:
    """Before the first and after the last."""

    __slots__ = ("newer", "older", "order")

    def __init__(self) -> None:
        self.order: Any = None
        self.older: Any = self
        self.newer: Any = self


class Order(Generic[T]):
    """An order of linked items."""

    __slots__ = ("_end", "_length")

    def __init__(self) -> None:
        self._end = _End()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, item: T) -> bool:
        return item.order is self

    def __iter__(self) -> Iterator[T]:
        """Coldest first. Don't change the order meanwhile."""
        item = self._end.newer
        while item is not self._end:
            yield item
            item = item.newer

    @property
    def first(self) -> T | None:
        """The coldest item."""
        item: T | None = self._end.newer if self._length else None
        return item

    def append(self, item: T) -> None:
        """`item`, which is in no order, becomes the hottest."""
        self._insert(item, self._end.older)

    def push_first(self, item: T) -> None:
        """`item`, which is in no order, becomes the coldest."""
        self._insert(item, self._end)

    def _insert(self, item: T, after: Any) -> None:
        assert item.order is None, "in one order at a time"
        before = after.newer
        item.order, item.older, item.newer = self, after, before
        after.newer = before.older = item
        self._length += 1

    def discard(self, item: T) -> bool:
        """Take an item out; False if it isn't in this order."""
        if item.order is not self:
            return False
        item.older.newer, item.newer.older = item.newer, item.older
        item.order = item.older = item.newer = None
        self._length -= 1
        return True

    def move_last(self, item: T) -> None:
        """Make an item of this order the hottest."""
        if self.discard(item):
            self.append(item)

    def move_first(self, item: T) -> None:
        """Make an item of this order the coldest."""
        if self.discard(item):
            self.push_first(item)
