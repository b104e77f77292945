"""What a consumer believes of one owner, after the events that it was told.

    stored    its parent is known, or it begins a chain   -> held
              its parent isn't known                      -> parked until that comes; too many: the oldest go
              held there already                          -> a duplicate, which changes nothing
    removed   goes from its own medium and locality alone
    restart   everything before it is forgotten (fenced)

A medium or locality that isn't known here is counted and not held: taken for a fast one it would be worse than a
miss. `trust` says what the belief is worth: exact, or degraded by batches that nobody could bring back.

Bounded by `max_blocks` and `max_parked`, both in blocks. No I/O, no clock; not thread-safe. It is a plain model, for
tools, tests and small routers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from forebay.events.schema import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent, is_known
from forebay.events.subscriber import Received

Trust: TypeAlias = Literal["exact", "degraded"]
_RUN_BLOCKS = 64


class HeldIn(NamedTuple):
    """Where a block is: None is what the publisher doesn't say."""

    medium: str | None
    locality: str | None


class _Child(NamedTuple):
    """What makes a block under its parent."""

    parent: BlockHash | None
    tokens: tuple[int, ...]
    extra: tuple[object, ...]
    lora: str | int | None


@dataclass(slots=True)
class HeldBlock:
    """One block of `size` tokens, which are empty where they are withheld; `places` says where it is. `extra` is its
    entry in `extra_keys`."""

    parent: BlockHash | None
    tokens: tuple[int, ...]
    size: int
    extra: list[object] | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    places: set[HeldIn] = field(default_factory=set)

    def child(self) -> _Child:
        """What makes it under its parent."""
        lora = self.lora_name if self.lora_name is not None else self.lora_id
        return _Child(self.parent, self.tokens, _frozen(self.extra), lora)

    @staticmethod
    def event(blocks: Sequence[BlockHash], held: Sequence[HeldBlock], place: HeldIn) -> BlockStored:
        """These blocks, which follow each other, in one event."""
        first, extra = held[0], [block.extra for block in held]
        return BlockStored(
            list(blocks), first.parent, [token for block in held for token in block.tokens], first.size,
            lora_id=first.lora_id, lora_name=first.lora_name, medium=place.medium, locality=place.locality,
            extra_keys=None if all(entry is None for entry in extra) else extra,
        )  # fmt: skip


class _Parked(NamedTuple):
    block: BlockHash
    place: HeldIn


@dataclass(slots=True)
class HoldingsCounters:
    """Counts of blocks since the start, except `fences` and `missed`, which are restarts and batches."""

    stored: int = 0
    removed: int = 0
    duplicates: int = 0
    parked: int = 0
    unparked: int = 0
    orphans_dropped: int = 0
    refused: int = 0
    unknown_media: int = 0
    unknown_removals: int = 0
    undecodable: int = 0
    fences: int = 0
    missed: int = 0


class Holdings:
    """The blocks of one owner. See the module."""

    def __init__(self, *, max_blocks: int = 1 << 20, max_parked: int = 65_536) -> None:
        assert max_blocks > 0 and max_parked > 0, (max_blocks, max_parked)
        self.max_blocks, self.max_parked = max_blocks, max_parked
        self.counters = HoldingsCounters()
        self.trust: Trust = "exact"
        self._blocks: dict[BlockHash, HeldBlock] = {}
        self._children: dict[_Child, BlockHash] = {}
        self._parked: OrderedDict[_Parked, HeldBlock] = OrderedDict()
        self._waiting: dict[BlockHash, dict[_Parked, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def parked(self) -> int:
        """Blocks that wait for their parent now."""
        return len(self._parked)

    def apply(self, received: Received) -> None:
        """Take one delivered batch."""
        if received.restart is not None:
            self.fence()
        if received.missed:
            self.counters.missed += received.missed
            self.trust = "degraded"
        self.counters.undecodable += received.batch.undecodable
        if received.batch.undecodable:
            self.trust = "degraded"
        self.apply_events(received.batch.events)

    def apply_events(self, events: Sequence[KVEvent]) -> None:
        """Take events in their order."""
        for event in events:
            if not is_known(event):
                self.counters.unknown_media += 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
            elif isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                place = HeldIn(event.medium, event.locality)
                for block in event.block_hashes:
                    self._remove(block, place)
            else:
                self._forget()

    def fence(self) -> None:
        """Nothing that was known holds any more; what comes now is exact again."""
        self.counters.fences += 1
        self.trust = "exact"
        self._forget()

    # --- asking ------------------------------------------------------------------------------------------

    def places(self) -> set[HeldIn]:
        """Where anything is."""
        held = {place for block in self._blocks.values() for place in block.places}
        return held | {parked.place for parked in self._parked}

    def held(self, place: HeldIn) -> set[BlockHash]:
        """All that was announced there and not removed, reachable or not."""
        known = {block for block, what in self._blocks.items() if place in what.places}
        return known | {parked.block for parked in self._parked if parked.place == place}

    def has(self, block: BlockHash, place: HeldIn) -> bool:
        """Whether `held(place)` has it."""
        return self._is_in(block, place) or _Parked(block, place) in self._parked

    def find(self, block: BlockHash) -> HeldBlock | None:
        """The block, if it was announced anywhere; parked ones too."""
        if block in self._blocks:
            return self._blocks[block]
        return next((what for parked, what in self._parked.items() if parked.block == block), None)

    def match(
        self, tokens: Sequence[int], block_size: int, *, extra: Sequence[object] = (), lora: str | int | None = None
    ) -> list[frozenset[HeldIn]]:
        """Where each leading block of the prompt is; ends before the first one that is nowhere. `extra` is what
        beside tokens makes the prompt's first block (a salt)."""
        found: list[frozenset[HeldIn]] = []
        parent: BlockHash | None = None
        first = _frozen(extra)
        for at in range(0, len(tokens) - block_size + 1, block_size):
            child = _Child(parent, tuple(tokens[at : at + block_size]), () if at else first, lora)
            block = self._children.get(child)
            if block is None:
                break
            found.append(frozenset(self._blocks[block].places))
            parent = block
        return found

    def snapshot(self, beside: Holdings | None = None) -> Iterator[BlockStored]:
        """Events for all that is held, parents first, parked blocks last; not what `beside` holds in the same place.

        Lazy: what goes meanwhile may be left out, what comes needn't be in it.
        """
        for place in sorted({place for block in self._blocks.values() for place in block.places}, key=str):
            run: list[BlockHash] = []
            for block in self._parents_first(place, beside):
                if run and (self._blocks[block].parent != run[-1] or len(run) == _RUN_BLOCKS):
                    yield from self._run(run, place)
                    run = []
                run.append(block)
            yield from self._run(run, place)
        for (block, place), what in list(self._parked.items()):
            if beside is None or not beside.has(block, place):
                yield HeldBlock.event([block], [what], place)

    def _parents_first(self, place: HeldIn, beside: Holdings | None) -> Iterator[BlockHash]:
        done: set[BlockHash] = set()
        for start in list(self._blocks):
            line: list[BlockHash] = []
            block: BlockHash | None = start
            while block is not None and block not in done and self._is_in(block, place):
                done.add(block)
                if beside is None or not beside.has(block, place):
                    line.append(block)
                block = self._blocks[block].parent
            yield from (known for known in reversed(line) if self._is_in(known, place))

    def _is_in(self, block: BlockHash, place: HeldIn) -> bool:
        held = self._blocks.get(block)
        return held is not None and place in held.places

    def _run(self, blocks: list[BlockHash], place: HeldIn) -> Iterator[BlockStored]:
        """One event for blocks that follow each other, as far as they are still held."""
        held = [self._blocks[block] for block in blocks if block in self._blocks]
        if held and len(held) == len(blocks):
            yield HeldBlock.event(blocks, held, place)

    # --- changing ----------------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> None:
        for block, what in retold(event):
            self._store_one(block, HeldIn(event.medium, event.locality), what)

    def _store_one(self, block: BlockHash, place: HeldIn, what: HeldBlock) -> None:
        known = self._blocks.get(block)
        if known is not None:
            self.counters.duplicates += place in known.places
            self.counters.stored += place not in known.places
            known.places.add(place)
        elif what.parent is not None and what.parent not in self._blocks:
            self._park(_Parked(block, place), what)
        else:
            self._hold(block, place, what)

    def _hold(self, block: BlockHash, place: HeldIn, what: HeldBlock) -> None:
        """Hold it, and whatever has waited for it, and for that."""
        todo = [(block, place, what)]
        while todo:
            block, place, what = todo.pop()
            if block not in self._blocks and len(self._blocks) >= self.max_blocks:
                self.counters.refused += 1
                self.trust = "degraded"
                continue
            held = self._blocks.setdefault(block, what)
            held.places.add(place)
            self.counters.stored += 1
            if held.tokens:
                self._children[held.child()] = block
            for parked in self._waiting.pop(block, ()):
                self.counters.unparked += 1
                todo.append((*parked, self._parked.pop(parked)))

    def _park(self, parked: _Parked, what: HeldBlock) -> None:
        assert what.parent is not None
        if parked in self._parked:
            self.counters.duplicates += 1
            return
        self.counters.parked += 1
        self._parked[parked] = what
        self._waiting.setdefault(what.parent, {})[parked] = None
        if len(self._parked) > self.max_parked:
            self.counters.orphans_dropped += 1
            self.trust = "degraded"
            self._unpark(next(iter(self._parked)))

    def _unpark(self, parked: _Parked) -> None:
        parent = self._parked.pop(parked).parent
        assert parent is not None
        self._waiting[parent].pop(parked)
        if not self._waiting[parent]:
            del self._waiting[parent]

    def _remove(self, block: BlockHash, place: HeldIn) -> None:
        held = self._blocks.get(block)
        if held is None or place not in held.places:
            if (parked := _Parked(block, place)) in self._parked:
                self.counters.removed += 1
                self._unpark(parked)
            else:
                self.counters.unknown_removals += 1
            return
        self.counters.removed += 1
        held.places.discard(place)
        if not held.places:
            del self._blocks[block]
            child = held.child()
            if self._children.get(child) == block:
                del self._children[child]

    def _forget(self) -> None:
        for table in (self._blocks, self._children, self._parked, self._waiting):
            table.clear()


def retold(event: BlockStored) -> Iterator[tuple[BlockHash, HeldBlock]]:
    """The event's blocks one by one, in their order, with nothing in `places`."""
    parent = event.parent_block_hash
    for at, block in enumerate(event.block_hashes):
        tokens = tuple(event.token_ids[at * event.block_size : (at + 1) * event.block_size])
        told = event.extra_keys[at] if event.extra_keys and at < len(event.extra_keys) else None
        yield block, HeldBlock(parent, tokens, event.block_size, told, event.lora_name, event.lora_id)
        parent = block


def _frozen(entry: Sequence[object] | None) -> tuple[object, ...]:
    """An entry of `extra_keys` as what can be compared and hashed."""
    return tuple(_frozen(item) if isinstance(item, list) else str(item) for item in entry or ())
