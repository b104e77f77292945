"""A hash table from 64-bit keys to small columns, all in numpy arrays: batches in, batches out.

A bucket is eight keys, one cache line. A key lives in its home bucket or, where that was full, in one behind
it; `passed` counts for each bucket the keys that live behind it, so a search ends at the first bucket that
nobody passed, and a removal leaves no tombstones. The table doubles when it is three quarters full and halves
when it is under a sixth: what churn brought is gone afterwards. Doing so copies everything (`rehash_seconds` in
`benchmarks/index.py`); a table that is told its size beforehand never does.

The numpy form of each loop is here, the compiled one in `compiled`: they leave the same arrays behind, but for the
order inside a bucket. Nothing here blocks or does I/O. Not thread-safe.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.scheduler.loops import compiled_loops

Keys: TypeAlias = npt.NDArray[np.uint64]
Slots: TypeAlias = npt.NDArray[np.int64]
Column: TypeAlias = npt.NDArray[Any]

_WAYS = 8
_BUCKETS_MIN = 8
_FULL, _SPARSE = 0.75, 1 / 6
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
# 0 marks an empty place; the key 0 goes by another name.
_ZERO = np.uint64(0xD6E8FEB86659FD93)
# Eight booleans are one word with one byte set; times this, its top byte says which.
_WHICH = np.uint64(0x0001020304050607)
_TOP = np.uint64(56)
_ONE = np.uint64(1)
_PIECE = 1 << 16
ABSENT = -1


class KeyTable:
    """Keys in slots; `columns` hold one value a slot each, as flat arrays, replaced when the table is resized.

    A slot is good until the next `insert` or `remove`.
    """

    def __init__(self, *dtypes: npt.DTypeLike, expected: int = 0) -> None:
        compiled_loops()  # if they are to be compiled, then now and not at a request
        self._dtypes = dtypes
        self.used = 0
        self.rehashes = 0
        self._allocate(self._buckets_for(expected))
        self._least = self._buckets

    def __len__(self) -> int:
        return self.used

    @property
    def capacity(self) -> int:
        """Places, used or not."""
        return self._buckets * _WAYS

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._keys.nbytes + self._passed.nbytes + sum(column.nbytes for column in self.columns)

    def find(self, keys: Keys) -> Slots:
        """The slot of each key, ABSENT where there is none."""
        loops = compiled_loops()
        if loops is not None:
            found: Slots = loops.find(self._flat, self._passed, self._shift, keys)
            return found
        return self._find(_named(keys))

    def match(self, keys: Keys, kind_of: Slots, room: Slots) -> Any:
        """Compiled alone: see `compiled.match`. The sets are the first column's."""
        return compiled_loops().match(self._flat, self._passed, self.columns[0], self._shift, keys, kind_of, room)

    def match_nested(self, keys: Keys) -> Any:
        """Compiled alone: see `compiled.match_nested`."""
        return compiled_loops().match_nested(self._flat, self._passed, self.columns[0], self._shift, keys)

    def insert(self, keys: Keys) -> Slots:
        """The slot of each key, made where there was none (its columns are then 0). May resize."""
        if compiled_loops() is not None:
            return self._insert_compiled(keys)
        keys = _named(keys)
        slots = self._find(keys)
        missing = np.flatnonzero(slots < 0)
        if missing.size:
            # Repeated keys count twice here, so it may grow a little early.
            if self.used + missing.size > _FULL * self.capacity:
                self._resize(self._buckets_for(self.used + missing.size))
                slots = self._find(keys)
            slots[missing] = self._place(keys[missing])
        return slots

    def remove(self, slots: Slots) -> None:
        """Free these slots, which are in use, each once. May resize."""
        loops = compiled_loops()
        if loops is not None:
            loops.free(self._flat, self._passed, self._shift, slots)
        else:
            self._free(slots)
        for column in self.columns:
            column[slots] = 0
        self.used -= len(slots)
        if self.used < _SPARSE * self.capacity and self._buckets > self._least:
            self._resize(max(self._least, self._buckets_for(self.used)))

    def keys_at(self, slots: Slots) -> Keys:
        """The keys in these slots."""
        found = self._flat[slots]
        found[found == _ZERO] = 0
        return found

    # --- inside ------------------------------------------------------------------------------------------

    def _buckets_for(self, count: int) -> int:
        wanted = max(_BUCKETS_MIN, int(count / (_FULL * _WAYS)) + 1)
        return 1 << (wanted - 1).bit_length()

    def _allocate(self, buckets: int) -> None:
        self._buckets = buckets
        self._shift = np.uint64(64 - (buckets.bit_length() - 1))
        self._flat = np.zeros(buckets * _WAYS, np.uint64)
        self._keys = self._flat.reshape(buckets, _WAYS)
        self._passed = np.zeros(buckets, np.uint32)
        self.columns: list[Column] = [np.zeros(buckets * _WAYS, dtype) for dtype in self._dtypes]

    def _insert_compiled(self, keys: Keys) -> Slots:
        if self.used + keys.size > _FULL * self.capacity:
            missing = int(np.count_nonzero(self.find(keys) < 0))
            if self.used + missing > _FULL * self.capacity:
                self._resize(self._buckets_for(self.used + missing))
        slots = np.empty(keys.size, np.int64)
        self.used += compiled_loops().insert(self._flat, self._passed, self._shift, keys, slots)
        return slots

    def _free(self, slots: Slots) -> None:
        buckets, homes = slots >> 3, self._homes(self._flat[slots])
        self._flat[slots] = 0
        moved = homes != buckets
        if moved.any():
            self._unpass(homes[moved], buckets[moved])

    def _homes(self, keys: Keys) -> Slots:
        return ((keys * _SPREAD) >> self._shift).astype(np.int64)

    def _find(self, keys: Keys) -> Slots:
        buckets = self._homes(keys)
        slots, found = self._look(keys, buckets)
        if found.all():
            return slots
        rest = np.flatnonzero(~found & (self._passed[buckets] > 0))
        while rest.size:
            buckets[rest] = (buckets[rest] + 1) & (self._buckets - 1)
            slots[rest], found = self._look(keys[rest], buckets[rest])
            rest = rest[~found & (self._passed[buckets[rest]] > 0)]
        return slots

    def _look(self, keys: Keys, buckets: Slots) -> tuple[Slots, npt.NDArray[np.bool_]]:
        hits = (self._keys[buckets] == keys[:, None]).view(np.uint64).reshape(-1)
        found = hits != 0
        slots = (buckets << 3) + ((hits * _WHICH) >> _TOP).astype(np.int64)
        slots[~found] = ABSENT
        return slots, found

    def _place(self, keys: Keys) -> Slots:
        """Put keys that aren't here into free places; returns their slots.

        All try the first free place of their bucket at once; whoever is read back has it, the others try again.
        Equal keys go through all of this in step, so they end in one place.
        """
        flat = self._flat
        slots = np.empty(keys.size, np.int64)
        buckets = self._homes(keys)
        todo = np.arange(keys.size)
        while todo.size:
            here, wanted = buckets[todo], keys[todo]
            free = (self._keys[here] == 0).view(np.uint64).reshape(-1)
            targets = (here << 3) + (((free & (~free + _ONE)) * _WHICH) >> _TOP).astype(np.int64)
            full = free == 0
            if full.any():
                over = todo[full]
                np.add.at(self._passed, here[full][_firsts(wanted[full])], 1)
                buckets[over] = (here[full] + 1) & (self._buckets - 1)
                flat[targets[~full]] = wanted[~full]
            else:
                flat[targets] = wanted
            won = (flat[targets] == wanted) & ~full
            slots[todo[won]] = targets[won]
            todo = todo[~won]
        self._count_in(slots)
        return slots

    def _count_in(self, slots: Slots) -> None:
        ordered = np.sort(slots)
        self.used += 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))

    def _unpass(self, homes: Slots, buckets: Slots) -> None:
        while homes.size:
            np.subtract.at(self._passed, homes, 1)
            homes = (homes + 1) & (self._buckets - 1)
            further = homes != buckets
            homes, buckets = homes[further], buckets[further]

    def _resize(self, buckets: int) -> None:
        self.rehashes += 1
        # One of each bucket after the other, so that few of a piece want the same bucket at once.
        ways = np.flatnonzero(self._keys.T)
        old = (ways % self._buckets << 3) + ways // self._buckets
        keys, columns = self._flat[old], [column[old] for column in self.columns]
        self._allocate(buckets)
        self.used = 0
        place = self._place if compiled_loops() is None else self._insert_compiled
        for at in range(0, len(keys), _PIECE):
            slots = place(keys[at : at + _PIECE])
            for column, values in zip(self.columns, columns, strict=True):
                column[slots] = values[at : at + _PIECE]


def _named(keys: Keys) -> Keys:
    return keys if keys.all() else np.where(keys == 0, _ZERO, keys)


def _firsts(keys: Keys) -> Slots:
    """Where each different key stands first."""
    return np.unique(keys, return_index=True)[1]
