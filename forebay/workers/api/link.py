"""The front end's connection to one worker, across the deaths of that worker. It knows no calls: see `fleet.py`.

    connected --- connection lost, or nothing heard for SILENCE_S ---> tries again, for ever
        |  ^                                                                |
        |  +----------------------- says what it is ------------------------+
        +--- says that its engine's thread stands still: `stalled`; that it drains: `draining`

A long step is no hang: heartbeats come from beside the engine, and tell whether its thread gets on.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from forebay.errors import ProtocolError
from forebay.ipc.framing import FrameBuffer
from forebay.workers.api.calls import Call
from forebay.workers.protocol import (
    FROM_WORKER,
    TO_WORKER,
    WORKER_PROTOCOL_VERSION,
    Alive,
    Describe,
    Description,
    FromWorker,
    GetWorkerStats,
    WorkerStats,
)

log = logging.getLogger(__name__)

SILENCE_S = 1.25
"""Heartbeats come four times a second: so long without one, and the worker has stopped."""
STALL_S = 1.25
"""So long without progress (see `pulse.py`), and its engine's thread has stopped."""
STEP_S_MAX = 300.0
"""No step of a sane batch takes this long, whatever processor time it uses."""
LOOK_S = 0.1
STOOD_STILL_S = 0.6
DESCRIBE_S = 30.0
"""A worker that loads its model has bound its socket already, but doesn't answer yet."""
RETRY_S = (0.02, 0.05, 0.1, 0.2)
READ_BYTES = 1 << 18


class Role(Enum):
    """What a worker is for. A prefill worker computes long prompts, which others decode; it can do all else too."""

    DECODE = "decode"
    PREFILL = "prefill"


class Hears(Protocol):
    """Whom a link tells. All are called on its loop and must be quick."""

    def met(self, link: WorkerLink, description: Description) -> None:
        """It is connected, and this is what it is."""
        ...

    def lost(self, link: WorkerLink) -> None:
        """It was connected and is no longer."""
        ...

    def changed(self, link: WorkerLink) -> None:
        """`stalled` or `draining` has changed."""
        ...

    def heard(self, link: WorkerLink, message: FromWorker) -> None:
        """It said something of a call. Raises ProtocolError if that can't be."""
        ...


@dataclass
class LinkCounters:
    """What happened to one connection so far. `hangs` were silent, `stalls` beat but stood still."""

    connects: int = 0
    losses: int = 0
    hangs: int = 0
    stalls: int = 0


@dataclass(eq=False)
class WorkerLink:
    """One worker. Lives on the front end's loop. `calls` are those that it has, kept by whom it tells. A `misfit`
    serves another model."""

    path: Path
    hears: Hears
    role: Role = Role.DECODE
    calls: dict[str, Call] = field(default_factory=dict)
    description: Description | None = None
    counters: LinkCounters = field(default_factory=LinkCounters)
    last_stats: WorkerStats | None = None
    stalled: bool = False
    draining: bool = False
    misfit: bool = False
    _writer: asyncio.StreamWriter | None = None
    _described: bool = False
    _heard: float = 0.0
    _stats: list[asyncio.Future[WorkerStats | None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its socket's name, for people and metrics."""
        return self.path.stem

    @property
    def connected(self) -> bool:
        return self._writer is not None and self._described

    @property
    def able(self) -> bool:
        """May it get new calls?"""
        return self.connected and not (self.stalled or self.draining or self.misfit)

    @property
    def state(self) -> str:
        """One word on how it is."""
        if not self.connected:
            return "gone"
        return "stalled" if self.stalled else "draining" if self.draining else "misfit" if self.misfit else "ok"

    async def run(self) -> None:
        """Keep a connection, for ever."""
        failures = 0
        while True:
            try:
                await self._converse()
                failures = 0
            except (OSError, ProtocolError, TimeoutError, asyncio.IncompleteReadError) as error:
                failures += 1
                if not isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
                    log.warning("the worker on %s: %s", self.path, error or type(error).__name__)
            except Exception:  # a bug of ours; the other workers go on, and this one is met again
                failures += 1
                log.exception("the connection to the worker on %s failed in a way it should not", self.path)
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])

    async def _converse(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(str(self.path), limit=READ_BYTES)
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        watch = asyncio.create_task(self._watch())
        try:
            self.send(Describe())
            buffer: FrameBuffer[FromWorker] = FrameBuffer(FROM_WORKER)
            while data := await reader.read(READ_BYTES):
                self._heard = loop.time()
                for message in buffer.feed(data):
                    self._take(message)
        finally:
            watch.cancel()
            self._lost()

    async def _watch(self) -> None:
        """Cut a connection on which nothing is heard: the worker has stopped, or never said what it is."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(LOOK_S)
            if loop.time() - before > STOOD_STILL_S:
                # We stood still ourselves, with the worker's heartbeats unread: that says nothing about it.
                self._heard = loop.time()
            patience = SILENCE_S if self._described else DESCRIBE_S
            if loop.time() - self._heard > patience and self._writer is not None:
                if self._described:
                    self.counters.hangs += 1
                    log.warning("the worker on %s has been silent for %.1f s", self.path, loop.time() - self._heard)
                self._writer.transport.abort()
                return

    def _lost(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = None
        described, self._described = self._described, False
        self.stalled = self.draining = self.misfit = False
        self._answer_stats(None)
        if described:
            self.counters.losses += 1
            self.hears.lost(self)

    def _take(self, message: FromWorker) -> None:
        match message:
            case Description():
                self._met(message)
            case WorkerStats():
                self.last_stats = message
                self._answer_stats(message)
            case Alive():
                self._alive(message)
            case _:
                self.hears.heard(self, message)

    def _met(self, description: Description) -> None:
        if description.version != WORKER_PROTOCOL_VERSION:
            raise ProtocolError(
                f"the worker speaks version {description.version}, this front end {WORKER_PROTOCOL_VERSION}"
            )
        self.description = description
        if self._described:
            return
        self._described, self.draining = True, description.draining
        self.counters.connects += 1
        self.hears.met(self, description)

    def _alive(self, alive: Alive) -> None:
        if not self._described or self.description is None:
            return
        if alive.boot != self.description.boot:
            raise ProtocolError("another worker answers on this socket")
        before = self.stalled, self.draining
        self.stalled = alive.stalled_s > STALL_S or alive.step_s > STEP_S_MAX
        self.draining = alive.draining
        if self.stalled and not before[0]:
            self.counters.stalls += 1
            log.warning("the worker on %s has stood still for %.1f s", self.path, max(alive.stalled_s, alive.step_s))
        if (self.stalled, self.draining) != before:
            self.hears.changed(self)

    async def stats(self, timeout_s: float = 1.0) -> WorkerStats | None:
        """The worker's present figures; the last known ones if it doesn't answer in time."""
        if not self.connected:
            return self.last_stats
        waiting: asyncio.Future[WorkerStats | None] = asyncio.get_running_loop().create_future()
        self._stats.append(waiting)
        self.send(GetWorkerStats())
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
            self.send(Describe())

    def send(self, message: object) -> None:
        """Say something to a worker that is connected. To one whose end nobody has been told of yet nothing is said:
        uvloop refuses it, and whoever waits for an answer hears of the loss in a moment."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(TO_WORKER.encode(message))
