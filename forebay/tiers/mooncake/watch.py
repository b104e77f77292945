"""Notices calls of the library that take too long, while they do."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forebay.tiers.timers import Timers

HANGS_S = 1.5
"""A call that transfers one batch and takes longer: its thread is replaced, and its host left alone for a while."""


class Watch:
    """`hangs` and `hangs_no_more` are told of threads that are held up, by whoever has set them."""

    def __init__(self, timers: Timers, clock: Callable[[], float]) -> None:
        self._timers = timers
        self._clock = clock
        self.counts: Counter[str] = Counter()
        self.hangs: Callable[[], None] = lambda: None
        self.hangs_no_more: Callable[[], None] = lambda: None

    @contextmanager
    def call(self, too_long: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Around one call. `too_long` is called from another thread if it hangs."""
        lock = threading.Lock()
        returned = hung = False

        def notice() -> None:
            nonlocal hung
            with lock:
                if returned:
                    return
                hung = True
                too_long()
                self.hangs()
                self.counts["calls_hung"] += 1  # last: who sees the count finds the host suspected, the thread replaced

        timer = self._timers.add(self._clock() + HANGS_S, notice)
        try:
            yield
        finally:
            self._timers.cancel(timer)
            with lock:
                returned = True
                if hung:
                    self.hangs_no_more()
