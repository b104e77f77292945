"""Counters and gauges by dotted name, written by one thread and read by any."""

from __future__ import annotations

from collections import defaultdict


class Counters:
    """Monotonous sums. One writer for each name; reading gives a copy that may be a moment old."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount`, creating the counter at 0."""
        self._values[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._values.get(name, 0.0)

    def values(self) -> dict[str, float]:
        """All of them."""
        return dict(self._values)
