"""Subscriptions to KV events: a thread a stream, which hands what it receives to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from forebay.events.sockets import CurveClient
from forebay.events.subscriber import EventSubscriber, Received
from forebay.scheduler.feed import Feed

log = logging.getLogger(__name__)

_WAIT_S = 0.25
QUIET_S = 35.0
"""A store says something every 10 s. After so long without, its stream counts as down, and is begun anew."""
WAITING_MAX = 4096
AGAIN_S = 1.0


class Listener:
    """One stream into one feed. The thread receives; `feed` is touched on the loop alone. `quiet_s` is for streams with
    heartbeats, None for those that may be silent for ever."""

    def __init__(
        self, feed: Feed, endpoint: str, replay: str | None, loop: asyncio.AbstractEventLoop,
        quiet_s: float | None = None, clock: Callable[[], float] = time.time, curve: CurveClient | None = None,
    ) -> None:  # fmt: skip
        self.feed, self._loop, self._clock = feed, loop, clock
        self.gaps = self.replays = self.failures = 0
        self._endpoint, self._replay, self._quiet_s, self._curve = endpoint, replay, quiet_s, curve
        self._stop = threading.Event()
        # What was handed over and not yet applied: a slow loop makes the thread wait, and ZMQ's queue bounds the rest.
        self._room = threading.BoundedSemaphore(WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name=f"events of {feed.owner}", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with EventSubscriber(
                    self._endpoint, replay=self._replay, from_start=self._replay is not None, curve=self._curve
                ) as stream:
                    self._listen(stream)
            except Exception:
                # Whatever it is, what was heard before must not be believed for ever.
                log.exception("the events of %s can't be listened to; trying again", self.feed.owner)
                self.failures += 1
                self._tell(self.feed.down)
                self._stop.wait(AGAIN_S)

    def _listen(self, stream: EventSubscriber) -> None:
        """Until it is time to stop, or to begin anew because nothing comes."""
        last = time.monotonic()
        while not self._stop.is_set():
            received = stream.receive(_WAIT_S)
            self.gaps, self.replays = stream.counters.gaps, stream.counters.replays
            if received is not None:
                last = time.monotonic()
                self._hand_over(received)
            elif self._quiet_s is not None and time.monotonic() - last > self._quiet_s:
                self._tell(self.feed.down)
                return

    def _hand_over(self, received: Received) -> None:
        while not self._room.acquire(timeout=_WAIT_S):
            if self._stop.is_set():
                return
        self._tell(self._apply, received)

    def _tell(self, what: Callable[..., None], *about: Received) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, *about)

    def _apply(self, received: Received) -> None:
        self._room.release()
        before = self.feed.other_size
        self.feed.apply(received, self._clock())
        if self.feed.other_size != before:
            # Else nothing would ever be found there, and nobody would know why.
            log.error(
                "%s tells of blocks of %d tokens; not used, since its table says block_tokens = %s: correct it",
                self.feed.owner, self.feed.other_size, self.feed.block_tokens,
            )  # fmt: skip
