"""A consumer of one stream: live batches in order, gaps filled by replay, restarts noticed.

                       expected = last + 1
    seq == expected    deliver
    seq >  expected    a gap: ask the replay socket from `expected`, deliver that, then this one
    seq <= last        live numbers only ever grow, so: a duplicate of what a replay brought already, or, if
                       the number isn't above the last *live* one, a publisher that started again
    another epoch      a publisher that started again

After a restart nothing that was known of the stream holds: the first batch after it says so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import zmq

from forebay.events.codec import DecodedBatch, decode_batch
from forebay.events.errors import EventDecodeError, ReplayFailed
from forebay.events.publisher import END
from forebay.events.schema import SNAPSHOT, KVEvent
from forebay.events.sockets import CurveClient

_MAX_MESSAGE_BYTES = 256 << 20
_RECEIVE_QUEUE = 10_000

Restart: TypeAlias = Literal["sequence", "epoch"]


@dataclass(frozen=True, slots=True)
class Received:
    """One batch, as delivered.

    `missed` counts the batches before it that no replay could bring (its state is then incomplete unless
    `compacted`). `restart` says that the publisher started again, and how that was seen: forget all that came
    before, then apply the batch.
    """

    topic: str
    seq: int
    batch: DecodedBatch
    replayed: bool = False
    compacted: bool = False
    missed: int = 0
    restart: Restart | None = None


@dataclass(slots=True)
class SubscriberCounters:
    """What happened so far. `malformed` are messages that were no batch at all."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    missed: int = 0
    replays: int = 0
    failed_replays: int = 0
    restarts: int = 0
    malformed: int = 0
    undecodable_events: int = 0


class EventSubscriber:
    """Connects to a publisher. Blocking calls with timeouts; one thread.

    With `from_start` and a `replay` endpoint it begins with what the publisher remembers instead of with the
    next live batch. Without a replay endpoint gaps are reported, not filled.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        from_start: bool = False,
        replay_timeout: float = 5.0,
        curve: CurveClient | None = None,
    ) -> None:
        self.counters = SubscriberCounters()
        self._replay_endpoint, self._replay_timeout, self._curve = replay, replay_timeout, curve
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._sub = self._connect(zmq.SUB, endpoint)
        self._sub.subscribe(self._topic)
        self._ready: deque[Received] = deque()
        self._last = -1
        self._last_live = -1
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
        deadline = time.monotonic() + timeout
        if self._from_start and not self._started:
            self._started = True
            self._fill(0)
        while not self._ready:
            left = deadline - time.monotonic()
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
        topic, seq, batch = message
        restart = self._restarted(seq, batch)
        self._last_live = seq
        if restart is not None:
            self._forget(restart)
            if seq > self._last:
                self._deliver(topic, seq, batch)
            return
        expected = self._last + 1
        if self._started and seq < expected:
            self.counters.duplicates += 1
            return
        if self._started and seq > expected:
            self.counters.gaps += 1
            self._fill(expected)
            if seq <= self._last:
                # The replay brought this one too.
                return
        self._deliver(topic, seq, batch)

    def _restarted(self, seq: int, batch: DecodedBatch) -> Restart | None:
        if seq <= self._last_live:
            return "sequence"
        return "epoch" if self._is_other_epoch(batch) else None

    def _is_other_epoch(self, batch: DecodedBatch) -> bool:
        return None not in (batch.epoch, self._epoch) and batch.epoch != self._epoch

    def _forget(self, restart: Restart) -> None:
        """The publisher started again: begin with what it remembers."""
        self.counters.restarts += 1
        self._restart = restart
        self._last, self._epoch, self._started = -1, None, True
        self._fill(0)

    def _deliver(
        self, topic: str, seq: int, batch: DecodedBatch, replayed: bool = False, compacted: bool = False
    ) -> None:
        missed = seq - self._last - 1 if self._started and not compacted else 0
        self._started = True
        self._last = seq
        self._epoch = batch.epoch or self._epoch
        self.counters.batches += 1
        self.counters.missed += missed
        self.counters.undecodable_events += batch.undecodable
        self._ready.append(Received(topic, seq, batch, replayed, compacted, missed, self._restart))
        self._restart = None

    def _parse(self, frames: list[bytes]) -> tuple[str, int, DecodedBatch] | None:
        if len(frames) == 3 and len(frames[1]) == 8:
            try:
                topic = frames[0].decode(errors="replace")
                return topic, int.from_bytes(frames[1], "big"), decode_batch(frames[2])
            except EventDecodeError:
                pass
        self.counters.malformed += 1
        return None

    # --- replay ------------------------------------------------------------------------------------------

    def _fill(self, start: int) -> None:
        """Deliver what a replay from `start` brings, if there is a replay endpoint and it answers."""
        if self._replay_endpoint is None:
            return
        self.counters.replays += 1
        try:
            for frames in self._replay(self._replay_endpoint, start):
                message = self._parse(frames)
                if message is None or message[1] <= self._last or not frames[0].startswith(self._topic):
                    continue
                topic, seq, batch = message
                if self._is_other_epoch(batch):
                    # It started again and has come further than we were: the gap was no gap.
                    return self._forget("epoch")
                self._deliver(topic, seq, batch, replayed=True, compacted=_is_compacted(batch.events))
        except ReplayFailed:
            self.counters.failed_replays += 1

    def _replay(self, endpoint: str, start: int) -> Iterator[list[bytes]]:
        """Answers to one request. A socket of its own, so that no late answer to an older one gets in."""
        dealer = self._connect(zmq.DEALER, endpoint)
        try:
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while dealer.poll(int(self._replay_timeout * 1000)):
                frames = dealer.recv_multipart()
                if len(frames) != 4 or frames[0] != b"":
                    raise ReplayFailed(f"{endpoint} doesn't speak the replay protocol")
                if frames[2] == END:
                    return
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


def _is_compacted(events: tuple[KVEvent, ...]) -> bool:
    """Whether the batch tells the present state rather than what happened."""
    return any(event.reason == SNAPSHOT for event in events)
