"""A circuit breaker: a service that is down is left alone, and asked now and then by one request at a time.

    closed --failures_max in a row--> open --open_s--> half open --one request succeeds--> closed
                                        ^------------------- it fails, and the pause doubles
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

PAUSE_MAX_S = 30.0


class State(IntEnum):
    """As a gauge tells it."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Methods may be called from any thread and never block. `clock` is monotonic."""

    def __init__(self, failures_max: int, open_s: float, clock: Callable[[], float]) -> None:
        self._failures_max = failures_max
        self._first_pause = open_s
        self._pause = open_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self.state = State.CLOSED
        self.opened = 0
        self.rejected = 0

    @property
    def shut(self) -> bool:
        """Is nothing but a trial admitted at present?"""
        return self.state is not State.CLOSED

    @property
    def due(self) -> bool:
        """Is it time for a trial?"""
        return self.state is State.OPEN and self._clock() >= self._until

    def admit(self) -> bool:
        """May a request be made? Whoever gets True owes one `succeeded`, `failed` or `abandoned`."""
        with self._lock:
            if self.state is State.CLOSED:
                return True
            if self.state is State.OPEN and self._clock() >= self._until:
                self.state = State.HALF_OPEN
                return True
            self.rejected += 1
            return False

    def succeeded(self) -> None:
        """The service has answered."""
        with self._lock:
            self.state = State.CLOSED
            self._failures = 0
            self._pause = self._first_pause

    def abandoned(self) -> None:
        """A request was given up before it could tell anything. If it was the trial, another one may be made."""
        with self._lock:
            if self.state is State.HALF_OPEN:
                self.state = State.OPEN

    def failed(self) -> None:
        """The service has not, or wouldn't."""
        with self._lock:
            self._failures += 1
            if self.state is State.HALF_OPEN:
                self._pause = min(2 * self._pause, max(PAUSE_MAX_S, self._first_pause))
            elif self.state is State.OPEN or self._failures < self._failures_max:
                return
            self.state = State.OPEN
            self._until = self._clock() + self._pause
            self.opened += 1
