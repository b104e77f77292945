"""The store's events about one namespace, told again by an engine: for routers that know only engines.

The owner of a chunk is the store, and it has a stream of its own for each namespace; a router that can should listen
there. One that can't hears the same from each engine on that store, when the engine takes its next step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq

from forebay.events.schema import AllBlocksCleared, KVEvent
from forebay.events.subscriber import EventSubscriber

EVENTS_MAX = 1 << 16
"""Events that wait for the engine's next step; what comes when it is full is lost, counted."""

POLL_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stream:
    """Where a namespace's events are."""

    endpoint: str
    replay: str | None


def stream_of(namespace: bytes, namespaces: Sequence[Mapping[str, str]], info: Mapping[str, str]) -> Stream | None:
    """The stream of a namespace, from what a store says of itself; None if it has none, or it can't be told which."""
    labels = {row["id"]: row["label"] or row["id"][:16] for row in namespaces}
    label = labels.get(namespace.hex())
    if label is None or list(labels.values()).count(label) != 1:
        return None
    suffix = f"@{label.replace('@', '_')}"
    places = [place for name, place in info.items() if name.startswith("events ") and name.endswith(suffix)]
    if len(places) != 1:
        return None
    endpoint, _, replay = places[0].partition(", replay ")
    return Stream(endpoint, None if replay in ("", "off") else replay)


class Relay:
    """Listens on a thread of its own. `take` may be called from any other."""

    def __init__(self) -> None:
        self.lost = 0
        self._events: deque[KVEvent] = deque()
        self._stream: Stream | None = None
        self._wanted: Stream | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-relay", daemon=True)
        self._thread.start()

    def listen(self, stream: Stream | None) -> None:
        """From now on listen there; the same place is no change."""
        self._wanted = stream

    def take(self) -> list[KVEvent]:
        """What has come since the last time."""
        taken: list[KVEvent] = []
        with suppress(IndexError):
            while len(taken) < EVENTS_MAX:
                taken.append(self._events.popleft())
        return taken

    def __len__(self) -> int:
        return len(self._events)

    def close(self) -> None:
        """End the thread. Blocks for a moment."""
        self._stop.set()
        self._thread.join(2 * POLL_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            stream = self._wanted
            if stream is None:
                self._stop.wait(POLL_S)
                continue
            try:
                with EventSubscriber(stream.endpoint, replay=stream.replay, from_start=True) as subscriber:
                    self._follow(subscriber, stream)
            except zmq.ZMQError as error:
                log.warning("events of the store can't be followed at %s: %s", stream.endpoint, error)
                self._stop.wait(POLL_S)

    def _follow(self, subscriber: EventSubscriber, stream: Stream) -> None:
        while not self._stop.is_set() and self._wanted == stream:
            received = subscriber.receive(POLL_S)
            for event in received.batch.events if received is not None else ():
                if isinstance(event, AllBlocksCleared):
                    continue  # it would be taken for the engine's own blocks
                if len(self._events) >= EVENTS_MAX:
                    self.lost += 1
                    continue
                self._events.append(event)
