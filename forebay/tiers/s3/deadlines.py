"""Calls at a time: a load that a server keeps waiting is given up when its time is over, not when its socket is."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class Deadlines:
    """One thread. Calls must be short and not raise. What was `add`ed is called once, or never after `cancel`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int]] = []
        self._calls: dict[int, Callable[[], None]] = {}
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="s3-deadlines", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, when: float, call: Callable[[], None]) -> int:
        """Have this called at `when` on the clock; returns what to cancel it with."""
        with self._changed:
            number = next(self._ids)
            self._calls[number] = call
            heapq.heappush(self._heap, (when, number))
            if self._heap[0][1] == number:
                self._changed.notify()
            return number

    def cancel(self, number: int) -> None:
        """It need not be called any more. It may be running."""
        with self._changed:
            self._calls.pop(number, None)
            if len(self._heap) > 64 and len(self._heap) > 2 * len(self._calls):
                self._heap = [entry for entry in self._heap if entry[1] in self._calls]
                heapq.heapify(self._heap)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (not self._heap or self._heap[0][0] > self._clock()):
                    self._changed.wait(max(0.0, self._heap[0][0] - self._clock()) if self._heap else None)
                if self._closing:
                    return
                _, number = heapq.heappop(self._heap)
                call = self._calls.pop(number, None)
            if call is not None:
                call()

    def close(self) -> None:
        """Call nothing any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(5.0)
