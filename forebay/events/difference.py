"""Whether what a stream makes one believe is what the store holds.

The store lists chunks by the key at their end; a stream tells of blocks, one for each 16 tokens, that name their
parents. So a chunk's blocks are found by going back from its end. What can't be found that way isn't believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forebay.events.holdings import HeldIn, Holdings
from forebay.events.schema import BlockHash
from forebay.events.units import UNIT, GroupKind, TierView, UnitChunk


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """A chunk that the store lists: its cache group, the key at its end as the stream writes it, its tokens."""

    group: int
    end: BlockHash
    tokens: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one tier: blocks that are held and not believed (`unseen_chunks`: whole chunks of which nothing is known),
    and blocks that are believed and not held."""

    place: HeldIn
    agreed: int
    missing: frozenset[BlockHash] = frozenset()
    stale: frozenset[BlockHash] = frozenset()
    unseen_chunks: frozenset[BlockHash] = frozenset()

    @property
    def is_none(self) -> bool:
        """Whether belief and store agree."""
        return not (self.missing or self.stale or self.unseen_chunks)

    def still(self, later: Difference) -> Difference:
        """What of this was still so later: what was only on its way is gone."""
        return Difference(
            self.place, later.agreed, self.missing & later.missing, self.stale & later.stale,
            self.unseen_chunks & later.unseen_chunks,
        )  # fmt: skip


@dataclass(slots=True)
class _Lines:
    """The blocks of chunks, as far as the stream has told of them."""

    chunks: list[UnitChunk] = field(default_factory=list)
    unseen: set[BlockHash] = field(default_factory=set)


def compare(believed: Holdings, place: HeldIn, chunks: Iterable[HeldChunk], groups: Sequence[GroupKind]) -> Difference:
    """Compare what is believed to be in `place` with the chunks that are there. `groups` are the cache groups' kinds:
    a block is announced when all groups can serve it."""
    lines = _lines(believed, chunks)
    truth = _announced(lines.chunks, groups)
    held = believed.held(place)
    # A chunk whose groups aren't all there isn't announced, so nothing may be known of it.
    unseen = lines.unseen if len(groups) == 1 else set()
    return Difference(place, len(truth & held), frozenset(truth - held), frozenset(held - truth), frozenset(unseen))


def _lines(believed: Holdings, chunks: Iterable[HeldChunk]) -> _Lines:
    found = _Lines()
    for chunk in chunks:
        line: list[BlockHash] = []
        at: BlockHash | None = chunk.end
        while at is not None and len(line) < chunk.tokens // UNIT and (block := believed.find(at)) is not None:
            line.append(at)
            at = block.parent
        if len(line) < chunk.tokens // UNIT:
            found.unseen.add(chunk.end)
            continue
        keys = tuple(_key(block) for block in reversed(line))
        tokens = bytes(4 * UNIT * len(keys))
        found.chunks.append(UnitChunk(chunk.group, None if at is None else _key(at), keys, tokens))
    return found


def _announced(chunks: Sequence[UnitChunk], groups: Sequence[GroupKind]) -> set[BlockHash]:
    view = TierView("CPU", groups, max_units=1 << 30)
    for chunk in chunks:
        view.chunk_stored("", chunk)
    return {_hash(key) for event in view.snapshot() for key in event.block_hashes if isinstance(key, bytes)}


def _key(block: BlockHash) -> bytes:
    return block if isinstance(block, bytes) else block.to_bytes(8, "big")


def _hash(key: bytes) -> BlockHash:
    return key if len(key) > 8 else int.from_bytes(key, "big")
