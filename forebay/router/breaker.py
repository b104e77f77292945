"""When to leave a backend alone. Pure: time comes in.

    CLOSED --- `failures` in a row ---> OPEN --- after `rest_s` ---> HALF_OPEN (one request may try)
       ^                                 ^                              |
       +---------- it succeeds ----------|------------------------------+
                                         +--------- it fails -----------+
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """See the module."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass
class Breaker:
    """Of one backend."""

    failures: int = 5
    rest_s: float = 5.0
    opened: int = 0
    _row: int = 0
    _until: float = 0.0
    _trying: bool = False

    def state(self, now: float) -> BreakerState:
        """At this time."""
        if self._row < self.failures:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """May a request be sent?"""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trying)

    def sent(self, now: float) -> None:
        """One was sent."""
        self._trying = self.state(now) is BreakerState.HALF_OPEN

    def succeeded(self) -> None:
        """It was answered, well or with a refusal of its own."""
        self._row, self._trying = 0, False

    def failed(self, now: float) -> None:
        """It wasn't."""
        self._row, self._trying = self._row + 1, False
        if self._row >= self.failures:
            self.opened += self._row == self.failures
            self._until = now + self.rest_s

    def gave_up(self) -> None:
        """Whoever asked went away before it was known."""
        self._trying = False
