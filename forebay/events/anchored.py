"""For consumers that drop a block for good when they don't know its parent: every block is told after its parent.

A chunk in memory may follow one that is nowhere any more; it is of no use to a prompt until that comes back. Such
blocks are held back here, and told when their chain is whole again; what loses its chain is told as removed:

    told(b)   b is in some tier, and it begins a chain or told(parent of b), in whatever tier that is

Pure; not thread-safe. Bounded by `max_blocks`: blocks beyond it are not told, which costs hits, never correctness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forebay.events.holdings import HeldBlock, HeldIn, retold
from forebay.events.schema import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent, is_known

_RUN_BLOCKS = 64


@dataclass(slots=True)
class _Told:
    """A block that goes out now, and where."""

    block: BlockHash
    what: HeldBlock
    places: frozenset[HeldIn]


@dataclass(slots=True)
class _Node:
    what: HeldBlock
    told: bool = False


@dataclass(slots=True)
class Anchored:
    """The blocks of one stream. `refused` counts those that came when it was full."""

    max_blocks: int = 1 << 20
    refused: int = 0
    _nodes: dict[BlockHash, _Node] = field(default_factory=dict)
    _children: dict[BlockHash, dict[BlockHash, None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._nodes)

    def take(self, events: Sequence[KVEvent]) -> list[KVEvent]:
        """The events that are to be told instead of these."""
        out: list[KVEvent] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._nodes.clear()
                self._children.clear()
                out.append(event)
            elif isinstance(event, BlockRemoved):
                out += self._remove(event)
            elif is_known(event):
                out += self._store(event)
        return out

    def snapshot(self) -> Iterator[BlockStored]:
        """All that is told, parents first whatever their tiers. Lazy: what goes meanwhile may be left out."""
        done: set[BlockHash] = set()
        for start in list(self._nodes):
            line: list[BlockHash] = []
            block: BlockHash | None = start
            while block is not None and block not in done and self._is_told(block):
                done.add(block)
                line.append(block)
                block = self._nodes[block].what.parent
            yield from _runs([self._now(known) for known in reversed(line) if self._is_told(known)])

    # --- changing ----------------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> Iterator[BlockStored]:
        place = HeldIn(event.medium, event.locality)
        told: list[_Told] = []
        for block, what in retold(event):
            node = self._nodes.get(block)
            if node is None:
                if len(self._nodes) >= self.max_blocks:
                    self.refused += 1
                    continue
                node = self._nodes[block] = _Node(what)
                if what.parent is not None:
                    self._children.setdefault(what.parent, {})[block] = None
            is_new = place not in node.what.places
            node.what.places.add(place)
            if node.told and is_new:
                told.append(_Told(block, node.what, frozenset({place})))
            elif not node.told and (node.what.parent is None or self._is_told(node.what.parent)):
                told += self._tell(block)
        return _runs(told)

    def _tell(self, first: BlockHash) -> list[_Told]:
        """The chain of this block is whole: tell it, and all that waited behind it."""
        told, todo = [], [first]
        while todo:
            block = todo.pop()
            self._nodes[block].told = True
            told.append(self._now(block))
            todo += self._children.get(block, ())
        return told

    def _remove(self, event: BlockRemoved) -> list[KVEvent]:
        place = HeldIn(event.medium, event.locality)
        gone: dict[HeldIn, list[BlockHash]] = {}
        for block in event.block_hashes:
            node = self._nodes.get(block)
            if node is None or place not in node.what.places:
                continue
            node.what.places.discard(place)
            if node.told:
                gone.setdefault(place, []).append(block)
            if not node.what.places:
                self._drop(block, node, gone)
        return [
            BlockRemoved(blocks, where.medium, locality=where.locality, reason=event.reason)
            for where, blocks in gone.items()
        ]

    def _drop(self, block: BlockHash, node: _Node, gone: dict[HeldIn, list[BlockHash]]) -> None:
        """It is nowhere any more: whatever follows it has lost its chain."""
        del self._nodes[block]
        if node.what.parent is not None:
            siblings = self._children[node.what.parent]
            del siblings[block]
            if not siblings:
                del self._children[node.what.parent]
        todo = list(self._children.get(block, ()))
        while todo:
            child = todo.pop()
            if self._nodes[child].told:
                self._nodes[child].told = False
                for place in self._nodes[child].what.places:
                    gone.setdefault(place, []).append(child)
                todo += self._children.get(child, ())

    def _is_told(self, block: BlockHash) -> bool:
        node = self._nodes.get(block)
        return node is not None and node.told

    def _now(self, block: BlockHash) -> _Told:
        what = self._nodes[block].what
        return _Told(block, what, frozenset(what.places))


def _runs(told: Sequence[_Told]) -> Iterator[BlockStored]:
    """Events for these, in their order: neighbours in the same tiers together, one event a tier."""
    at = 0
    while at < len(told):
        end = at + 1
        while (
            end < len(told) and end - at < _RUN_BLOCKS
            and told[end].what.parent == told[end - 1].block and told[end].places == told[at].places
        ):  # fmt: skip
            end += 1
        run = told[at:end]
        for place in sorted(run[0].places, key=str):
            yield HeldBlock.event([one.block for one in run], [one.what for one in run], place)
        at = end
