"""A publisher with a thread of its own, for processes without an event loop (the worker)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forebay.events.publisher import EventPublisher, PublisherStats
from forebay.events.schema import KVEvent

_BURST = 256


class _Item(NamedTuple):
    lost_before: int
    events: Sequence[KVEvent]
    ts: float


class PublisherThread:
    """Runs an EventPublisher, which belongs to this object from now on. Any thread may publish.

    Batches wait in a queue of `capacity`; when it is full they are lost, which consumers see as a gap in the
    sequence (so they ask for a replay). A `snapshot` given to the publisher is called in this thread.
    """

    def __init__(
        self,
        publisher: EventPublisher,
        *,
        capacity: int = 4096,
        interval: float = 0.02,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._publisher = publisher
        self._queue: queue.Queue[_Item] = queue.Queue(capacity)
        self._interval, self._clock = interval, clock
        self._lock = threading.Lock()
        self._lost = 0
        self._stop = threading.Event()
        self.endpoint = publisher.endpoint
        self.replay_endpoint = publisher.replay_endpoint
        # A daemon: an engine that dies without closing must not hang on its events.
        self._thread = threading.Thread(target=self._run, name="forebay-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> bool:
        """Queue one batch; False if it was lost. Never blocks, never raises."""
        if not events:
            return True
        if self._stop.is_set():
            return False
        with self._lock:
            try:
                self._queue.put_nowait(_Item(self._lost, events, self._clock()))
            except queue.Full:
                self._lost += 1
                return False
            self._lost = 0
            return True

    @property
    def queued(self) -> int:
        """Batches that wait to be published."""
        return self._queue.qsize()

    def stats(self) -> PublisherStats:
        """The publisher's figures, from whatever thread."""
        return self._publisher.stats()

    def close(self, timeout: float = 2.0) -> None:
        """Publish what is queued, then stop and close the sockets. Blocks up to `timeout` seconds. Idempotent."""
        self._stop.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stop.is_set() or not self._queue.empty():
                self._drain()
                self._lose_rest()
                self._publisher.tick(self._clock())
                while self._publisher.poll_replay() and self._queue.empty():
                    pass
        finally:
            self._publisher.close()

    def _drain(self) -> None:
        """Publish a burst; wait for the first of it as long as the loop's interval."""
        wait: float | None = self._interval
        for _ in range(_BURST):
            try:
                item = self._queue.get(timeout=wait) if wait else self._queue.get_nowait()
            except queue.Empty:
                return
            wait = None
            self._lose(item.lost_before)
            self._publisher.publish(item.events, item.ts)

    def _lose_rest(self) -> None:
        """Own up to losses that no later batch has told of: else a quiet stream would hide them."""
        with self._lock:
            if not self._queue.empty():
                return
            lost, self._lost = self._lost, 0
        self._lose(lost)

    def _lose(self, count: int) -> None:
        if count:
            self._publisher.lose(count)


def run_in_thread(publisher: EventPublisher, *, capacity: int = 4096, interval: float = 0.02) -> PublisherThread:
    """Start a thread that owns `publisher` and serves replays every `interval` seconds."""
    return PublisherThread(publisher, capacity=capacity, interval=interval)
