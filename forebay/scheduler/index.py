"""Who holds which prefix: exact, over (owner, tier) pairs, in numpy arrays.

A block's key determines everything before it (`prefix_keys`), so there is no tree: a table of keys, each with the
set of its holders. What a prompt has at a holder is the run of its first blocks that the holder has.

    keys of a prompt    k0  k1  k2  k3  k4         holder A: 3 blocks (k3 is missing)
    their sets          AB  AB  A   B   AB         holder B: 2 blocks

Twelve bytes a place and half a byte a bucket's place; with a table that is three quarters full down to a sixth
after removals, that is 17 to 75 bytes a block, and right after doubling 33. `benchmarks/index.py` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.scheduler.holder_sets import EMPTY, HOLDERS_MAX, HolderSets, Listed
from forebay.scheduler.key_table import Keys, KeyTable, Slots
from forebay.scheduler.loops import compiled_loops

_PIECES = (64, 1024)
"""A prompt is looked up in pieces that grow, so that a miss near its head is cheap."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the index has of a prompt: its first `blocks` blocks, in runs of equal holders.

    Run i is the blocks [starts[i], starts[i + 1]) (the last ends at `blocks`); who holds them is set `which[i]` of
    `sets`. `first[j]` is where set j comes up first, ascending. At block `blocks` comes one that nobody
    has, or the prompt's end.
    """

    blocks: int
    starts: npt.NDArray[np.int64]
    which: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    sets: Listed

    def lengths(self) -> dict[int, int]:
        """For each holder of the first block: how many of the prompt's first blocks it holds."""
        if not self.blocks:
            return {}
        missing = dict.fromkeys(next(iter(self.sets)).tolist(), self.blocks)
        for first, members in zip(self.first.tolist(), self.sets, strict=True):
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
        self._kind_of = np.full(64, -1, np.int64)
        self._room = np.empty((4, 64), np.int64)
        self._entries = 0
        self._refused = 0

    def __len__(self) -> int:
        return len(self._table)

    def stored(self, holder: int, keys: Keys) -> int:
        """`holder` has these blocks now. Idempotent; returns how many it hadn't before."""
        assert 0 <= holder < HOLDERS_MAX, holder
        if len(self._table) + keys.size > self.max_blocks:
            keys = self._admitted(keys)
        return self._move(self._table.insert(keys), holder, add=True)

    def removed(self, holder: int, keys: Keys) -> int:
        """`holder` doesn't have these blocks any more. Idempotent; returns how many it had."""
        slots = self._table.find(keys)
        return self._move(slots[slots >= 0], holder, add=False)

    def drop(self, holder: int) -> int:
        """`holder` has nothing any more. Returns how much it had. Walks the whole table, if it had any."""
        having = self._sets.containing(holder)
        if not having.size:
            return 0
        holds = np.zeros(self._sets.numbers, np.bool_)
        holds[having] = True
        return self._move(np.flatnonzero(holds[self._table.columns[0]]), holder, add=False)

    def match(self, keys: Keys, *, nested: bool = False) -> PrefixMatch:
        """What is known of a prompt with these keys, in their order. Changes nothing.

        `nested` promises that whoever holds a block holds all blocks before it, of every prompt (and that holders are
        fewer than 4,096): then few of them have to be looked up.
        """
        if compiled_loops() is not None:
            return self._match_compiled(keys, nested)
        ids = self._known(keys)
        blocks = ids.size
        changes = np.empty(blocks, np.bool_)
        changes[:1] = True
        np.not_equal(ids[1:], ids[:-1], out=changes[1:])
        starts = np.flatnonzero(changes)
        distinct, at, which = np.unique(ids[starts], return_index=True, return_inverse=True)
        order = np.argsort(at)
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        sets = self._sets.listed(distinct[order].tolist())
        return PrefixMatch(blocks, starts, place[which], starts[at[order]], sets)

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

    def _match_compiled(self, keys: Keys, nested: bool) -> PrefixMatch:
        table = self._table
        if keys.size > self._room.shape[1]:
            self._room = np.empty((4, keys.size), np.int64)
        found = table.match_nested(keys) if nested else table.match(keys, self._scratch(), self._room)
        blocks, starts, which, first, distinct = found
        return PrefixMatch(blocks, starts, which, first, self._sets.listed(distinct.tolist()))

    def _scratch(self) -> npt.NDArray[np.int64]:
        """One -1 a set."""
        while self._kind_of.size < self._sets.numbers:
            self._kind_of = np.full(2 * self._kind_of.size, -1, np.int64)
        return self._kind_of

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
        """These slots, which may repeat, gain or lose a holder. Returns how many did."""
        if compiled_loops() is not None:
            moved, bare = self._moved_compiled(slots, holder, add=add)
        else:
            moved, bare = self._moved(self._distinct(slots), holder, add=add)
        self._entries += moved if add else -moved
        if bare.size:
            self._table.remove(bare)
        return moved

    def _moved_compiled(self, slots: Slots, holder: int, *, add: bool) -> tuple[int, Slots]:
        loops, column = compiled_loops(), self._table.columns[0]
        olds, counts, kinds = loops.take_sets(column, slots, self._scratch())
        listed = zip(olds.tolist(), counts.tolist(), strict=True)
        news = np.array([self._sets.move(old, holder, count, add=add) for old, count in listed], np.int64)
        return int(counts[news != olds].sum()), loops.give_sets(column, slots, kinds, news)

    def _moved(self, slots: Slots, holder: int, *, add: bool) -> tuple[int, Slots]:
        before = self._table.columns[0][slots]
        move = self._sets.with_holder if add else self._sets.without_holder
        after = move(before, holder)
        self._table.columns[0][slots] = after
        return int(np.count_nonzero(before != after)), slots[after == EMPTY]

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
