"""Replays a workload against the daemon's own policy classes, with the facts that the daemon has of each chunk.

order        definition                              daemon
hits         used where their turn comes             pinned at the lookup, released at the end, deepest first
misses       stored deepest first, between the hits  stored in order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from benchmarks.hit_rate.workload import BLOCK_TOKENS, Workload
from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.header import ChunkHeader, SlotState
from forebay.kvstore.policies.base import EvictionPolicy, LookedUp
from forebay.kvstore.policies.registry import Policies, PolicyChoice

Order = Literal["definition", "daemon"]
SLOT_BYTES = 1 << 20


class Nowhere:
    """A home of chunks that have no bytes."""

    def read_header(self, slot: SlotRef) -> ChunkHeader:
        """There is none."""
        raise NotImplementedError(f"no policy reads the bytes of slot {slot}")


NOWHERE = Nowhere()


class Residents:
    """Which blocks are here; knows who needs whom, as the daemon's chunk table does."""

    def __init__(self, load: Workload) -> None:
        self._parents = load.parents
        self._keys = [number.to_bytes(8, "big") for number in range(load.blocks)]
        self._starts = load.starts
        self._entries: list[Entry | None] = [None] * load.blocks
        self._children: list[list[Entry]] = [[] for _ in range(load.blocks)]
        self.here: list[Entry | None] = [None] * load.blocks
        self.used = 0

    def keys(self, blocks: Sequence[int]) -> list[bytes]:
        """The chunk keys of these blocks."""
        return [self._keys[block] for block in blocks]

    def put(self, block: int) -> Entry:
        """A block is stored."""
        entry = self._entries[block]
        if entry is None:
            entry = self._entries[block] = self._entry(block)
        self.here[block] = entry
        parent = self._parents[block]
        if parent >= 0:
            self._children[parent].append(entry)
        self.used += 1
        return entry

    def _entry(self, block: int) -> Entry:
        parent = self._parents[block]
        return Entry(
            namespace=b"", group=0, key=self._keys[block], parent=self._keys[parent] if parent >= 0 else b"root",
            start=self._starts[block], token_count=BLOCK_TOKENS, tenant="", home=NOWHERE, slot=SlotRef(0, block),
            slot_bytes=SLOT_BYTES, header_bytes=0, payload_length=SLOT_BYTES, generation=1,
            state=SlotState.COMMITTED,
        )  # fmt: skip

    def drop(self, entry: Entry) -> None:
        """An entry is gone."""
        block = entry.slot.offset
        assert self.here[block] is entry
        self.here[block] = None
        parent = self._parents[block]
        if parent >= 0:
            self._children[parent].remove(entry)
        self.used -= 1

    def parent(self, entry: Entry) -> Entry | None:
        """See `Lineage`."""
        parent = self._parents[entry.slot.offset]
        return self.here[parent] if parent >= 0 else None

    def dependents(self, entry: Entry) -> Sequence[Entry]:
        """See `Lineage`."""
        return self._children[entry.slot.offset]


class Replay:
    """One policy and one capacity in blocks."""

    def __init__(self, load: Workload, policy: str, capacity: int, order: Order = "definition") -> None:
        self._load, self._capacity, self._order = load, capacity, order
        self._residents = Residents(load)
        self._policies = Policies(PolicyChoice(policy, load.attention_tokens), self._residents)
        self.policy: EvictionPolicy = self._policies.new()

    def run(self) -> float:
        """The share of tokens that hit."""
        hits = 0.0
        step = self._as_defined if self._order == "definition" else self._as_the_daemon
        for ask in self._load.asks:
            leading = self._leading(ask.blocks)
            hits += self._load.saved(ask, len(leading))
            if self._policies.observes:
                keys = self._residents.keys(ask.blocks)
                self._policies.observe(LookedUp(keys, leading, ask.now, BLOCK_TOKENS))
            step(ask.blocks, leading)
        return hits / self._load.whole

    def _leading(self, blocks: Sequence[int]) -> list[Entry]:
        here, leading = self._residents.here, []
        for block in blocks:
            entry = here[block]
            if entry is None:
                break
            leading.append(entry)
        return leading

    def _as_defined(self, blocks: Sequence[int], leading: Sequence[Entry]) -> None:
        policy, here = self.policy, self._residents.here
        for block in reversed(blocks):
            entry = here[block]
            if entry is not None:
                policy.remove(entry)
                policy.add(entry)
            elif self._make_room():
                policy.add(self._residents.put(block))

    def _as_the_daemon(self, blocks: Sequence[int], leading: Sequence[Entry]) -> None:
        for entry in leading:
            self.policy.remove(entry)
        for block in blocks[len(leading) :]:
            if self._residents.here[block] is None and self._make_room():
                self.policy.add(self._residents.put(block))
        for entry in reversed(leading):
            self.policy.add(entry)

    def _make_room(self) -> bool:
        if self._residents.used < self._capacity:
            return True
        victim = self.policy.victim(SLOT_BYTES)
        if victim is None:
            return False
        self.policy.evicted(victim)
        self._residents.drop(victim)
        self.policy.remove(victim)
        self.policy.forget(victim)
        return True
