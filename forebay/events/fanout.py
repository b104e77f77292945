"""One stream a worker, for consumers that know only workers: what the store holds, said once for each of them.

    shared events   (the store's chunks)          encoded once, sent on every worker's stream
    own events      (one worker's device memory)  sent on its stream alone

Every stream has a port, a topic, a sequence and a ring of its own, so such a consumer sees nothing unusual. It costs
as many messages as there are workers; the payloads in the rings are shared. Removals aren't remembered for each of
them: a consumer that asks for what the ring no longer has is told to clear, and then the present state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain

from forebay.events.codec import encode_batch
from forebay.events.errors import TooManyStreams
from forebay.events.history import SnapshotSource
from forebay.events.publisher import EventPublisher, StreamOptions, stamped
from forebay.events.schema import BlockStored, KVEvent
from forebay.events.sockets import CurveServer, Sockets
from forebay.events.streams import nth_endpoint, stream_topic


class WorkerStreams:
    """The streams of the workers that are attached to one store. All methods belong to one thread.

    `shared` gives what all of them are told of, parents first. The i-th worker gets the i-th endpoint as namespaces
    do (see `forebay.events.streams`), and a topic of its own unless all have this one `topic`.

    Raises EndpointRefused, EndpointUnavailable and TooManyStreams.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        model: str,
        shared: SnapshotSource,
        replay: str | None = None,
        options: StreamOptions | None = None,
        curve: CurveServer | None = None,
        max_workers: int = 64,
        topic: str | None = None,
    ) -> None:
        self.max_workers = max_workers
        self.shared_batches = 0
        self._endpoint, self._replay, self._model = endpoint, replay, model
        self._shared, self._topic = shared, topic
        options = options or StreamOptions()
        self._options = replace(options, limits=replace(options.limits, tombstones=0))
        self._sockets = Sockets(curve)
        self._streams: dict[str, EventPublisher] = {}
        self._indices: dict[str, int] = {}

    @property
    def workers(self) -> Mapping[str, EventPublisher]:
        """The attached workers' streams by name."""
        return self._streams

    def attach(self, worker: str, own: SnapshotSource | None = None) -> EventPublisher:
        """A stream for the worker, which begins with what the store holds now; it is there already if it is.

        `own` gives what only this worker holds.
        """
        if worker in self._streams:
            return self._streams[worker]
        if len(self._streams) >= self.max_workers:
            raise TooManyStreams(
                f"{self.max_workers} workers have a stream already: detach some, or run another relay for the others"
            )
        index = next(i for i in range(self.max_workers) if i not in self._indices.values())
        stream = EventPublisher(
            nth_endpoint(self._endpoint, index),
            topic=stream_topic(worker, self._model) if self._topic is None else self._topic,
            replay=self._replay and nth_endpoint(self._replay, index),
            options=self._options,
            snapshot=lambda: self._snapshot(own),
            sockets=self._sockets,
        )
        self._streams[worker], self._indices[worker] = stream, index
        return stream

    def detach(self, worker: str) -> None:
        """Close the worker's stream, if it has one. May block for 200 ms."""
        stream = self._streams.pop(worker, None)
        if stream is not None:
            del self._indices[worker]
            stream.close()

    def publish_shared(self, events: Sequence[KVEvent], ts: float) -> None:
        """One batch about the store, to every worker's stream. Never blocks, never raises for an event."""
        if not events:
            return
        self.shared_batches += 1
        told = stamped(events, self._options.epoch)
        encoded = encode_batch(ts, told, self._options.dp_rank, self._options.profile)
        for stream in self._streams.values():
            stream.publish_payload(told, encoded, ts)

    def publish_own(self, worker: str, events: Sequence[KVEvent], ts: float) -> None:
        """One batch about what only this worker holds; nothing if it isn't attached."""
        stream = self._streams.get(worker)
        if stream is not None:
            stream.publish(events, ts)

    def poll(self) -> bool:
        """Serve key checks and replays, a bounded part of them. True: call again soon, there is more."""
        more = self._sockets.poll_gate()
        for stream in self._streams.values():
            more = stream.poll_replay() or more
        return more

    def tick(self, now: float) -> None:
        """Tell all streams the time."""
        for stream in self._streams.values():
            stream.tick(now)

    def statistics(self) -> dict[str, float]:
        """Counters and gauges, summed over the workers; `workers` and its cap among them."""
        values: dict[str, float] = {
            "workers": len(self._streams), "workers_max": self.max_workers, "shared_batches": self.shared_batches,
        }  # fmt: skip
        for stream in self._streams.values():
            for name, value in asdict(stream.stats()).items():
                values[name] = values.get(name, 0) + value
        return values

    def close(self) -> None:
        """Close all streams. Idempotent; may block for 200 ms."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._sockets.close()

    def _snapshot(self, own: SnapshotSource | None) -> Iterator[BlockStored]:
        return chain(self._shared(), own() if own is not None else ())
