"""A consumer of one stream: live batches in order, gaps filled by replay, restarts noticed.

                       expected = last + 1
    seq == expected    deliver
    seq >  expected    a gap: ask the replay socket from `expected`, deliver that, then this one; if it hasn't all of
                       it, ask for a snapshot: forget, deliver the state and what came after it
    seq <= last        live numbers only ever grow, so: a duplicate of what a replay brought already, or, if
                       the number isn't above the last *live* one, a publisher that started again
    another epoch      a publisher that started again
    a new connection   perhaps a publisher that started again and says nothing but heartbeats, which name no
                       epoch: ask it for the last batch that we have; if it has another one there, it did

After a restart nothing that was known of the stream holds: the first batch after it says so. A replay socket that
didn't answer isn't asked again for `retry_seconds`; the next live batch after that asks for a snapshot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeAlias

import zmq

from forebay.events.codec import DecodedBatch, decode_batch
from forebay.events.errors import EventDecodeError, ReplayFailed
from forebay.events.publisher import END, SNAPSHOT_REQUEST
from forebay.events.schema import SNAPSHOT
from forebay.events.sockets import CurveClient, check_remote

_MAX_MESSAGE_BYTES = 256 << 20
_RECEIVE_QUEUE = 10_000

Restart: TypeAlias = Literal["sequence", "epoch", "history", "snapshot"]


@dataclass(frozen=True, slots=True)
class Received:
    """One batch, as delivered.

    `missed` counts the batches before it that no replay could bring (its state is then incomplete unless
    `compacted`). `restart` says to forget all that came before and then apply the batch: the publisher started
    again (seen by its sequence, epoch or history), or a snapshot stands for what was missed. The parts of a
    snapshot are batches with one number.
    """

    topic: str
    seq: int
    batch: DecodedBatch
    replayed: bool = False
    compacted: bool = False
    missed: int = 0
    restart: Restart | None = None


class _Message(NamedTuple):
    topic: str
    seq: int
    payload: bytes
    batch: DecodedBatch


@dataclass(slots=True)
class SubscriberCounters:
    """What happened so far. `malformed` are messages that were no batch at all."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    missed: int = 0
    replays: int = 0
    failed_replays: int = 0
    snapshots: int = 0
    restarts: int = 0
    malformed: int = 0
    undecodable_events: int = 0


class EventSubscriber:
    """Connects to a publisher. Blocking calls with timeouts; one thread.

    With `from_start` and a `replay` endpoint it begins with a snapshot, or what else the publisher remembers,
    instead of with the next live batch. Without a replay endpoint gaps are reported, not filled. One answer of a
    replay socket is taken up to `replay_bytes`: beyond, it has failed. Raises EndpointRefused for what is no endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        from_start: bool = False,
        replay_timeout: float = 5.0,
        replay_bytes: int = 1 << 30,
        retry_seconds: float = 10.0,
        curve: CurveClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for wanted in (endpoint, replay):
            if wanted is not None:
                check_remote(wanted)
        self.counters = SubscriberCounters()
        self.endpoint = endpoint
        self._replay_endpoint, self._replay_timeout, self._curve = replay, replay_timeout, curve
        self._replay_bytes, self._retry_seconds, self._clock = replay_bytes, retry_seconds, clock
        self._owed = False
        self._retry_at = float("-inf")
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._sub = self._connect(zmq.SUB, endpoint)
        self._sub.subscribe(self._topic)
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._ready: deque[Received] = deque()
        self._last = -1
        self._last_live = -1
        self._last_payload: bytes | None = b""
        self._doubt = False
        self._started = False
        self._epoch: str | None = None
        self._restart: Restart | None = None
        self._from_start = from_start

    @property
    def last_seq(self) -> int:
        """Sequence number of the last batch that was delivered or queued; -1 for none."""
        return self._last

    @property
    def epoch(self) -> str | None:
        """The publisher's boot id, once an event has named it."""
        return self._epoch

    def receive(self, timeout: float) -> Received | None:
        """The next batch, None if there is none within `timeout` seconds (a replay has its own timeout)."""
        deadline = self._clock() + timeout
        if self._from_start and not self._started:
            self._started = True
            self._begin()
        while not self._ready:
            left = deadline - self._clock()
            if not self._sub.poll(max(0, int(left * 1000))):
                return None
            self._take(self._sub.recv_multipart())
        return self._ready.popleft()

    def drain(self, quiet: float) -> Iterator[Received]:
        """Batches until none comes for `quiet` seconds."""
        while (received := self.receive(quiet)) is not None:
            yield received

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        if not self._sub.closed:
            self._sub.disable_monitor()
            self._monitor.close(0)
            self._monitor.close(0)
            self._sub.close(0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- live --------------------------------------------------------------------------------------------

    def _take(self, frames: list[bytes]) -> None:
        message = self._parse(frames)
        if message is None:
            return
        restart = self._restarted(message)
        self._last_live = message.seq
        if restart is not None:
            self._forget(restart)
        expected = self._last + 1
        if self._started and message.seq > expected and restart is None:
            self.counters.gaps += 1
            self._fill(expected)
        if self._started and message.seq <= self._last:
            # A replay brought this one already.
            self.counters.duplicates += 1
        else:
            self._deliver(message)
        if self._owed and self._replay_endpoint is not None and self._clock() >= self._retry_at:
            self._repair(self._replay_endpoint)

    def _restarted(self, message: _Message) -> Restart | None:
        if message.seq <= self._last_live:
            return "sequence"
        if self._is_other_epoch(message.batch):
            return "epoch"
        return "history" if self._is_other_history() else None

    def _is_other_history(self) -> bool:
        """After a new connection: whether the publisher has something else where we have our last batch."""
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._doubt = self._started and self._last >= 0
        endpoint = self._may_ask() if self._doubt else None
        if endpoint is None:
            return False
        try:
            answers = list(self._replay(endpoint, self._last))
        except ReplayFailed:
            self._failed()
            return False
        self._doubt = False
        return not answers or not self._is_our_last(answers[0])

    def _is_our_last(self, answer: list[bytes]) -> bool:
        if answer[1] != self._last.to_bytes(8, "big"):
            return False
        if self._last_payload is not None:
            return answer[2] == self._last_payload
        message = self._parse(answer)  # ours was made from a state: the batch itself we never saw
        return message is not None and not self._is_other_epoch(message.batch)

    def _is_other_epoch(self, batch: DecodedBatch) -> bool:
        return None not in (batch.epoch, self._epoch) and batch.epoch != self._epoch

    def _forget(self, restart: Restart) -> None:
        """The publisher started again: begin with what it remembers."""
        self.counters.restarts += 1
        self._restart = restart
        self._last, self._epoch, self._started = -1, None, True
        self._begin()

    def _deliver(self, message: _Message, *, replayed: bool = False, snapshot: bool = False) -> None:
        batch = message.batch
        compacted = snapshot or (replayed and _is_compacted(message))
        missed = message.seq - self._last - 1 if self._started and not compacted else 0
        self._started = True
        self._last, self._last_payload = message.seq, None if compacted else message.payload
        self._epoch = batch.epoch or self._epoch
        self.counters.batches += 1
        self.counters.missed += missed
        self.counters.undecodable_events += batch.undecodable
        self._ready.append(Received(message.topic, message.seq, batch, replayed, compacted, missed, self._restart))
        self._restart = None

    def _parse(self, frames: list[bytes]) -> _Message | None:
        if len(frames) == 3 and len(frames[1]) == 8:
            try:
                batch = decode_batch(frames[2])
            except EventDecodeError:
                batch = None
            if batch is not None:
                topic = frames[0].decode(errors="replace")
                return _Message(topic, int.from_bytes(frames[1], "big"), frames[2], batch)
        self.counters.malformed += 1
        return None

    # --- replay ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Nothing is known: a snapshot, else all that the publisher still has."""
        endpoint = self._may_ask()
        if endpoint is None:
            return
        try:
            if not self._take_snapshot(endpoint, self._restart):
                self._take_replay(endpoint, 0, or_snapshot=False)
        except ReplayFailed:
            self._failed()

    def _fill(self, start: int) -> None:
        """Deliver what a replay from `start` brings, or a snapshot, if there is a replay endpoint and it answers."""
        endpoint = self._may_ask()
        if endpoint is None:
            return
        try:
            self._take_replay(endpoint, start, or_snapshot=True)
        except ReplayFailed:
            self._failed()

    def _repair(self, endpoint: str) -> None:
        """Something is missing since a replay failed: ask for a snapshot. A publisher without any leaves the hole."""
        try:
            self._take_snapshot(endpoint, "snapshot")
            self._owed = False
        except ReplayFailed:
            self._failed()

    def _may_ask(self) -> str | None:
        """The replay endpoint, unless it has just failed: then it is owed."""
        if self._replay_endpoint is not None and self._clock() < self._retry_at:
            self._owed = True
            return None
        return self._replay_endpoint

    def _failed(self) -> None:
        self.counters.failed_replays += 1
        self._owed, self._retry_at = True, self._clock() + self._retry_seconds

    def _take_replay(self, endpoint: str, start: int, *, or_snapshot: bool) -> None:
        self.counters.replays += 1
        with closing(self._replay(endpoint, start)) as answers:
            message = self._next_message(answers)
            hole = message is None or (message.seq > start and not _is_compacted(message))
            if hole and or_snapshot and self._take_snapshot(endpoint, self._restart or "snapshot"):
                return
            while message is not None:
                if self._is_other_epoch(message.batch):
                    # It started again and has come further than we were: the gap was no gap.
                    return self._forget("epoch")
                self._deliver(message, replayed=True)
                message = self._next_message(answers)

    def _take_snapshot(self, endpoint: str, restart: Restart | None) -> bool:
        """Ask for a snapshot and deliver it, with what came after it. False: the publisher gives none."""
        with closing(self._replay(endpoint, SNAPSHOT_REQUEST)) as answers:
            parts = [message for frames in answers if (message := self._parse(frames)) is not None]
        # Numbers that go back in an answer are a publisher's mistake: what has them is left out, and a gap found.
        parts = [part for at, part in enumerate(parts) if not at or part.seq >= parts[at - 1].seq]
        if not parts or not parts[0].topic.startswith(self._topic.decode()):
            return False
        self.counters.snapshots += 1
        self._owed = self._doubt = False
        if self._is_other_epoch(parts[0].batch):
            self.counters.restarts += 1
            restart = "epoch"
        self._restart, at = restart, parts[0].seq
        for message in parts:
            self._deliver(message, replayed=True, snapshot=message.seq == at)
        return True

    def _next_message(self, answers: Iterator[list[bytes]]) -> _Message | None:
        """The next of a replay's batches that is new to us."""
        for frames in answers:
            message = self._parse(frames)
            if message is not None and message.seq > self._last and frames[0].startswith(self._topic):
                return message
        return None

    def _replay(self, endpoint: str, start: int) -> Generator[list[bytes], None, None]:
        """Answers to one request. A socket of its own, so that no late answer to an older one gets in."""
        dealer = self._connect(zmq.DEALER, endpoint)
        try:
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            left = self._replay_bytes
            while dealer.poll(int(self._replay_timeout * 1000)):
                frames = dealer.recv_multipart()
                if len(frames) != 4 or frames[0] != b"":
                    raise ReplayFailed(f"{endpoint} doesn't speak the replay protocol")
                if frames[2] == END:
                    return
                left -= len(frames[3])
                if left < 0:
                    raise ReplayFailed(f"{endpoint} answers with more than {self._replay_bytes} bytes")
                yield frames[1:]
            raise ReplayFailed(f"{endpoint} didn't finish a replay from {start} in time")
        finally:
            dealer.close(0)

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        socket.ipv6 = "[" in endpoint
        if self._curve is not None:
            self._curve.apply(socket)
        socket.connect(endpoint)
        return socket


def _is_compacted(message: _Message) -> bool:
    return any(event.reason == SNAPSHOT for event in message.batch.events)
