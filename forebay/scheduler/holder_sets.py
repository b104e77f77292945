"""Sets of holders, each kept once: blocks that are held by the same (owner, tier) pairs share one number.

A block then costs four bytes for who holds it, however many do. There are never more sets than blocks, plus the
empty one; a set that no block has any more is forgotten at once.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

HOLDERS_MAX = 1 << 16
EMPTY = 0
_ROUNDS = 4

SetIds = npt.NDArray[np.uint32]
Members = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Listed:
    """Members of several sets: those of the i-th are `members[offsets[i] : offsets[i + 1]]`, ascending. Iterates over
    the sets."""

    members: Members
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return self.offsets.size - 1

    def __iter__(self) -> Iterator[Members]:
        for begin, end in pairwise(self.offsets.tolist()):
            yield self.members[begin:end]


class HolderSets:
    """Numbers for sets of holders (u16), counted by the blocks that have them. Not thread-safe."""

    def __init__(self) -> None:
        self._members: list[bytes] = [b""]
        self._ids: dict[bytes, int] = {b"": EMPTY}
        self._counts = np.zeros(16, np.int64)
        self._free: list[int] = []

    def __len__(self) -> int:
        """Sets that some block has."""
        return len(self._ids) - 1

    @property
    def nbytes(self) -> int:
        """About what they take: bytes objects, their places in list and dictionary, and counts."""
        held = sum(33 + len(members) for members in self._ids)
        return held + 8 * len(self._members) + 100 * len(self._ids) + self._counts.nbytes

    @property
    def numbers(self) -> int:
        """One more than the greatest number of a set."""
        return len(self._members)

    def members(self, set_id: int) -> Members:
        """The holders of a set, ascending."""
        return np.frombuffer(self._members[set_id], np.uint16)

    def listed(self, set_ids: Sequence[int]) -> Listed:
        """The holders of several sets, one after the other."""
        raw = [self._members[number] for number in set_ids]
        offsets = np.cumsum([0, *map(len, raw)]) // 2
        return Listed(np.frombuffer(b"".join(raw), np.uint16), offsets)

    def with_holder(self, ids: SetIds, holder: int) -> SetIds:
        """For blocks that had these sets: the sets with `holder` in them. Counts the blocks over."""
        return self._moved(ids, holder, add=True)

    def without_holder(self, ids: SetIds, holder: int) -> SetIds:
        """For blocks that had these sets: the sets without `holder`. Counts the blocks over."""
        return self._moved(ids, holder, add=False)

    def move(self, old: int, holder: int, count: int, *, add: bool) -> int:
        """So many blocks that had this set gain or lose `holder`: the set that they have now."""
        members = array("H", self._members[old])
        at = bisect.bisect_left(members, holder)
        has = at < len(members) and members[at] == holder
        if has == add:
            return old
        if add:
            members.insert(at, holder)
        else:
            del members[at]
        new = self._number(members.tobytes())
        self._count(new, count)
        self._count(old, -count)
        return new

    def containing(self, holder: int) -> SetIds:
        """All sets that have `holder`."""
        found = [
            number for members, number in self._ids.items()
            if (at := bisect.bisect_left(listed := memoryview(members).cast("H"), holder)) < len(listed)
            and listed[at] == holder
        ]  # fmt: skip
        return np.array(found, np.uint32)

    def _moved(self, ids: SetIds, holder: int, *, add: bool) -> SetIds:
        moved = np.empty_like(ids)
        rest = np.arange(ids.size)
        for _ in range(_ROUNDS):
            if not rest.size:
                return moved
            # Nearly always a batch has one set, or a few: cheaper one by one than sorted.
            old = ids[rest[0]]
            same = ids[rest] == old
            moved[rest[same]] = self.move(int(old), holder, int(np.count_nonzero(same)), add=add)
            rest = rest[~same]
        olds, back, counts = np.unique(ids[rest], return_inverse=True, return_counts=True)
        news = [
            self.move(old, holder, count, add=add)
            for old, count in zip(olds.tolist(), counts.tolist(), strict=True)
        ]
        moved[rest] = np.array(news, np.uint32)[back]
        return moved

    def _number(self, members: bytes) -> int:
        number = self._ids.get(members)
        if number is None:
            number = self._free.pop() if self._free else len(self._members)
            self._ids[members] = number
            if number == len(self._members):
                self._members.append(members)
            else:
                self._members[number] = members
            if number >= self._counts.size:
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        return number

    def _count(self, number: int, change: int) -> None:
        if number == EMPTY:
            return
        self._counts[number] += change
        assert self._counts[number] >= 0, number
        if not self._counts[number]:
            del self._ids[self._members[number]]
            self._members[number] = b""
            self._free.append(number)
