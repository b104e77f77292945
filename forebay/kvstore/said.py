"""What tiers say while one question is answered: what they offered and could not bring, and what they haven't got.

A place is *gone* when memory lacks it and every tier has said that it hasn't got it, or has lost it. Whoever doesn't
answer, is away, or fails for another reason may have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay.kvstore.cascade import Load
from forebay.kvstore.lookup import Match, Place
from forebay.tiers.base import LookupResult

NO_HIT = LookupResult("miss")


@dataclass(slots=True)
class Said:
    """`failed` are (tier, group, key) of loads that came to nothing, and whether the tier has lost that chunk;
    `without` are the tiers that have nothing for a place."""

    failed: dict[tuple[str, int, bytes], bool] = field(default_factory=dict)
    without: dict[Place, set[str]] = field(default_factory=dict)

    def loads_failed(self, loads: Iterable[Load]) -> bool:
        """Note those loads that have failed. Are there any?"""
        failed = {
            (load.tier, load.entry.group, load.entry.key): load.lost for load in loads if load.done and not load.ok
        }
        self.failed |= failed
        return bool(failed)

    def answered(self, found: Match, tier: str, place: Place, answer: LookupResult) -> LookupResult:
        """What a tier's answer for a place is worth, after what it could not bring."""
        lost = self.failed.get((tier, place[0], answer.key)) if answer.outcome == "hit" else None
        if found.only is not None:  # whoever looks a prefix up doesn't ask for what is gone
            without = self._without(found, place, answer) if lost is None else lost
            tiers = self.without.setdefault(place, set())
            (tiers.add if without else tiers.discard)(tier)
        return answer if lost is None else NO_HIT

    @staticmethod
    def _without(found: Match, place: Place, answer: LookupResult) -> bool:
        """Has a tier that answers so nothing for a place?"""
        if answer.outcome != "hit":
            return answer.outcome == "miss"
        short = answer.matched < found.prompt.namespace.chunk_tokens  # the others needn't be measured
        return short and answer.sure and answer.matched < found.wanted_tokens(place[1], found.prompt.longest)

    def gone(self, found: Match, tiers: Iterable[str]) -> list[Place]:
        """Of the places that `found` lacks, those that nobody has."""
        everybody = set(tiers)
        return [place for place in found.missing() if self.without.get(place, set()) >= everybody]
