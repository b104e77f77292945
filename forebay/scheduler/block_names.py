"""What one stream calls its blocks: an engine's own hash to the prefix key, its place in the chain, and where it is.

A name is kept while the stream has its block in any tier, so a child finds its parent though that has left memory
for the disk. 21 bytes a place (28 to 56 a block).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forebay.events.schema import BlockHash, low64
from forebay.scheduler.key_table import Keys, KeyTable, Slots
from forebay.scheduler.places import Tier

_LOW = 0xFFFFFFFFFFFFFFFF


class Replaced(NamedTuple):
    """Blocks whose names now stand for others: their keys, in a tier where they were."""

    tier: Tier
    keys: Keys


class Named(NamedTuple):
    """A block that a stream has told of."""

    key: int
    depth: int


def as_names(hashes: Sequence[BlockHash]) -> Keys:
    """Hashes as 64 bits: numbers as they are (signed ones too), longer ones by their low end."""
    if set(map(type, hashes)) == {int}:
        try:
            return np.array(hashes, np.uint64)
        except OverflowError:
            pass  # signed
    return np.array([name & _LOW if isinstance(name, int) else low64(name) for name in hashes], np.uint64)


class BlockNames:
    """The names of one stream. Not thread-safe."""

    def __init__(self) -> None:
        self._table = KeyTable(np.uint64, np.uint32, np.uint8)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    def find(self, name: BlockHash) -> Named | None:
        """The block of this name."""
        slot = int(self._table.find(as_names([name]))[0])
        if slot < 0:
            return None
        keys, depths, _ = self._table.columns
        return Named(int(keys[slot]), int(depths[slot]))

    def stored(self, names: Keys, keys: Keys, depth: int, tier: Tier) -> list[Replaced]:
        """Consecutive blocks, from the `depth`-th of their chain, are in a tier now. `names` are all different.

        Returns the blocks that had these names before and are others (64 bits can collide): nothing will ever tell
        of them any more.
        """
        slots = self._table.insert(names)
        known_keys, depths, tiers = self._table.columns
        others = (known_keys[slots] != keys) & (tiers[slots] != 0)
        replaced = self._replaced(slots[others]) if others.any() else []
        known_keys[slots] = keys
        depths[slots] = np.arange(depth, depth + names.size)
        tiers[slots] |= np.uint8(1 << tier)
        return replaced

    def removed(self, names: Keys, tier: Tier) -> Keys:
        """They aren't in that tier any more: the keys of those that were."""
        slots = self._table.find(names)
        known_keys, _, tiers = self._table.columns
        bit = np.uint8(1 << tier)
        slots = np.unique(slots[slots >= 0])
        slots = slots[(tiers[slots] & bit) != 0]
        keys: Keys = known_keys[slots]
        tiers[slots] &= ~bit
        self._table.remove(slots[tiers[slots] == 0])
        return keys

    def _replaced(self, slots: Slots) -> list[Replaced]:
        known_keys, _, tiers = self._table.columns
        found = [Replaced(tier, known_keys[slots[(tiers[slots] & (1 << tier)) != 0]]) for tier in Tier]
        tiers[slots] = 0
        return [one for one in found if one.keys.size]
