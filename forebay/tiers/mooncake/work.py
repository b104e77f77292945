"""Threads that take jobs by batches from a queue that is bounded in bytes. One that hangs is replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger("forebay.tier.mooncake")

T = TypeVar("T")

SPARES_MAX = 8
"""So many threads may hang in the library at a time before work stands still."""


@dataclass(frozen=True, slots=True)
class Queued(Generic[T]):
    """A job with its size in bytes."""

    job: T
    size: int


class BatchPool(Generic[T]):
    """`threads` workers. Queued and running jobs together take at most `bytes_max`, but one always fits.

    `run` is given a batch, and a number that no other running thread has; `abandon` a job that won't be run any more.
    Neither may raise.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        bytes_max: int,
        batch_bytes: int,
        batch_jobs: int,
        run: Callable[[Sequence[T], int], None],
        abandon: Callable[[T], None],
    ) -> None:
        self._name = name
        self._bytes_max, self._batch_bytes, self._batch_jobs = bytes_max, batch_bytes, batch_jobs
        self._run, self._abandon = run, abandon
        self._queue: deque[Queued[T]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._wanted = threads
        self._alive: dict[int, threading.Thread] = {}
        self.bytes = 0
        self.crashes = 0
        self.hanging = 0
        with self._changed:
            for _ in range(threads):
                self._start()

    def submit(self, job: T, size: int) -> bool:
        """Queue a job. False if there is no room or the pool is closing. Never blocks."""
        with self._changed:
            if self._closing or (self.bytes and self.bytes + size > self._bytes_max):
                return False
            self.bytes += size
            self._queue.append(Queued(job, size))
            self._changed.notify()
            return True

    def hangs(self) -> None:
        """One of the threads hangs: put another one to work, up to a cap."""
        with self._changed:
            self.hanging += 1
            if self.hanging <= SPARES_MAX and not self._closing:
                self._start()

    def hangs_no_more(self) -> None:
        """It has come back; one thread too many ends."""
        with self._changed:
            self.hanging -= 1
            self._changed.notify_all()

    def _start(self) -> None:
        number = next(i for i in range(len(self._alive) + 1) if i not in self._alive)
        # Daemon threads: one that hangs must not keep the process from ending.
        thread = threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True)
        self._alive[number] = thread
        thread.start()

    def _work(self, number: int) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing and not self._too_many():
                    self._changed.wait()
                if self._too_many() or not self._queue:
                    del self._alive[number]
                    return
                batch, closing = self._take(), self._closing
            try:
                if closing:
                    for queued in batch:
                        self._abandon(queued.job)
                else:
                    self._run([queued.job for queued in batch], number)
            except Exception:
                self.crashes += 1
                log.exception("a batch of jobs failed")
            with self._changed:
                self.bytes -= sum(queued.size for queued in batch)

    def _too_many(self) -> bool:
        return not self._closing and len(self._alive) > self._wanted + min(self.hanging, SPARES_MAX)

    def _take(self) -> list[Queued[T]]:
        """At least one job, as many as fit into a batch, and no more than leaves some for the other threads."""
        share = max(1, -(-len(self._queue) // self._wanted))
        batch = [self._queue.popleft()]
        size = batch[0].size
        while self._queue and len(batch) < min(self._batch_jobs, share):
            size += self._queue[0].size
            if size > self._batch_bytes:
                break
            batch.append(self._queue.popleft())
        return batch

    def close(self, timeout_s: float) -> bool:
        """Finish what is running, abandon what is queued. False if a thread didn't end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            threads = list(self._alive.values())
        until = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
