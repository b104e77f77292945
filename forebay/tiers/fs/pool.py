"""Worker threads behind a queue that is bounded in bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("forebay.tier.fs")


@dataclass(frozen=True, slots=True)
class Task:
    """Something to do. `abandon` is called instead of `run` if the pool closes first. Neither may raise."""

    run: Callable[[], None]
    abandon: Callable[[], None]
    size: int


class WorkPool:
    """`threads` workers. Queued and running tasks together take at most `bytes_max`, but one always fits."""

    def __init__(self, name: str, threads: int, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._queue: deque[Task] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.bytes = 0
        self.crashes = 0
        self._threads = [
            # Daemon threads: one that hangs in its device must not keep the process from ending.
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> bool:
        """Queue a task. False if there is no room or the pool is closing. Never blocks."""
        with self._changed:
            if self._closing or (self.bytes and self.bytes + task.size > self._bytes_max):
                return False
            self.bytes += task.size
            self._queue.append(task)
            self._changed.notify()
            return True

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                task = self._queue.popleft()
                closing = self._closing
            try:
                task.abandon() if closing else task.run()
            except Exception:
                self.crashes += 1
                log.exception("a task of the file tier failed")
            with self._changed:
                self.bytes -= task.size

    def close(self, timeout_s: float) -> bool:
        """Finish what is running, abandon what is queued. False if a thread didn't end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
