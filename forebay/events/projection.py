"""All tiers of one owner and namespace as routers see them: one view a (medium, locality).

Two tiers of the same medium and locality (a local directory and another one) are one view, since a router
can't tell them apart: what one of them loses is announced as removed only if the other hasn't it either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from forebay.events.schema import CPU, DEMOTED, EVICTED, LOCAL, STORAGE, BlockRemoved, BlockStored
from forebay.events.units import GroupKind, TierView, UnitChunk, ViewStats

HOST_TIER = "host"


class Placement(NamedTuple):
    """What a router is told about a tier."""

    medium: str
    locality: str | None


# Where the store's own tiers are.
STORE_TIERS: Mapping[str, Placement] = {
    HOST_TIER: Placement(CPU, LOCAL),
    "fs": Placement(STORAGE, LOCAL),
}


class Projection:
    """The views of one namespace. `max_units` bounds each of them. Not thread-safe."""

    def __init__(
        self,
        kinds: Sequence[GroupKind],
        tiers: Mapping[str, Placement] = STORE_TIERS,
        *,
        max_units: int = 1 << 20,
    ) -> None:
        self.views: dict[Placement, TierView] = {}
        for place in tiers.values():
            if place not in self.views:
                self.views[place] = TierView(place.medium, kinds, locality=place.locality, max_units=max_units)
        self._tiers = {name: self.views[place] for name, place in tiers.items()}

    def chunk_stored(self, tier: str, chunk: UnitChunk) -> list[BlockStored]:
        """See TierView. A tier without a placement isn't told to routers."""
        view = self._tiers.get(tier)
        return view.chunk_stored(tier, chunk) if view else []

    def chunk_removed(self, tier: str, group: int, key: bytes, reason: str | None = None) -> list[BlockRemoved]:
        """See TierView. What is evicted from one place and still in another is told as demoted."""
        view = self._tiers.get(tier)
        if view is None:
            return []
        removed = view.chunk_removed(tier, group, key, reason)
        others = [other for other in self.views.values() if other is not view]
        return [self._demoted(event, others) if reason == EVICTED else event for event in removed]

    @staticmethod
    def _demoted(event: BlockRemoved, others: Sequence[TierView]) -> BlockRemoved:
        if all(any(block in other for other in others) for block in event.block_hashes if isinstance(block, bytes)):
            return msgspec.structs.replace(event, reason=DEMOTED)
        return event

    def tier_removed(self, tier: str, reason: str | None = None) -> list[BlockRemoved]:
        """Everything in the tier is gone: explicit removals, since a clear would be taken for all tiers."""
        view = self._tiers.get(tier)
        return view.tier_removed(tier, reason) if view else []

    def snapshot(self) -> Iterator[BlockStored]:
        """What is announced in all media, lazily: the source of a publisher's compacted history."""
        return chain.from_iterable(view.snapshot() for view in self.views.values())

    def stats(self) -> dict[Placement, ViewStats]:
        """Present figures of each view."""
        return {place: view.stats() for place, view in self.views.items()}
