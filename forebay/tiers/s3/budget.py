"""Retries as a budget: a service that fails gets a tenth more requests, not three times as many."""

from __future__ import annotations

import threading

REFILL = 0.1
"""What a request that succeeds gives back."""


class RetryBudget:
    """A bucket of tokens. Each retry takes one, each success gives a tenth back, up to the size of the bucket."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.left = size
        self.taken = 0
        self.refused = 0
        self._lock = threading.Lock()

    def take(self) -> bool:
        """May this request be tried again? Counted either way."""
        with self._lock:
            if self.left < 1:
                self.refused += 1
                return False
            self.left -= 1
            self.taken += 1
            return True

    def succeeded(self) -> None:
        """A request has succeeded."""
        with self._lock:
            self.left = min(self.size, self.left + REFILL)
