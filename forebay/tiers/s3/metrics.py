"""How many requests of which kind, how they ended, how long they took, how many bytes they moved."""

from __future__ import annotations

import threading
from collections import Counter

STEPS = 40
_FIRST_S = 0.0005
_FACTOR = 2**0.5


class Latencies:
    """A histogram with steps of a factor of 1.41 from 0.5 ms on. Not locked: its owner sees to that."""

    def __init__(self) -> None:
        self._counts = [0] * STEPS

    def add(self, seconds: float) -> None:
        """One request."""
        step, edge = 0, _FIRST_S
        while seconds > edge and step < STEPS - 1:
            step, edge = step + 1, edge * _FACTOR
        self._counts[step] += 1

    def quantile(self, share: float) -> float:
        """An upper bound, in seconds, of what this share of the requests took; 0 if there were none."""
        wanted = share * sum(self._counts)
        seen = 0
        for step, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return float(_FIRST_S * _FACTOR**step)
        return 0.0


class RequestMetrics:
    """Counters and latencies by operation. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._latencies: dict[str, Latencies] = {}

    def request(self, operation: str, outcome: str, seconds: float) -> None:
        """One request has ended; `outcome` is "ok" or a kind of failure."""
        with self._lock:
            self._counts[f"requests_{operation}"] += 1
            if outcome != "ok":
                self._counts[f"requests_{outcome}"] += 1
            self._latencies.setdefault(operation, Latencies()).add(seconds)

    def moved(self, *, sent: int = 0, received: int = 0) -> None:
        """Bytes of objects, without what protocols add."""
        with self._lock:
            self._counts["bytes_sent"] += sent
            self._counts["bytes_received"] += received

    def values(self) -> dict[str, float]:
        """Counters, and p50 and p99 of each operation in milliseconds."""
        with self._lock:
            found = {name: float(count) for name, count in self._counts.items()}
            for operation, latencies in self._latencies.items():
                for share, name in ((0.5, "p50"), (0.99, "p99")):
                    found[f"{operation}_{name}_ms"] = latencies.quantile(share) * 1e3
        return found
