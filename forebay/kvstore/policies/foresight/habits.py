"""When sessions of a kind come back: counts by age, in a tree of ever narrower kinds. Bounded.

    all sessions
      turn 0                          turn 1                        ...
        short prompt   long prompt      grew little   grew much       each with the kinds that its last gaps make

Each kind's hazard leans on that of the wider kind above it, as if `LEAN` sessions of that one had been seen: what has
been seen rarely is guessed from what is like it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from forebay.kvstore.policies.foresight.ages import BINS

LEAN = 20.0
RARE = 1e-4
"""The hazard in each bin before anything has been seen."""
HALVED_AFTER = 4000
"""Requests after which all counts are halved: habits change."""
KINDS_MAX = 2048
FRESH = 16
"""A kind's hazard is computed again after so many requests at the latest."""


class Kind:
    """`waited[i]` sessions have been in age bin i, `returned[i]` of them came back in it."""

    __slots__ = ("children", "computed_at", "halvings", "hazard", "parent", "returned", "waited")

    def __init__(self, parent: Kind | None, halvings: int = 0) -> None:
        self.parent = parent
        self.halvings = halvings
        self.children: dict[int, Kind] = {}
        self.waited, self.returned = array("d", bytes(8 * BINS)), array("d", bytes(8 * BINS))
        self.hazard: Sequence[float] = ()
        self.computed_at = 0

    def halve(self, halvings: int) -> None:
        """Have been halved so often by now."""
        share = 0.5 ** (halvings - self.halvings)
        self.waited = array("d", [value * share for value in self.waited])
        self.returned = array("d", [value * share for value in self.returned])
        self.halvings = halvings


class Habits:
    """The tree of kinds, and what was counted in it."""

    def __init__(self, limit: int = KINDS_MAX) -> None:
        self._limit = limit
        self._root = Kind(None)
        self._count = 1
        self._requests = 0
        self._halvings = 0

    def __len__(self) -> int:
        """How many kinds there are; at most the limit."""
        return self._count

    def kind(self, features: Sequence[int]) -> Kind:
        """The narrowest kind with these features, widest first; a wider one once there are too many."""
        kind = self._root
        for feature in features:
            child = kind.children.get(feature)
            if child is None:
                if self._count >= self._limit:
                    return kind
                child = kind.children[feature] = Kind(kind, self._halvings)
                self._count += 1
            kind = child
        return kind

    def waited(self, kind: Kind, age_bin: int) -> None:
        """A session of this kind has waited through all of an age bin."""
        at: Kind | None = kind
        while at is not None:
            if at.halvings != self._halvings:
                at.halve(self._halvings)
            at.waited[age_bin] += 1
            at = at.parent

    def returned(self, kind: Kind, age_bin: int) -> None:
        """A session of this kind has come back in this age bin."""
        at: Kind | None = kind
        while at is not None:
            if at.halvings != self._halvings:
                at.halve(self._halvings)
            at.waited[age_bin] += 1
            at.returned[age_bin] += 1
            at = at.parent

    def next_request(self) -> None:
        """A request more."""
        self._requests += 1
        if self._requests % HALVED_AFTER == 0:
            self._halvings += 1  # each kind follows when it is next looked at

    def hazard(self, kind: Kind) -> Sequence[float]:
        """The chance to come back in each age bin for who has reached it. Don't mutate."""
        if kind.hazard and self._requests < kind.computed_at + FRESH:
            return kind.hazard
        if kind.halvings != self._halvings:
            kind.halve(self._halvings)
        if kind.parent is None:
            kind.hazard = [(r + RARE) / (w + 1) for r, w in zip(kind.returned, kind.waited, strict=True)]
        else:
            above = self.hazard(kind.parent)
            kind.hazard = [
                (r + LEAN * a) / (w + LEAN) for r, w, a in zip(kind.returned, kind.waited, above, strict=True)
            ]
        kind.computed_at = self._requests
        return kind.hazard
