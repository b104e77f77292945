"""Calls at a time, on one thread: what bounds how long a tier waits for a server or host that hangs."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class Timers:
    """Calls must be short and not raise. What was `add`ed is called once; not if it was cancelled before its time."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int]] = []
        self._calls: dict[int, Callable[[], None]] = {}
        self._serial = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"{name}-timers", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, when: float, call: Callable[[], None]) -> int:
        """Have this called at `when` on the clock. Returns what cancels it."""
        with self._changed:
            number = next(self._serial)
            self._calls[number] = call
            heapq.heappush(self._heap, (when, number))
            if self._heap[0][1] == number:
                self._changed.notify()
            return number

    def cancel(self, number: int) -> None:
        """It isn't wanted any more. It may be under way."""
        with self._changed:
            self._calls.pop(number, None)
            if len(self._heap) > 2 * len(self._calls) + 64:
                self._heap = [entry for entry in self._heap if entry[1] in self._calls]
                heapq.heapify(self._heap)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (not self._heap or self._heap[0][0] > self._clock()):
                    self._changed.wait(max(0.0, self._heap[0][0] - self._clock()) if self._heap else None)
                if self._closing:
                    return
                call = self._calls.pop(heapq.heappop(self._heap)[1], None)
            if call is not None:
                call()

    def close(self) -> None:
        """Call nothing any more."""
        with self._changed:
            self._closing = True
            self._calls.clear()
            self._heap.clear()
            self._changed.notify_all()
        self._thread.join(5.0)
