"""Where blocks can be, as routing sees it, and the numbers that owners' tiers have in the index.

An *owner* publishes events: a worker for its device pool (an engine with its own host cache also for that), a store
for what it keeps for all workers that are attached to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from forebay.events.schema import CPU, GPU, LOCAL, REMOTE, STORAGE
from forebay.scheduler.holder_sets import HOLDERS_MAX


class Tier(IntEnum):
    """From the fastest to the slowest."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


TIERS = len(Tier)

_PLACES: dict[tuple[str | None, str | None], Tier] = {
    (None, None): Tier.DEVICE,
    (None, LOCAL): Tier.DEVICE,
    (GPU, None): Tier.DEVICE,
    (GPU, LOCAL): Tier.DEVICE,
    (CPU, None): Tier.HOST,
    (CPU, LOCAL): Tier.HOST,
    (CPU, REMOTE): Tier.REMOTE,
    (STORAGE, LOCAL): Tier.DISK,
    (STORAGE, REMOTE): Tier.REMOTE,
    # Nobody said that it is near.
    (STORAGE, None): Tier.REMOTE,
}


def tier_of(medium: str | None, locality: str | None) -> Tier | None:
    """The tier of an event. None for what isn't known, or of use to nobody (another host's device): never indexed."""
    return _PLACES.get((medium, locality))


@dataclass(frozen=True, slots=True)
class Holder:
    """One owner's tier."""

    owner: str
    tier: Tier


class Holders:
    """Numbers of holders, for the index. An owner's numbers are given once and kept; at most 16,384 owners."""

    def __init__(self) -> None:
        self._owners: dict[str, int] = {}

    def number(self, owner: str, tier: Tier) -> int:
        """The holder's number."""
        place = self._owners.setdefault(owner, len(self._owners))
        assert place * TIERS < HOLDERS_MAX, "too many owners"
        return place * TIERS + tier

    def all_of(self, owner: str) -> list[int]:
        """The numbers of all the owner's tiers."""
        return [self.number(owner, tier) for tier in Tier]

    @property
    def count(self) -> int:
        """One more than the greatest number."""
        return TIERS * len(self._owners)

    def name(self, number: int) -> Holder:
        """Whose number it is."""
        return Holder(list(self._owners)[number // TIERS], Tier(number % TIERS))
