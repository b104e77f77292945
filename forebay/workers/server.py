"""The worker's door: a unix socket where front ends ask for generations and hear their outputs.

Runs on the main thread's event loop, beside the engine's thread, so that a long step delays no heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from forebay.errors import ProtocolError
from forebay.ipc.framing import FrameBuffer
from forebay.ipc.sockets import peer_of
from forebay.workers.generation import RequestKey
from forebay.workers.messages import CancelRequest, Disconnected, Submit
from forebay.workers.outbox import Batch
from forebay.workers.protocol import (
    BUSY,
    FROM_WORKER,
    LEAVING,
    TO_WORKER,
    Alive,
    Cancel,
    Describe,
    Description,
    Drain,
    Finished,
    FromWorker,
    Generate,
    GetWorkerStats,
    Leave,
    ToWorker,
    WorkerStats,
)

HEARTBEAT_S = 0.25
CONNECTIONS_MAX = 64
UNSENT_BYTES_MAX = 64 << 20
"""A front end that leaves this much unread is taken for dead, and its requests are cancelled."""

log = logging.getLogger(__name__)

Told = Submit | CancelRequest | Disconnected


@dataclass(frozen=True, slots=True)
class Answers:
    """Where the server gets what it says of the worker, and what it can do to it. All are quick and callable from its
    loop. `stalled_seconds` is asked at every heartbeat."""

    boot: str
    describe: Callable[[], Description]
    stats: Callable[[], WorkerStats]
    step_seconds: Callable[[], float]
    stalled_seconds: Callable[[], float]
    overloaded: Callable[[], bool]
    leave: Callable[[], None]


class WorkerServer:
    """Connections of front ends. `tell` hands what they ask to the engine. While `draining`, it takes no new requests;
    those that run go on until their front ends move them."""

    def __init__(self, tell: Callable[[Told], None], answers: Answers) -> None:
        self.answers = answers
        self.draining = False
        self.tell = tell
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, _Connection] = {}
        self._opened = 0
        self._server: asyncio.Server | None = None
        self._heart: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections on `listener`, which must be listening."""
        self._server = await self._loop.create_unix_server(lambda: _Connection(self), sock=listener)
        self._heart = self._loop.create_task(self._beat())

    def send(self, batch: Batch) -> None:
        """Send the engine's outputs. Callable from any thread."""
        self._loop.call_soon_threadsafe(self._deliver, batch)

    def stop_accepting(self) -> None:
        """No new connections; those that are open stay."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """End all connections."""
        self.stop_accepting()
        if self._heart is not None:
            self._heart.cancel()
        for connection in list(self._connections.values()):
            connection.abort()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def admit(self, connection: _Connection) -> int | None:
        """A number for a new connection; None if there are too many."""
        if len(self._connections) >= CONNECTIONS_MAX:
            return None
        self._opened += 1
        self._connections[self._opened] = connection
        return self._opened

    def gone(self, number: int) -> None:
        """A connection has ended."""
        if self._connections.pop(number, None) is not None:
            self.tell(Disconnected(number))

    def _deliver(self, batch: Batch) -> None:
        for number, messages in batch.items():
            connection = self._connections.get(number)
            if connection is not None:
                connection.send(messages)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._say_alive()

    def _say_alive(self) -> None:
        answers = self.answers
        alive = Alive(
            boot=answers.boot, step_s=answers.step_seconds(), stalled_s=answers.stalled_seconds(),
            draining=self.draining,
        )  # fmt: skip
        for connection in list(self._connections.values()):
            connection.send([alive])

    def drain(self, on: bool) -> None:
        """Take no new requests, or take them again; front ends are told."""
        log.info("draining: no new requests are taken" if on else "requests are taken again")
        self.draining = on
        self._say_alive()


class _Connection(asyncio.Protocol):
    """One front end."""

    def __init__(self, server: WorkerServer) -> None:
        self._server = server
        self._number: int | None = None
        self._buffer: FrameBuffer[ToWorker] = FrameBuffer(TO_WORKER)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = peer_of(transport.get_extra_info("socket"))
        if peer.uid != os.geteuid():
            log.warning("refused a connection from user id %d (process %d): not ours", peer.uid, peer.pid)
            transport.abort()
            return
        self._number = self._server.admit(self)
        if self._number is None:
            log.warning("refused a connection: %d are open already", CONNECTIONS_MAX)
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._number is None:
            return
        try:
            for message in self._buffer.feed(data):
                self._answer(self._number, message)
        except ProtocolError as error:
            log.warning("closed a connection: %s", error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._number is not None:
            self._server.gone(self._number)
            self._number = None

    def send(self, messages: list[FromWorker]) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(b"".join(map(FROM_WORKER.encode, messages)))
        if self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            log.warning("closed a connection: its front end has stopped reading")
            self.abort()

    def abort(self) -> None:
        self._transport.abort()

    def _answer(self, number: int, message: ToWorker) -> None:
        match message:
            case Generate() if self._server.answers.overloaded():
                # The engine is in a step and can't say so itself; what it has not read yet is bounded too.
                self.send([Finished(id=message.id, attempt=message.attempt, reason="error", error=BUSY)])
            case Generate() if self._server.draining:
                self.send([Finished(id=message.id, attempt=message.attempt, reason="error", error=LEAVING)])
            case Generate():
                self._server.tell(Submit(RequestKey(number, message.id, message.attempt), message))
            case Cancel():
                self._server.tell(CancelRequest(RequestKey(number, message.id, message.attempt), message.move))
            case Drain():
                self._server.drain(message.on)
            case Leave():
                self._server.answers.leave()
            case Describe():
                self.send([msgspec.structs.replace(self._server.answers.describe(), draining=self._server.draining)])
            case GetWorkerStats():
                self.send([self._server.answers.stats()])
