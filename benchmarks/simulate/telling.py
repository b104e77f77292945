"""What caches tell the router: real events, encoded and decoded, that become visible a little later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from benchmarks.simulate.workload import MODEL
from forebay.events.codec import decode_batch, encode_batch
from forebay.events.schema import CPU, EVICTED, GPU, LOCAL, STORAGE, BlockRemoved, BlockStored, KVEvent
from forebay.events.subscriber import Received
from forebay.scheduler.feed import Feed
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.places import Holders

MEDIA = {"device": GPU, "memory": CPU, "disk": STORAGE}
Tier = Literal["device", "memory", "disk"]


class Telling:
    """A stream an owner. Blocks are numbers that stand for all before them: one token each."""

    def __init__(self, index: PrefixIndex, holders: Holders) -> None:
        self._index, self._holders = index, holders
        self.feeds: dict[str, Feed] = {}
        self._seqs: dict[str, int] = {}
        self.events = 0
        self.bytes = 0

    def payload(self, tier: Tier, chain: Sequence[int], came: Sequence[int], went: Sequence[int], now: float) -> bytes:
        """One batch: what came of a chain, and what went, in one tier."""
        events: list[KVEvent] = []
        medium, new = MEDIA[tier], set(came)
        run: list[int] = []
        for depth, block in enumerate([*chain, -1]):
            if block in new:
                run.append(block)
            elif run:
                parent = depth - len(run) - 1
                events.append(
                    BlockStored(
                        [number + 1 for number in run], chain[parent] + 1 if parent >= 0 else None, run, 1,
                        medium=medium, locality=LOCAL,
                    )
                )  # fmt: skip
                run = []
        if went:
            events.append(BlockRemoved([number + 1 for number in went], medium, locality=LOCAL, reason=EVICTED))
        self.events += len(events)
        payload = encode_batch(now, events).payload
        self.bytes += len(payload)
        return payload

    def hear(self, owner: str, payload: bytes, now: float) -> None:
        """A batch arrives at the router."""
        seq = self._seqs.get(owner, -1) + 1
        self._seqs[owner] = seq
        self._feed(owner).apply(Received("", seq, decode_batch(payload)), now)

    def lost(self, owner: str) -> None:
        """The router notices that an owner is gone."""
        self._feed(owner).down()

    def _feed(self, owner: str) -> Feed:
        if owner not in self.feeds:
            self.feeds[owner] = Feed(owner, MODEL, self._index, self._holders)
        return self.feeds[owner]
