"""What the daemon's policies are compared with: textbook policies on block numbers, Belady's optimum, no eviction.

One request is one step: the leading run of resident blocks hits; then all its blocks are accessed once each, deepest
first, by the policy (hit: touch; miss: insert, with eviction). Nothing is pinned; chains mean nothing.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from benchmarks.hit_rate.workload import Workload

NEVER = 1 << 60


class Cache(Protocol):
    """A cache of block numbers."""

    def __contains__(self, block: int) -> bool: ...

    def access(self, block: int) -> None:
        """Touch it, or take it in."""


class TextbookLru:
    """A list by recency."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def access(self, block: int) -> None:
        if block in self._order:
            self._order.move_to_end(block)
            return
        if len(self._order) >= self._capacity:
            self._order.popitem(last=False)
        self._order[block] = None


class TextbookArc:
    """Megiddo and Modha's, with a real-valued target."""

    def __init__(self, capacity: int) -> None:
        self._c, self._p = capacity, 0.0
        self._t1: OrderedDict[int, None] = OrderedDict()
        self._t2: OrderedDict[int, None] = OrderedDict()
        self._b1: OrderedDict[int, None] = OrderedDict()
        self._b2: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._t1 or block in self._t2

    def _replace(self, block: int) -> None:
        full = len(self._t1) > self._p or (block in self._b2 and len(self._t1) == self._p)
        source, ghosts = (self._t1, self._b1) if self._t1 and full else (self._t2, self._b2)
        ghosts[source.popitem(last=False)[0]] = None

    def access(self, block: int) -> None:
        t1, t2, b1, b2, c = self._t1, self._t2, self._b1, self._b2, self._c
        if block in t1 or block in t2:
            t1.pop(block, None)
            t2.pop(block, None)
            t2[block] = None
        elif block in b1:
            self._p = min(float(c), self._p + max(len(b2) / len(b1), 1.0))
            self._replace(block)
            del b1[block]
            t2[block] = None
        elif block in b2:
            self._p = max(0.0, self._p - max(len(b1) / len(b2), 1.0))
            self._replace(block)
            del b2[block]
            t2[block] = None
        else:
            self._make_room(block)
            t1[block] = None

    def _make_room(self, block: int) -> None:
        t1, t2, b1, b2, c = self._t1, self._t2, self._b1, self._b2, self._c
        if len(t1) + len(b1) == c:
            if len(t1) < c:
                b1.popitem(last=False)
                self._replace(block)
            else:
                t1.popitem(last=False)
        elif (total := len(t1) + len(t2) + len(b1) + len(b2)) >= c:
            if total == 2 * c:
                b2.popitem(last=False)
            self._replace(block)


class TextbookS3Fifo:
    """Yang et al.'s: a tenth is small, promotion at two uses, ghosts of the main queue's size."""

    def __init__(self, capacity: int) -> None:
        self._c, self._small_size = capacity, max(1, capacity // 10)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def access(self, block: int) -> None:
        if block in self._uses:
            self._uses[block] = min(3, self._uses[block] + 1)
            return
        while len(self._uses) >= self._c:
            if not self._main or (self._small and len(self._small) >= self._small_size):
                self._evict_small()
            else:
                self._evict_main()
        was_here = block in self._ghosts
        self._ghosts.pop(block, None)
        (self._main if was_here else self._small)[block] = None
        self._uses[block] = 0

    def _evict_small(self) -> None:
        block, _ = self._small.popitem(last=False)
        if self._uses[block] >= 2:
            self._uses[block] = 0
            self._main[block] = None
            if len(self._main) > self._c - self._small_size:
                self._evict_main()
            return
        del self._uses[block]
        if len(self._ghosts) >= self._c - self._small_size:
            self._ghosts.popitem(last=False)
        self._ghosts[block] = None

    def _evict_main(self) -> None:
        while True:
            block, _ = self._main.popitem(last=False)
            if not self._uses[block]:
                del self._uses[block]
                return
            self._uses[block] -= 1
            self._main[block] = None


TEXTBOOK: dict[str, Callable[[int], Cache]] = {"LRU": TextbookLru, "ARC": TextbookArc, "S3-FIFO": TextbookS3Fifo}


def textbook(load: Workload, name: str, capacity: int) -> float:
    """The token hit rate of a textbook policy."""
    cache, hits = TEXTBOOK[name](capacity), 0.0
    for ask in load.asks:
        leading = 0
        for block in ask.blocks:
            if block not in cache:
                break
            leading += 1
        hits += load.saved(ask, leading)
        for block in reversed(ask.blocks):
            cache.access(block)
    return hits / load.whole


def infinite(load: Workload) -> float:
    """The token hit rate if nothing is ever evicted."""
    seen = bytearray(load.blocks)
    hits = 0.0
    for ask in load.asks:
        leading = next((i for i, block in enumerate(ask.blocks) if not seen[block]), len(ask.blocks))
        hits += load.saved(ask, leading)
        for block in ask.blocks:
            seen[block] = 1
    return hits / load.whole


class Belady:
    """The optimum of a workload: of all that is here, what is needed last goes (of that, what lies deepest), and what
    is never needed again isn't kept at all. It keeps prefixes whole."""

    def __init__(self, load: Workload) -> None:
        self._load = load
        following = array("q", [NEVER]) * load.blocks
        self._next: list[array[int]] = []
        for number in range(len(load.asks) - 1, -1, -1):
            blocks = load.asks[number].blocks
            self._next.append(array("q", [following[block] for block in blocks]))
            for block in blocks:
                following[block] = number
        self._next.reverse()

    def hit_rate(self, capacity: int) -> float:
        """With room for `capacity` blocks."""
        due = array("q", [-1]) * self._load.blocks  # when it is needed next; -1: it isn't here
        last: list[tuple[int, int, int]] = []  # (-due, -depth, block), with items that are out of date
        here, hits = 0, 0.0
        for number, ask in enumerate(self._load.asks):
            leading = next((i for i, block in enumerate(ask.blocks) if due[block] < 0), len(ask.blocks))
            hits += self._load.saved(ask, leading)
            needed = self._next[number]
            for depth in range(len(ask.blocks) - 1, -1, -1):
                block, then = ask.blocks[depth], needed[depth]
                here += (then != NEVER) - (due[block] >= 0)
                due[block] = then if then != NEVER else -1
                if then != NEVER:
                    heappush(last, (-then, -depth, block))
                while here > capacity:
                    negative, _, farthest = heappop(last)
                    if due[farthest] == -negative:
                        due[farthest] = -1
                        here -= 1
        return hits / self._load.whole
