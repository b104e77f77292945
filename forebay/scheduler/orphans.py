"""Stored blocks whose parent isn't known (yet): parked until it is, at most so many, the oldest given up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from forebay.events.schema import BlockHash, BlockStored
from forebay.scheduler.places import Tier, tier_of


class Orphans:
    """Parked events of one stream, by the parent that they wait for. Counts blocks, not events."""

    def __init__(self, max_blocks: int = 1 << 14) -> None:
        self.max_blocks = max_blocks
        self.blocks = 0
        self.given_up = 0
        self._events: OrderedDict[int, BlockStored] = OrderedDict()
        self._waiting: dict[BlockHash, list[int]] = {}
        self._where: dict[BlockHash, list[int]] = {}
        self._next = 0

    def park(self, event: BlockStored) -> None:
        """Keep it until its parent comes. Its blocks are all different."""
        assert event.parent_block_hash is not None
        if len(event.block_hashes) > self.max_blocks:
            self.given_up += len(event.block_hashes)
            return
        number, self._next = self._next, self._next + 1
        self._events[number] = event
        self._waiting.setdefault(event.parent_block_hash, []).append(number)
        for block in event.block_hashes:
            self._where.setdefault(block, []).append(number)
        self.blocks += len(event.block_hashes)
        while self.blocks > self.max_blocks:
            self.given_up += len(self._take(next(iter(self._events))).block_hashes)

    def adopted_by(self, parent: BlockHash) -> list[BlockStored]:
        """The events that waited for this block; they are no orphans any more."""
        return [self._take(number) for number in list(self._waiting.get(parent, ()))]

    def forget(self, blocks: Iterable[BlockHash], tier: Tier) -> None:
        """These blocks were removed from a tier while they were parked; what follows them in their event waits on."""
        for block in blocks:
            for number in list(self._where.get(block, ())):
                event = self._events[number]
                if tier_of(event.medium, event.locality) is tier:
                    self._cut(self._take(number), block)

    def clear(self) -> None:
        """Nothing is parked any more."""
        self._events.clear()
        self._waiting.clear()
        self._where.clear()
        self.blocks = 0

    def _cut(self, event: BlockStored, block: BlockHash) -> None:
        at = list(event.block_hashes).index(block)
        for begin, end in ((0, at), (at + 1, len(event.block_hashes))):
            if begin < end:
                self.park(part_of(event, begin, end))

    def _take(self, number: int) -> BlockStored:
        event = self._events.pop(number)
        assert event.parent_block_hash is not None
        self._drop(self._waiting, event.parent_block_hash, number)
        for block in event.block_hashes:
            self._drop(self._where, block, number)
        self.blocks -= len(event.block_hashes)
        return event

    @staticmethod
    def _drop(table: dict[BlockHash, list[int]], key: BlockHash, number: int) -> None:
        left = [other for other in table[key] if other != number]
        if left:
            table[key] = left
        else:
            del table[key]


def part_of(event: BlockStored, begin: int, end: int) -> BlockStored:
    """The event, of only these of its blocks."""
    size = event.block_size
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[begin:end],
        parent_block_hash=event.block_hashes[begin - 1] if begin else event.parent_block_hash,
        token_ids=event.token_ids[begin * size : end * size],
        extra_keys=None if event.extra_keys is None else event.extra_keys[begin:end],
    )
