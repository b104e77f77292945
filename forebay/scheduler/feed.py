"""One owner's events into the index, and how far what the index has of the owner can be trusted.

    EXACT       all that was published has been applied
    DEGRADED    batches were lost for good: everything was forgotten, and what came since is known; or an event could
                not be read, and what it said is missing
    FALLBACK    nothing comes: the stream is down

A stale block costs more than an unknown one, since it draws requests to where their prefix isn't. So a restart and
a gap that no replay fills both end with nothing known of the owner, before the next event is applied. An event that
can't be used costs itself, not its batch; its blocks are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from forebay.events.schema import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from forebay.events.subscriber import Received
from forebay.scheduler.block_names import BlockNames, as_names
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.key_table import Keys
from forebay.scheduler.orphans import Orphans
from forebay.scheduler.places import Holders, Tier, tier_of
from forebay.scheduler.prefix_keys import BLOCK_TOKENS_MAX, as_tokens, extra_of, prefix_keys, root_of


class Trust(Enum):
    """See the module."""

    EXACT = "exact"
    DEGRADED = "degraded"
    FALLBACK = "fallback"


@dataclass(slots=True)
class FeedCounters:
    """What happened so far, in blocks unless the name says otherwise.

    `unknown_medium` came with a medium or locality that isn't known; `unusable` without tokens, with another
    number of them, in blocks of another size, with one name for two blocks, or of a sliding window's group alone;
    `duplicates` were there already; `replaced` were forgotten since their names came to stand for others.
    """

    stored: int = 0
    removed: int = 0
    duplicates: int = 0
    unknown_medium: int = 0
    unusable: int = 0
    replaced: int = 0
    fences: int = 0
    lost_batches: int = 0
    undecodable_events: int = 0
    lag_s: float = 0.0


@dataclass(eq=False)
class Feed:
    """The stream of one owner of one model. Blocks have the size that is given, else that of its first usable event;
    `other_size` is the last one that came in another size, and was not used.

    `apply` takes batches in the order in which a subscriber gives them. Mutates the index. Not thread-safe.
    """

    owner: str
    model: str
    index: PrefixIndex
    holders: Holders
    block_tokens: int | None = None
    other_size: int | None = None
    trust: Trust = Trust.FALLBACK
    counters: FeedCounters = field(default_factory=FeedCounters)
    names: BlockNames = field(default_factory=BlockNames)
    orphans: Orphans = field(default_factory=Orphans)

    def apply(self, received: Received, now: float | None = None) -> None:
        """One batch as it was received. `now`, by the publisher's clock, tells how late it is."""
        if received.restart is not None or (received.missed and not received.compacted):
            self.fence()
        if received.restart is not None or self.trust is Trust.FALLBACK:
            self.trust = Trust.EXACT
        if received.missed and not received.compacted:
            self.counters.lost_batches += received.missed
            self.trust = Trust.DEGRADED
        if received.batch.undecodable:
            self.counters.undecodable_events += received.batch.undecodable
            self.trust = Trust.DEGRADED
        if now is not None and not received.replayed:
            self.counters.lag_s = max(0.0, now - received.batch.ts)
        for event in received.batch.events:
            self.event(event)

    def event(self, event: KVEvent) -> None:
        """One event."""
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                self._remove(event)
            case AllBlocksCleared():
                self._forget()

    def fence(self) -> None:
        """What was known of the owner doesn't hold any more."""
        self.counters.fences += 1
        self._forget()

    def down(self) -> None:
        """Nothing comes any more: what is known may be wrong by now, and is forgotten."""
        self.fence()
        self.trust = Trust.FALLBACK

    # --- inside ------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        if len(self.names):
            for holder in self.holders.all_of(self.owner):
                self.index.drop(holder)
        self.names = BlockNames()
        self.orphans.clear()

    def _store(self, event: BlockStored) -> None:
        tier = tier_of(event.medium, event.locality)
        if tier is None:
            self.counters.unknown_medium += len(event.block_hashes)
        elif not self._usable(event):
            self.counters.unusable += len(event.block_hashes)
        else:
            waiting = [event]
            while waiting:
                one = waiting.pop()
                waiting += self._store_here(one, tier_of(one.medium, one.locality) or Tier.DEVICE)

    def _usable(self, event: BlockStored) -> bool:
        size = event.block_size
        if not event.block_hashes or not 0 < size <= BLOCK_TOKENS_MAX or event.kv_cache_spec_sliding_window is not None:
            return False
        if len(event.token_ids) != size * len(event.block_hashes) or not _all_different(event.block_hashes):
            return False
        self.block_tokens = self.block_tokens or size
        if size != self.block_tokens:
            self.other_size = size
        return size == self.block_tokens

    def _store_here(self, event: BlockStored, tier: Tier) -> list[BlockStored]:
        """Index a usable event, or park it. Returns the parked ones that its blocks are the parents of."""
        parent, depth = self._root(event), 0
        if event.parent_block_hash is not None:
            found = self.names.find(event.parent_block_hash)
            if found is None:
                self.orphans.park(event)
                return []
            parent, depth = found.key, found.depth + 1
        extras = None if event.extra_keys is None else [extra_of(entry) for entry in event.extra_keys]
        keys = prefix_keys(parent, as_tokens(event.token_ids), event.block_size, depth=depth, extras=extras)
        replaced = self.names.stored(as_names(event.block_hashes), keys, depth, tier)
        for place, gone in replaced:
            self.counters.replaced += self.index.removed(self.holders.number(self.owner, place), gone)
        self._stored(tier, keys)
        if not self.orphans.blocks:
            return []
        return [orphan for name in event.block_hashes for orphan in self.orphans.adopted_by(name)]

    def _root(self, event: BlockStored) -> int:
        adapter = event.lora_name if event.lora_name is not None else event.lora_id
        return root_of(self.model, event.block_size, adapter)

    def _stored(self, tier: Tier, keys: Keys) -> None:
        fresh = self.index.stored(self.holders.number(self.owner, tier), keys)
        self.counters.stored += fresh
        self.counters.duplicates += keys.size - fresh

    def _remove(self, event: BlockRemoved) -> None:
        tier = tier_of(event.medium, event.locality)
        if tier is None:
            self.counters.unknown_medium += len(event.block_hashes)
            return
        keys = self.names.removed(as_names(event.block_hashes), tier)
        self.counters.removed += self.index.removed(self.holders.number(self.owner, tier), keys)
        if self.orphans.blocks:
            hashes: list[BlockHash] = list(event.block_hashes)
            self.orphans.forget(hashes, tier)


def _all_different(hashes: Sequence[BlockHash]) -> bool:
    """Also by their low 64 bits, which is all that names them here."""
    return len(set(hashes if set(map(type, hashes)) == {int} else as_names(hashes).tolist())) == len(hashes)
