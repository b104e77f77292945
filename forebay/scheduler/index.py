"""Who holds which prefix: exact, over (owner, tier) pairs, in numpy arrays.

A block's key determines everything before it (`prefix_keys`), so there is no tree: a table of keys, each with the
set of its holders. What a prompt has at a holder is the run of its first blocks that the holder has.

    keys of a prompt    k0  k1  k2  k3  k4         holder A: 3 blocks (k3 is missing)
    their sets          AB  AB  A   B   AB         holder B: 2 blocks

Twelve bytes a place and half a byte a bucket's place; with a table that is three quarters full down to a sixth
after removals, that is 17 to 75 bytes a block, and right after doubling 33. `benchmarks/index.py` measures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.scheduler.holder_sets import EMPTY, HOLDERS_MAX, HolderSets, Members
from forebay.scheduler.key_table import Keys, KeyTable, Slots

_PIECES = (64, 1024)
"""A prompt is looked up in pieces that grow, so that a miss near its head is cheap."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the index has of a prompt: its first `blocks` blocks, in runs of equal holders.

    Run i is the blocks [starts[i], starts[i + 1]) (the last ends at `blocks`); who holds them is
    `sets[which[i]]`. `first[j]` is where set j comes up first. At block `blocks` comes one that nobody has, or
    the prompt's end.
    """

    blocks: int
    starts: npt.NDArray[np.int64]
    which: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    sets: Sequence[Members]

    def lengths(self) -> dict[int, int]:
        """For each holder of the first block: how many of the prompt's first blocks it holds."""
        if not self.blocks:
            return {}
        missing = dict.fromkeys(self.sets[int(self.which[0])].tolist(), self.blocks)
        for first, members in sorted(zip(self.first.tolist(), self.sets, strict=True), key=lambda pair: pair[0]):
            for holder in missing.keys() - set(members.tolist()):
                missing[holder] = min(missing[holder], first)
        return missing

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each run ends."""
        return np.append(self.starts[1:], self.blocks)


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Gauges. `entries` are (holder, block) pairs, `refused` those that came when the index was full."""

    blocks: int
    entries: int
    sets: int
    bytes: int
    max_blocks: int
    refused: int
    rehashes: int


class PrefixIndex:
    """Batches of one holder in, matches of prompts out. Holders are numbers below 65,536.

    Holds at most `max_blocks` blocks: more are refused and counted, which costs hits. `expected` blocks get their
    room at once. Pure and not thread-safe.
    """

    def __init__(self, *, max_blocks: int = 1 << 26, expected: int = 0) -> None:
        assert max_blocks > 0
        self.max_blocks = max_blocks
        self._table = KeyTable(np.uint32, expected=expected)
        self._sets = HolderSets()
        self._entries = 0
        self._refused = 0

    def __len__(self) -> int:
        return len(self._table)

    def stored(self, holder: int, keys: Keys) -> int:
        """`holder` has these blocks now. Idempotent; returns how many it hadn't before."""
        assert 0 <= holder < HOLDERS_MAX, holder
        if len(self._table) + keys.size > self.max_blocks:
            keys = self._admitted(keys)
        slots = self._distinct(self._table.insert(keys))
        return self._move(slots, holder, add=True)

    def removed(self, holder: int, keys: Keys) -> int:
        """`holder` doesn't have these blocks any more. Idempotent; returns how many it had."""
        slots = self._table.find(keys)
        return self._move(self._distinct(slots[slots >= 0]), holder, add=False)

    def drop(self, holder: int) -> int:
        """`holder` has nothing any more. Returns how much it had. Walks the whole table."""
        containing = self._sets.containing(holder)
        slots = self._table.used_slots()
        return self._move(slots[np.isin(self._table.columns[0][slots], containing)], holder, add=False)

    def match(self, keys: Keys) -> PrefixMatch:
        """What is known of a prompt with these keys, in their order. Changes nothing."""
        ids = self._known(keys)
        blocks = ids.size
        changes = np.empty(blocks, np.bool_)
        changes[:1] = True
        np.not_equal(ids[1:], ids[:-1], out=changes[1:])
        starts = np.flatnonzero(changes)
        distinct, at, which = np.unique(ids[starts], return_index=True, return_inverse=True)
        sets = [self._sets.members(number) for number in distinct.tolist()]
        return PrefixMatch(blocks, starts, which, starts[at], sets)

    def holders(self, key: int) -> list[int]:
        """Who has the block of this key."""
        slot = int(self._table.find(np.array([key], np.uint64))[0])
        return [] if slot < 0 else self._sets.members(int(self._table.columns[0][slot])).tolist()

    def stats(self) -> IndexStats:
        """Present figures."""
        return IndexStats(
            blocks=len(self._table), entries=self._entries, sets=len(self._sets),
            bytes=self._table.nbytes + self._sets.nbytes, max_blocks=self.max_blocks, refused=self._refused,
            rehashes=self._table.rehashes,
        )  # fmt: skip

    def _known(self, keys: Keys) -> npt.NDArray[np.uint32]:
        """The sets of the leading keys that somebody has."""
        found = []
        begin = 0
        for end in (*_PIECES, keys.size):
            slots = self._table.find(keys[begin:end])
            absent = slots < 0
            if absent.any():
                found.append(self._table.columns[0][slots[: int(absent.argmax())]])
                break
            found.append(self._table.columns[0][slots])
            begin = end
            if end >= keys.size:
                break
        return np.concatenate(found) if len(found) > 1 else found[0]

    def _move(self, slots: Slots, holder: int, *, add: bool) -> int:
        before = self._table.columns[0][slots]
        move = self._sets.with_holder if add else self._sets.without_holder
        after = move(before, holder)
        self._table.columns[0][slots] = after
        moved = int(np.count_nonzero(before != after))
        self._entries += moved if add else -moved
        if not add:
            self._table.remove(slots[after == EMPTY])
        return moved

    def _admitted(self, keys: Keys) -> Keys:
        """What there is room for: blocks that are here already, and as many new ones as fit, the first ones."""
        new = self._table.find(keys) < 0
        room = self.max_blocks - len(self._table)
        kept = ~new | (np.cumsum(new) <= room)
        self._refused += int(keys.size - np.count_nonzero(kept))
        return keys[kept]

    @staticmethod
    def _distinct(slots: Slots) -> Slots:
        ordered = np.sort(slots)
        keep = np.empty(ordered.size, np.bool_)
        keep[:1] = True
        np.not_equal(ordered[1:], ordered[:-1], out=keep[1:])
        return ordered if keep.all() else ordered[keep]
