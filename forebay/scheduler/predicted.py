"""What workers will have soon: the prefixes of requests that were just sent to them.

Events come after the prompt is computed; sixteen siblings may come before that. A prediction lives between `ttl_s`
and twice that: there are two generations, and the older one is dropped as a whole.
"""

from __future__ import annotations

import numpy as np

from forebay.scheduler.fleet import Numbers
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.key_table import Keys
from forebay.scheduler.reach import leading_of

WORKERS_MAX = 1 << 12


class Predicted:
    """Predictions of `workers` workers, at most `max_blocks` in each generation (full: the older one goes early).

    With `ttl_s` 0 nothing is predicted.
    """

    def __init__(self, workers: int, *, ttl_s: float = 5.0, max_blocks: int = 1 << 20) -> None:
        assert workers < WORKERS_MAX, workers
        self.workers, self.ttl_s, self.max_blocks = workers, ttl_s, max_blocks
        self._young, self._old = PrefixIndex(), PrefixIndex()
        self._born = 0.0

    @property
    def blocks(self) -> int:
        """Blocks that are predicted somewhere."""
        return len(self._young) + len(self._old)

    def add(self, worker: int, keys: Keys, now: float) -> None:
        """A prompt with these keys was sent to `worker`."""
        if not self.ttl_s:
            return
        self._turn(now)
        if len(self._young) + keys.size > self.max_blocks:
            self._next_generation(now)
        self._young.stored(worker, keys[: self.max_blocks])

    def leading(self, keys: Keys, now: float) -> Numbers:
        """For each worker: how many of the first blocks it is predicted to have."""
        if not self.ttl_s:
            return np.zeros(self.workers, np.int64)
        self._turn(now)
        # Prompts are added from their first block on, and go as a whole.
        matches = (index.match(keys, nested=True) for index in (self._young, self._old))
        young, old = (leading_of(match, self.workers) for match in matches)
        return np.maximum(young, old)

    def forget(self, worker: int) -> None:
        """The worker is gone, and what it was about to have."""
        self._young.drop(worker)
        self._old.drop(worker)

    def _turn(self, now: float) -> None:
        if now - self._born >= 2 * self.ttl_s:
            self._young = PrefixIndex()
        if now - self._born >= self.ttl_s:
            self._next_generation(now)

    def _next_generation(self, now: float) -> None:
        self._young, self._old, self._born = PrefixIndex(), self._young, now
