"""One event stream: a bound PUB for what happens now, a bound ROUTER for what was missed.

    live     [topic, seq (8 bytes BE), payload]                    seq grows by one a batch, from 0
    replay   DEALER  -> ["", start]                                start: 8 bytes BE
             ROUTER  -> ["", topic, seq, payload] ... ["", "", ff x 8, ""]
    snapshot DEALER  -> ["", ff x 7 fe]                            a start that no publisher ever reaches
             ROUTER  -> the state in parts, all under the number at which it is true, then what came after it; END

Nothing here blocks, and publishing never raises: a slow subscriber loses batches (counted) and asks for them
again. There is no thread and no clock inside: the owner calls `poll_replay` and `tick` from its own loop.
A process without a loop uses `forebay.events.threaded`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from forebay.events.codec import EncodedBatch, encode_batch
from forebay.events.history import Batch, History, ReplayRing, SnapshotSource
from forebay.events.schema import KVEvent, WireProfile
from forebay.events.sockets import CurveServer, Sockets

END = b"\xff" * 8
SNAPSHOT_REQUEST = 2**64 - 2
"""Where a replay "starts" that asks for a snapshot. Publishers that know none answer with nothing."""
_MAX_REQUEST_BYTES = 1024
_NO_MORE = Batch(-1, b"")
_XPUB_NODROP = int(zmq.XPUB_NODROP)


@dataclass(frozen=True, slots=True)
class PublisherLimits:
    """Caps of one stream. `send_queue` counts batches that wait for one subscriber before it loses some;
    `replay_slice` bounds the work of one `poll_replay`; a consumer that doesn't take its replay for
    `replay_seconds` loses the rest of it."""

    ring_batches: int = 10_000
    ring_bytes: int = 64 << 20
    tombstones: int = 65_536
    send_queue: int = 4_096
    replay_clients: int = 64
    replay_slice: int = 64
    replay_seconds: float = 30.0
    heartbeat_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters since the start, and gauges of now (`ring_*`, `tombstones`, `replays_active`, `snapshot_bytes`).

    `fell_behind` counts how often a subscriber's queue filled up: from then on it alone loses batches, until
    it has room again (ZMQ doesn't say how many; it sees the gap itself).
    """

    next_seq: int
    events: int
    refused_events: int
    fell_behind: int
    send_errors: int
    lost_batches: int
    heartbeats: int
    ring_batches: int
    ring_bytes: int
    tombstones: int
    snapshot_bytes: int
    replays: int
    replays_active: int
    replays_refused: int
    replays_given_up: int
    replay_garbage: int
    compactions: int
    snapshots: int
    denied: int


@dataclass(slots=True, eq=False)
class _Replay:
    """A replay in progress. `ready` is the message that comes next, `since` when it began to wait."""

    batches: Iterator[Batch | None]
    ready: list[bytes] | None = None
    finished: bool = False
    since: float | None = None


@dataclass(slots=True)
class _Counts:
    events: int = 0
    refused_events: int = 0
    fell_behind: int = 0
    send_errors: int = 0
    lost_batches: int = 0
    heartbeats: int = 0
    replays: int = 0
    replays_refused: int = 0
    replays_given_up: int = 0
    replay_garbage: int = 0


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What the streams of one owner have in common.

    `epoch` is the owner's boot id as hex, put into every event that names none. `first_seq` is the number of
    a stream's first batch. A consumer that knows no epochs (Dynamo) passes over numbers that it has seen
    already, so after a restart from 0 it believes the old state until the numbers have caught up; an owner
    that restarts on the same endpoint should begin above all it ever used (`restart_safe_seq`). Consumers
    then see a gap, ask for a replay, and get a clear and the present state.

    `contiguous` is for consumers that refuse an answer whose numbers have holes: see History. They have to see a
    restart by numbers that go back, so `first_seq` is 0 for them.
    """

    epoch: str | None = None
    first_seq: int = 0
    dp_rank: int | None = 0
    profile: WireProfile = field(default_factory=WireProfile)
    contiguous: bool = False
    limits: PublisherLimits = field(default_factory=PublisherLimits)


def restart_safe_seq(now: float) -> int:
    """A first sequence number from the wall clock in seconds: above all that an earlier start with one can
    have used, as long as it published less than a million batches a second."""
    return int(now * 1_000_000)


class EventPublisher:
    """A stream with one topic and one sequence. All methods belong to one thread.

    `snapshot` gives BlockStored events for everything that is held now, parents first; it is called inside
    `poll_replay` and what it raises comes out there. Raises EndpointRefused or EndpointUnavailable.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        topic: str = "",
        replay: str | None = None,
        options: StreamOptions | None = None,
        snapshot: SnapshotSource | None = None,
        curve: CurveServer | None = None,
        sockets: Sockets | None = None,
    ) -> None:
        assert curve is None or sockets is None, "shared sockets bring their own CURVE keys"
        self.topic = topic
        self.options = options or StreamOptions()
        limits = self.options.limits
        self._topic = topic.encode()
        ring = ReplayRing(limits.ring_batches, limits.ring_bytes, self.options.first_seq)
        self._history = History(
            ring, self.options.profile,
            dp_rank=self.options.dp_rank, snapshot=snapshot, tombstones=limits.tombstones,
            contiguous=self.options.contiguous,
        )  # fmt: skip
        self._counts = _Counts()
        self._jobs: OrderedDict[bytes, _Replay] = OrderedDict()
        self.answering = False
        self._now = 0.0
        self._quiet_since: float | None = None
        self._owns = sockets is None
        self._sockets = sockets or Sockets(curve)
        self._closed = False
        try:
            self._pub = self._sockets.bind(zmq.PUB, endpoint, _pub_options(limits))
            self._router = self._sockets.bind(zmq.ROUTER, replay, _router_options(limits)) if replay else None
        except BaseException:
            self.close()
            raise

    # --- addresses ---------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where subscribers connect, with the real port."""
        return self._pub.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where replay requests go, with the real port."""
        return self._router.endpoint if self._router else None

    @property
    def fds(self) -> list[int]:
        """Descriptors whose (edge-triggered) readability means: call `poll_replay` until it returns False.
        Call it now and then anyway."""
        router = [int(self._router.socket.getsockopt(zmq.FD))] if self._router else []
        gate = self._sockets.gate_fd
        return router if gate is None else [*router, gate]

    # --- live --------------------------------------------------------------------------------------------

    def publish(self, events: Sequence[KVEvent], ts: float) -> int | None:
        """Send one batch; returns its sequence number, None for no events. `ts` is the wall clock in seconds.

        Never blocks, never raises for an event or a subscriber: see the counters.
        """
        if not events or self._closed:
            self._counts.lost_batches += bool(events)
            return None
        self._counts.events += len(events)
        return self._emit(stamped(events, self.options.epoch), ts)

    def publish_payload(self, events: Sequence[KVEvent], encoded: EncodedBatch, ts: float) -> int | None:
        """Send a batch that is encoded already, with this stream's epoch, rank and profile; else as `publish`."""
        if self._closed:
            self._counts.lost_batches += 1
            return None
        self._counts.events += len(events)
        return self._emit_payload(events, encoded, ts)

    def lose(self, count: int) -> None:
        """`count` batches were lost before they got here: leave a gap that consumers notice and replay."""
        assert count > 0, count
        self._counts.lost_batches += count
        self._history.lose(count)

    def tick(self, now: float) -> None:
        """Tell the time: sends a heartbeat (an empty batch) after a quiet while, gives up on stuck replays."""
        self._now = now
        self._history.tick(now)
        if self._quiet_since is None or now < self._quiet_since:
            self._quiet_since = now
        if now - self._quiet_since >= self.options.limits.heartbeat_seconds and not self._closed:
            self._counts.heartbeats += 1
            self._emit([], now)
        self._give_up_stuck(now)

    def _emit(self, events: Sequence[KVEvent], ts: float) -> int:
        encoded = encode_batch(ts, events, self.options.dp_rank, self.options.profile)
        return self._emit_payload(events, encoded, ts)

    def _emit_payload(self, events: Sequence[KVEvent], encoded: EncodedBatch, ts: float) -> int:
        self._counts.refused_events += encoded.refused
        self._quiet_since = self._now = ts
        seq = self._history.append(events, encoded.payload)
        self._send([self._topic, seq.to_bytes(8, "big"), encoded.payload])
        return seq

    def _send(self, frames: list[bytes]) -> None:
        socket = self._pub.socket
        try:
            try:
                socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                # Somebody's queue is full. It alone loses the batch: the others get it in the second try.
                self._counts.fell_behind += 1
                socket.setsockopt(_XPUB_NODROP, 0)
                socket.send_multipart(frames, zmq.NOBLOCK)
                socket.setsockopt(_XPUB_NODROP, 1)
        except zmq.ZMQError:
            self._counts.send_errors += 1

    # --- replay ------------------------------------------------------------------------------------------

    def poll_replay(self) -> bool:
        """Take requests and send answers, a bounded number of each. True: call again soon, there is more."""
        more = self._owns and self._sockets.poll_gate()
        if self._router is None or self._closed:
            return more
        more = self._take_requests(self._router.socket) or more
        self.answering = bool(self._jobs)
        budget = self.options.limits.replay_slice
        for identity in list(self._jobs):
            sent = self._advance(self._router.socket, identity, budget)
            budget -= sent
            if budget <= 0:
                return True
        return more

    def _take_requests(self, router: zmq.Socket[bytes]) -> bool:
        for _ in range(self.options.limits.replay_slice):
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._request(frames)
        return True

    def _request(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
            self._counts.replay_garbage += 1
            return
        identity, start = frames[0], int.from_bytes(frames[2], "big")
        # A second request on a connection replaces the first: one consumer can't pile up work.
        self._jobs.pop(identity, None)
        if len(self._jobs) >= self.options.limits.replay_clients:
            self._counts.replays_refused += 1
            return
        self._counts.replays += 1
        self._jobs[identity] = _Replay(self._answer(start))

    def _answer(self, start: int) -> Iterator[Batch | None]:
        if start != SNAPSHOT_REQUEST:
            return self._history.replay(start, self._now, self.options.epoch)
        if self._history.ring.next == 0:
            self._emit([], self._now)  # a snapshot is true at a number: there has to be one
        return self._history.present(self._now, self.options.epoch)

    def _advance(self, router: zmq.Socket[bytes], identity: bytes, budget: int) -> int:
        """Send up to `budget` messages of one replay; returns how many (a slice of preparation counts too)."""
        job = self._jobs[identity]
        for used in range(budget):
            if job.ready is None and not self._make_ready(job):
                break
            assert job.ready is not None
            try:
                router.send_multipart([identity, b"", *job.ready], zmq.NOBLOCK)
            except zmq.Again:
                job.since = self._now if job.since is None else job.since
                return used
            except zmq.ZMQError:
                # The consumer has gone.
                self._drop(identity)
                return used
            job.ready, job.since = None, None
            if job.finished:
                del self._jobs[identity]
                return used + 1
        # The others get their turn first next time.
        self._jobs.move_to_end(identity)
        return budget

    def _make_ready(self, job: _Replay) -> bool:
        """Put the next message at hand. False: it takes some more work first."""
        batch = next(job.batches, _NO_MORE)
        if batch is None:
            return False
        if batch is _NO_MORE:
            job.finished = True
            job.ready = [b"", END, b""]
        else:
            job.ready = [self._topic, batch.seq.to_bytes(8, "big"), batch.payload]
        return True

    def _give_up_stuck(self, now: float) -> None:
        patience = self.options.limits.replay_seconds
        for identity, job in list(self._jobs.items()):
            if job.since is not None and now - job.since > patience:
                self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        self._counts.replays_given_up += 1
        del self._jobs[identity]

    # --- the rest ----------------------------------------------------------------------------------------

    def stats(self) -> PublisherStats:
        """Counters and gauges."""
        ring = self._history.ring
        counts = {name: getattr(self._counts, name) for name in _Counts.__slots__}
        return PublisherStats(
            next_seq=ring.next,
            ring_batches=len(ring),
            ring_bytes=ring.bytes,
            tombstones=len(self._history.tombstones),
            snapshot_bytes=self._history.snapshot_bytes,
            replays_active=len(self._jobs),
            compactions=self._history.compactions,
            snapshots=self._history.snapshots,
            denied=self._sockets.denied,
            **counts,
        )

    def close(self) -> None:
        """Close the sockets; may block for 200 ms while the last batches leave. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._jobs.clear()
        if self._owns:
            self._sockets.close()
            return
        for bound in (getattr(self, "_pub", None), getattr(self, "_router", None)):
            if bound is not None:
                self._sockets.release(bound)


def stamped(events: Sequence[KVEvent], epoch: str | None) -> list[KVEvent]:
    """The events, with `epoch` in those that name none."""
    return [
        event if epoch is None or getattr(event, "epoch", "") is not None
        else msgspec.structs.replace(event, epoch=epoch)
        for event in events
    ]  # fmt: skip


def _pub_options(limits: PublisherLimits) -> list[tuple[int, int]]:
    # NODROP makes a full queue visible; `_send` then drops for that subscriber alone.
    return [(int(zmq.SNDHWM), limits.send_queue), (_XPUB_NODROP, 1)]


def _router_options(limits: PublisherLimits) -> list[tuple[int, int]]:
    return [
        (int(zmq.ROUTER_MANDATORY), 1),
        (int(zmq.MAXMSGSIZE), _MAX_REQUEST_BYTES),
        (int(zmq.SNDHWM), limits.replay_slice),
        (int(zmq.RCVHWM), limits.replay_slice),
    ]
