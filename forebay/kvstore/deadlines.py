"""Things that end at a time, found without a walk: one bucket for each grain of time. Pure.

Setting and dropping a deadline take constant time, so that a promise that is given back early, as nearly all
are, leaves nothing behind. What is due comes out one at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

GRAIN_S = 0.1


class Deadlines(Generic[T]):
    """Never early, at most a grain late. There are at most as many buckets as grains up to the last deadline."""

    def __init__(self, grain_s: float = GRAIN_S) -> None:
        self._grain_s = grain_s
        self._buckets: dict[int, dict[T, None]] = {}
        self._numbers: list[int] = []  # a heap of the buckets' numbers
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def set(self, item: T, at: float) -> int:
        """`item` ends at `at`; returns the number of its bucket, which `drop` wants back."""
        number = int(at / self._grain_s) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            heapq.heappush(self._numbers, number)
        assert item not in bucket
        bucket[item] = None
        self._count += 1
        return number

    def drop(self, item: T, number: int) -> None:
        """`item` has ended otherwise. It must be in bucket `number`."""
        del self._buckets[number][item]
        self._count -= 1

    def take(self, now: float) -> T | None:
        """Something that is due, which is thereby forgotten; None if nothing is."""
        while self._numbers and self._numbers[0] * self._grain_s <= now:
            bucket = self._buckets[self._numbers[0]]
            if bucket:
                self._count -= 1
                return bucket.popitem()[0]
            del self._buckets[heapq.heappop(self._numbers)]
        return None
