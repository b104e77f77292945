"""Caches of block numbers: devices by recency, stores' tiers by the daemon's own eviction policies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from benchmarks.hit_rate.replay import NOWHERE
from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.header import SlotState
from forebay.kvstore.policies.registry import Policies

SLOT_BYTES = 1 << 20


class Device:
    """A worker's own blocks: the one that was used longest ago goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def __len__(self) -> int:
        return len(self._order)

    def take(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """A request used or made these; returns which came and which went. Its deepest are the first to go."""
        came = [block for block in blocks if block not in self._order]
        for block in reversed(blocks):
            self._order[block] = None
            self._order.move_to_end(block)
        went = []
        while len(self._order) > self.capacity:
            went.append(self._order.popitem(last=False)[0])
        return came, went

    def clear(self) -> None:
        """The device is gone."""
        self._order.clear()


class TierCache:
    """One tier of a store."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.capacity = capacity
        self._entries: dict[int, Entry] = {}
        self._children: dict[int, list[Entry]] = {}
        self._parents: dict[int, int] = {}
        self._policy = Policies(policy, self).new()

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def use(self, blocks: Sequence[int]) -> None:
        """A request found these, in order."""
        for block in reversed(blocks):
            entry = self._entries[block]
            self._policy.remove(entry)
            self._policy.add(entry)

    def put(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """These were stored, each after the one before; returns which came and which went."""
        came, went = [], []
        for depth, block in enumerate(blocks):
            if block in self._entries:
                continue
            if len(self._entries) >= self.capacity:
                victim = self._policy.victim(SLOT_BYTES)
                if victim is None:
                    break
                went.append(self._evict(victim))
            self._add(block, blocks[depth - 1] if depth else -1, depth)
            came.append(block)
        return [block for block in came if block in self._entries], went

    def parent(self, entry: Entry) -> Entry | None:
        """See `Lineage`."""
        return self._entries.get(self._parents[entry.slot.offset])

    def dependents(self, entry: Entry) -> Sequence[Entry]:
        """See `Lineage`."""
        return self._children.get(entry.slot.offset, ())

    def _add(self, block: int, parent: int, depth: int) -> None:
        entry = Entry(
            namespace=b"", group=0, key=block.to_bytes(8, "big"), parent=b"", start=depth * 512, token_count=512,
            tenant="", home=NOWHERE, slot=SlotRef(0, block), slot_bytes=SLOT_BYTES, header_bytes=0,
            payload_length=SLOT_BYTES, generation=1, state=SlotState.COMMITTED,
        )  # fmt: skip
        self._entries[block], self._parents[block] = entry, parent
        self._children.setdefault(parent, []).append(entry)
        self._policy.add(entry)

    def _evict(self, victim: Entry) -> int:
        block = victim.slot.offset
        self._policy.evicted(victim)
        self._policy.remove(victim)
        self._policy.forget(victim)
        del self._entries[block]
        siblings = self._children[self._parents.pop(block)]
        siblings.remove(victim)
        return block
