"""Events of a made-up engine, and feeds that take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.events.codec import DecodedBatch
from forebay.events.schema import BlockRemoved, BlockStored, KVEvent
from forebay.events.subscriber import Received
from forebay.scheduler.feed import Feed
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.places import Holders, Tier
from forebay.scheduler.prefix_keys import as_tokens, extra_of, prefix_keys, root_of

SIZE = 16
MODEL = "m"


def tokens_of(blocks: Sequence[int]) -> list[int]:
    """A prompt of these blocks, each made of one token."""
    return [token for block in blocks for token in [block] * SIZE]


def hashes_of(blocks: Sequence[int], engine: int = 7) -> list[int]:
    """What an engine calls the blocks of a chain: any numbers that depend on all before; per engine others."""
    return [hash((engine, *blocks[: end + 1])) & (2**64 - 1) for end in range(len(blocks))]


def stored(
    blocks: Sequence[int], skip: int = 0, medium: str | None = "GPU", engine: int = 7, **more: Any
) -> BlockStored:
    """The chain's blocks from number `skip` on."""
    names = hashes_of(blocks, engine)
    parent = names[skip - 1] if skip else None
    return BlockStored(names[skip:], parent, tokens_of(blocks[skip:]), SIZE, medium=medium, **more)


def removed(blocks: Sequence[int], skip: int = 0, medium: str = "GPU", engine: int = 7, **more: Any) -> BlockRemoved:
    return BlockRemoved(hashes_of(blocks, engine)[skip:], medium, **more)


def received(*events: KVEvent, seq: int = 0, **more: Any) -> Received:
    ts = more.pop("ts", 0.0)
    return Received("topic", seq, DecodedBatch(ts, events, 0, more.pop("undecodable", 0)), **more)


@dataclass
class Cluster:
    """Feeds of several owners into one index."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    holders: Holders = field(default_factory=Holders)
    feeds: dict[str, Feed] = field(default_factory=dict)

    def feed(self, owner: str = "w0") -> Feed:
        if owner not in self.feeds:
            self.feeds[owner] = Feed(owner, MODEL, self.index, self.holders)
        return self.feeds[owner]

    def length(
        self, blocks: Sequence[int], owner: str = "w0", tier: Tier = Tier.DEVICE, salt: str | None = None
    ) -> int:
        """How many blocks of a prompt the owner's tier is thought to have."""
        extras = [extra_of([salt] if salt else None)]
        keys = prefix_keys(root_of(MODEL, SIZE), as_tokens(tokens_of(blocks)), SIZE, extras=extras)
        return self.index.match(keys).lengths().get(self.holders.number(owner, tier), 0)
