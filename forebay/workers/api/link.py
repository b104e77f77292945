"""The front end's connection to its worker, across the deaths of that worker.

    connected --- connection lost, or no heartbeat for 2 s ---> waiting for a worker
        ^                                                             |
        +-- describe, resubmit every open call with what it emitted --+

A long step is no hang: heartbeats come from beside the engine. Calls that find no worker for `give_up_s` end.
A worker that is full turns new calls away; those that were under way already are offered again until it takes
them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import ProtocolError
from forebay.ipc.framing import FrameBuffer
from forebay.workers.api.calls import Call
from forebay.workers.api.errors import busy, unavailable
from forebay.workers.protocol import (
    FROM_WORKER,
    TO_WORKER,
    WORKER_PROTOCOL_VERSION,
    Alive,
    Cancel,
    Describe,
    Description,
    Finished,
    FinishReason,
    FromWorker,
    GetWorkerStats,
    Outputs,
    PromptScores,
    Sampling,
    Started,
    WorkerStats,
)

log = logging.getLogger(__name__)

SILENCE_S = 2.0
DESCRIBE_S = 30.0
"""A worker that loads its model has bound its socket already, but doesn't answer yet."""
RETRY_S = (0.02, 0.05, 0.1, 0.2)
READ_BYTES = 1 << 18
RETRY_AFTER_S = 1
OFFER_AGAIN_S = 0.2
BUSY = "busy"


@dataclass
class LinkCounters:
    """What happened so far."""

    connects: int = 0
    losses: int = 0
    hangs: int = 0
    resubmitted: int = 0
    refused: int = 0
    given_up: int = 0


@dataclass
class WorkerLink:
    """All calls of one front end and the worker that runs them. Lives on the front end's loop."""

    path: Path
    max_calls: int
    give_up_s: float = 120.0
    calls: dict[str, Call] = field(default_factory=dict)
    description: Description | None = None
    counters: LinkCounters = field(default_factory=LinkCounters)
    last_stats: WorkerStats | None = None
    _writer: asyncio.StreamWriter | None = None
    _described: asyncio.Event = field(default_factory=asyncio.Event)
    _heard: float = 0.0
    _alone_since: float = 0.0
    _stats: list[asyncio.Future[WorkerStats | None]] = field(default_factory=list)

    @property
    def connected(self) -> bool:
        return self._writer is not None and self._described.is_set()

    async def run(self) -> None:
        """Keep a connection, for ever."""
        loop = asyncio.get_running_loop()
        self._alone_since = loop.time()
        failures = 0
        while True:
            try:
                await self._converse()
                failures = 0
            except (OSError, ProtocolError, TimeoutError, asyncio.IncompleteReadError) as error:
                failures += 1
                if not isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
                    log.warning("the worker on %s: %s", self.path, error or type(error).__name__)
            self._give_up_if_late(loop.time())
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])

    async def _converse(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(str(self.path), limit=READ_BYTES)
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        watch = asyncio.create_task(self._watch())
        try:
            self._send(Describe())
            buffer: FrameBuffer[FromWorker] = FrameBuffer(FROM_WORKER)
            while data := await reader.read(READ_BYTES):
                self._heard = loop.time()
                for message in buffer.feed(data):
                    self._take(message)
        finally:
            watch.cancel()
            self._lost(loop.time())

    async def _watch(self) -> None:
        """Cut a connection on which nothing is heard: the worker hangs, or never said what it is."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(SILENCE_S / 8)
            if loop.time() - before > SILENCE_S / 2:
                # We stood still ourselves, with the worker's heartbeats unread: that says nothing about it.
                self._heard = loop.time()
            patience = SILENCE_S if self._described.is_set() else DESCRIBE_S
            if loop.time() - self._heard > patience and self._writer is not None:
                if self._described.is_set():
                    self.counters.hangs += 1
                    log.warning("the worker on %s has been silent for %.1f s", self.path, loop.time() - self._heard)
                self._writer.transport.abort()
                return

    def _lost(self, now: float) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = None
        if self._described.is_set():
            self.counters.losses += 1
            self._alone_since = now
        self._described.clear()
        self._answer_stats(None)

    def _give_up_if_late(self, now: float) -> None:
        if now - self._alone_since < self.give_up_s:
            return
        for call in list(self.calls.values()):
            self.counters.given_up += 1
            self._end(call, call.attempt, "error", f"no worker came back within {self.give_up_s:.0f} s")

    def _take(self, message: FromWorker) -> None:
        match message:
            case Outputs():
                for out in message.tokens:
                    if (call := self.calls.get(out.id)) is not None:
                        call.token(out)
            case Started():
                if (call := self.calls.get(message.id)) is not None:
                    call.began(message.attempt, message.cached)
            case PromptScores():
                if (call := self.calls.get(message.id)) is not None:
                    call.scored(message.attempt, message.start, message.scores)
            case Finished():
                self._finished(message)
            case Description():
                self._met(message)
            case WorkerStats():
                self.last_stats = message
                self._answer_stats(message)
            case Alive():
                if self.description is not None and self._described.is_set() and message.boot != self.description.boot:
                    raise ProtocolError("another worker answers on this socket")

    def _finished(self, message: Finished) -> None:
        call = self.calls.get(message.id)
        # A call that we cancel is forgotten at once: hearing it of another means that the worker is leaving,
        # and its successor goes on.
        if call is None or message.reason == "cancelled" or self._turned_away(call, message):
            return
        self._end(call, message.attempt, message.reason, message.error)

    def _met(self, description: Description) -> None:
        if description.version != WORKER_PROTOCOL_VERSION:
            raise ProtocolError(
                f"the worker speaks version {description.version}, this front end {WORKER_PROTOCOL_VERSION}"
            )
        before, self.description = self.description, description
        if self._described.is_set():
            return
        self._described.set()
        self.counters.connects += 1
        model = description.model, description.vocab_size
        for call in list(self.calls.values()):
            if before is not None and model != (before.model, before.vocab_size):
                self._end(call, call.attempt, "error", f"no worker of {before.model} is left: {model[0]} came instead")
            elif not call.held:
                self.counters.resubmitted += call.attempt > 0
                self._send(call.request())

    async def met(self, timeout_s: float) -> bool:
        """Wait until a worker has said what it is; False if none has in time."""
        try:
            await asyncio.wait_for(self._described.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # --- calls -----------------------------------------------------------------------------------------

    def start(
        self, prompt: bytes, sampling: Sampling, salt: bytes, tenant: str, *,
        name: str = "", held: bool = False, retain_s: float = 0.0, settled: bool = False,
        emitted: Sequence[int] = (), priority: int = 0,
    ) -> Call:  # fmt: skip
        """Begin a generation. Raises ApiError 503 if there never was a worker, 429 at the cap.

        A `held` one has its place, but is sent only by `release`. For `settled` see `Generate`. `emitted` are tokens
        that it goes on from. Its id begins with `name`, by which logs know it.
        """
        if self.description is None:
            raise unavailable("no worker is ready yet; try again in a moment")
        if len(self.calls) >= self.max_calls:
            self.counters.refused += 1
            raise busy(f"{len(self.calls)} generations are under way already; try again later", RETRY_AFTER_S)
        # A name may be the client's and come twice: what is told of one must never be taken for the other's.
        unique = f"{name}.{secrets.token_hex(6)}" if name else secrets.token_hex(12)
        call = Call(unique, prompt, sampling, salt, tenant, held, retain_s, settled, priority)
        if emitted:
            call.emitted.extend(emitted)
            call.begun.set()
        self.calls[call.id] = call
        self._offer(call)
        return call

    def release(self, call: Call) -> None:
        """Send a held call."""
        if call.held:
            call.held = False
            self._offer(call)

    def stop(self, call: Call) -> None:
        """The client has gone, or has all that it wants (a stop string). Idempotent."""
        if self.calls.pop(call.id, None) is not None:
            call.ended = True
            if self.connected and call.attempt:
                self._send(Cancel(id=call.id, attempt=call.attempt))

    def end_all(self, why: str) -> None:
        """End every call; their clients are told why."""
        for call in list(self.calls.values()):
            if self.connected and call.attempt:
                self._send(Cancel(id=call.id, attempt=call.attempt))
            self._end(call, call.attempt, "cancelled", why)

    def _offer(self, call: Call) -> None:
        if self.connected and not call.held and call.id in self.calls:
            self._send(call.request())

    def _turned_away(self, call: Call, message: Finished) -> bool:
        """Was a call that had found a worker before turned away by a full one? Then it is offered again."""
        if message.error != BUSY or message.attempt != call.attempt or call.ended:
            return False
        if call.attempt == 1 and not call.emitted:
            return False
        loop = asyncio.get_running_loop()
        call.turned_away_at = call.turned_away_at or loop.time()
        if loop.time() - call.turned_away_at > self.give_up_s:
            return False
        call.attempt += 1  # what the worker still says of this attempt is of no interest
        loop.call_later(OFFER_AGAIN_S, self._offer, call)
        return True

    def _end(self, call: Call, attempt: int, reason: FinishReason, error: str = "") -> None:
        if call.end(attempt, reason, error):
            self.calls.pop(call.id, None)

    async def stats(self, timeout_s: float = 1.0) -> WorkerStats | None:
        """The worker's present figures; the last known ones if it doesn't answer in time."""
        if not self.connected:
            return self.last_stats
        waiting: asyncio.Future[WorkerStats | None] = asyncio.get_running_loop().create_future()
        self._stats.append(waiting)
        self._send(GetWorkerStats())
        try:
            return await asyncio.wait_for(waiting, timeout_s) or self.last_stats
        except TimeoutError:
            return self.last_stats

    def _answer_stats(self, stats: WorkerStats | None) -> None:
        for waiting in self._stats:
            if not waiting.done():
                waiting.set_result(stats)
        self._stats.clear()

    def refresh(self) -> None:
        """Ask for a new description: the worker's view of its store changes."""
        if self.connected:
            self._send(Describe())

    def _send(self, message: object) -> None:
        assert self._writer is not None
        self._writer.write(TO_WORKER.encode(message))
