"""A blocking conversation with one worker, for commands: what it is, how it is, and that it is to drain or to end."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from forebay.errors import ForebayError, ProtocolError
from forebay.ipc.framing import FrameBuffer
from forebay.ipc.sockets import socket_path
from forebay.workers.protocol import (
    FROM_WORKER,
    TO_WORKER,
    WORKER_PROTOCOL_VERSION,
    Describe,
    Description,
    Drain,
    FromWorker,
    GetWorkerStats,
    Leave,
    WorkerStats,
)

ANSWER_S = 5.0
READ_BYTES = 1 << 16
REQUESTS = ("running", "loading", "waiting", "compiling", "settling")
M = TypeVar("M", Description, WorkerStats)


class WorkerUnavailable(ForebayError):
    """Nobody answers on the worker's socket."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Left:
    """What a worker still has to do: requests of clients, and chunks that its store doesn't have yet."""

    requests: int
    chunks: int
    bytes: int

    @property
    def nothing(self) -> bool:
        return self == Left(0, 0, 0)


class WorkerControl:
    """Use it as a context. Every call raises WorkerUnavailable if the worker is gone or says nothing in time."""

    def __init__(self, address: str) -> None:
        self.path = socket_path(address)
        self._buffer: FrameBuffer[FromWorker] = FrameBuffer(FROM_WORKER)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(ANSWER_S)

    def __enter__(self) -> WorkerControl:
        try:
            self._socket.connect(str(self.path))
        except OSError as error:
            self._socket.close()
            raise WorkerUnavailable(
                f"no worker answers on {self.path} ({error.strerror or error}); give the socket of its --listen"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def describe(self) -> Description:
        """What it is. Raises ProtocolError if it is of another version."""
        described = self._ask(Describe(), Description)
        if described.version != WORKER_PROTOCOL_VERSION:
            raise ProtocolError(
                f"the worker speaks version {described.version}, this command {WORKER_PROTOCOL_VERSION}: use its own"
            )
        return described

    def drain(self, on: bool) -> None:
        """Let it take nothing new, or take it again."""
        self._send(Drain(on=on))

    def leave(self) -> None:
        """Let it end, as SIGTERM does; returns when it has closed the connection, or ANSWER_S after its last word."""
        self._send(Leave())
        try:
            while self._socket.recv(READ_BYTES):
                continue
        except TimeoutError as error:
            raise WorkerUnavailable(f"the worker on {self.path} has been told to end and says nothing") from error
        except OSError:
            return

    def left(self) -> Left:
        """What it still has to do."""
        values = self._ask(GetWorkerStats(), WorkerStats).values
        requests = sum(values.get(f"requests.{name}", 0) for name in REQUESTS) + values.get("inbox.messages", 0)
        chunks = values.get("push.queue.chunks", 0) + values.get("pushes.running", 0)
        return Left(int(requests), int(chunks), int(values.get("push.queue.bytes", 0)))

    def _send(self, message: object) -> None:
        try:
            self._socket.sendall(TO_WORKER.encode(message))
        except OSError as error:
            raise WorkerUnavailable(f"the worker on {self.path} is gone ({error.strerror or error})") from error

    def _ask(self, question: object, kind: type[M]) -> M:
        self._send(question)
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except TimeoutError as error:
                raise WorkerUnavailable(f"the worker on {self.path} doesn't answer; is it hung?") from error
            except OSError as error:
                raise WorkerUnavailable(f"the worker on {self.path} is gone ({error.strerror or error})") from error
            if not data:
                raise WorkerUnavailable(f"the worker on {self.path} has closed the connection")
            found = [message for message in self._buffer.feed(data) if isinstance(message, kind)]
            if found:
                return found[-1]
