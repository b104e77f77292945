"""One stream a namespace: publishers that come into being when a namespace is first used.

A ZMQ PUB has one port, and a sequence number counts what was sent there; a consumer that watches one topic
of a shared port would take every other topic's batches for gaps. So each namespace has a port of its own:

    tcp, a fixed port P    the first namespace gets P, the i-th P + 2i (events on P and replay on P + 1 go well
                           together); where that is taken, a free port
    tcp, port 0            a free port each
    ipc, a path            the first gets the path, the others path.1, path.2, ...

The order is that of `open`, so open known namespaces in a stable order after a restart. `endpoints` says
where each one is, and the topic of its batches names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.events.errors import EndpointUnavailable, TooManyStreams
from forebay.events.history import SnapshotSource
from forebay.events.publisher import EventPublisher, PublisherStats, StreamOptions
from forebay.events.schema import KVEvent
from forebay.events.sockets import CurveServer, Sockets, check_endpoint

_PORTS_A_STREAM = 2


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """Where one namespace's events are."""

    namespace: bytes
    topic: str
    endpoint: str
    replay_endpoint: str | None
    stats: PublisherStats


def stream_topic(owner: str, model: str) -> str:
    """`kv@owner@model`: consumers split it at `@` and want exactly three parts."""
    return f"kv@{owner.replace('@', '_')}@{model.replace('@', '_')}"


class NamespaceStreams:
    """The streams of a store. All methods belong to one thread; only `close` may block (briefly).

    `owner` names the store in topics (host:port or a name), unless all have this one `topic`; `sockets` are the
    streams' own, made here if none are given. Raises EndpointRefused at once for endpoints that
    can never be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        owner: str,
        replay: str | None = None,
        options: StreamOptions | None = None,
        curve: CurveServer | None = None,
        max_streams: int = 64,
        topic: str | None = None,
        sockets: Sockets | None = None,
    ) -> None:
        for wanted in (endpoint, replay):
            if wanted is not None:
                check_endpoint(wanted, curve=curve is not None)
        self.owner, self.topic, self.max_streams = owner, topic, max_streams
        self.unrouted_batches = 0
        self._endpoint, self._replay = endpoint, replay
        self._options = options or StreamOptions()
        self._sockets = sockets or Sockets(curve)
        self._streams: dict[bytes, EventPublisher] = {}
        self._indices: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, namespace: bytes, model: str, snapshot: SnapshotSource | None = None) -> EventPublisher:
        """The namespace's publisher, made if there is none yet (`model` and `snapshot` count then only).

        Raises TooManyStreams at the cap, EndpointUnavailable if the first, configured endpoint is taken.
        """
        if namespace in self._streams:
            return self._streams[namespace]
        if len(self._streams) >= self.max_streams:
            raise TooManyStreams(
                f"{self.max_streams} namespaces have an event stream already; raise the cap on streams, or "
                "clear namespaces that aren't used any more and restart the store"
            )
        index = next(i for i in range(self.max_streams) if i not in self._indices.values())
        topic = stream_topic(self.owner, model) if self.topic is None else self.topic
        stream = self._bind(index, topic, snapshot)
        self._streams[namespace], self._indices[namespace] = stream, index
        return stream

    def end(self, namespace: bytes) -> None:
        """Close the namespace's stream, if it has one; its place is free for another. May block for 200 ms."""
        stream = self._streams.pop(namespace, None)
        if stream is not None:
            del self._indices[namespace]
            stream.close()

    def get(self, namespace: bytes) -> EventPublisher | None:
        """The namespace's publisher, if it has one."""
        return self._streams.get(namespace)

    def publish(self, namespace: bytes, events: Sequence[KVEvent], ts: float) -> int | None:
        """Publish on the namespace's stream. Never raises; without a stream the batch is counted."""
        stream = self._streams.get(namespace)
        if stream is None:
            self.unrouted_batches += bool(events)
            return None
        return stream.publish(events, ts)

    def poll(self) -> bool:
        """Serve key checks and replays, a bounded part of them. True: call again soon, there is more."""
        more = self._sockets.poll_gate()
        for stream in self._streams.values():
            more = stream.poll_replay() or more
        return more

    @property
    def answering(self) -> bool:
        """Has the last `poll` done anything, or is anything left to do?"""
        return any(stream.answering for stream in self._streams.values())

    def descriptors(self) -> list[int]:
        """See `Sockets.descriptors`."""
        return self._sockets.descriptors()

    def tick(self, now: float) -> None:
        """Tell all streams the time."""
        for stream in self._streams.values():
            stream.tick(now)

    def endpoints(self) -> list[StreamInfo]:
        """Where each namespace's events are, in the order in which they were opened."""
        return [
            StreamInfo(namespace, stream.topic, stream.endpoint, stream.replay_endpoint, stream.stats())
            for namespace, stream in self._streams.items()
        ]

    def close(self) -> None:
        """Close all streams. Idempotent; may block for 200 ms."""
        for stream in self._streams.values():
            stream.close()
        self._sockets.close()

    def _bind(self, index: int, topic: str, snapshot: SnapshotSource | None) -> EventPublisher:
        wanted = (
            nth_endpoint(self._endpoint, index),
            self._replay and nth_endpoint(self._replay, index),
        )
        try:
            return self._publisher(*wanted, topic, snapshot)
        except EndpointUnavailable:
            if index == 0 or not self._endpoint.startswith("tcp://"):
                raise
        free = (free_endpoint(self._endpoint), self._replay and free_endpoint(self._replay))
        return self._publisher(*free, topic, snapshot)

    def _publisher(
        self, endpoint: str, replay: str | None, topic: str, snapshot: SnapshotSource | None
    ) -> EventPublisher:
        return EventPublisher(
            endpoint, topic=topic, replay=replay,
            options=self._options, snapshot=snapshot, sockets=self._sockets,
        )  # fmt: skip


def nth_endpoint(endpoint: str, index: int) -> str:
    """The endpoint of the stream that is opened as number `index`."""
    if index == 0:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{index}"
    address, _, port = endpoint.rpartition(":")
    if port in ("*", "0"):
        return endpoint
    number = int(port) + _PORTS_A_STREAM * index
    return f"{address}:{number}" if number < 65536 else free_endpoint(endpoint)


def free_endpoint(endpoint: str) -> str:
    """The same address with a port that the system chooses; a path stays as it is."""
    address, _, _ = endpoint.rpartition(":")
    return endpoint if endpoint.startswith("ipc://") else f"{address}:0"
