"""Connections of the daemon: frames in, replies out, descriptors handed over, nothing done here that can block."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from forebay.errors import ForebayError, ProtocolError, RequestRefused
from forebay.ipc.framing import FrameBuffer
from forebay.ipc.sockets import peer_of, send_with_descriptors, widen
from forebay.kvstore.core import Client
from forebay.kvstore.intake import Intake
from forebay.kvstore.limits import Limits
from forebay.kvstore.protocol import (
    CLIENT_ID_BYTES,
    PROTOCOL_VERSION,
    REPLIES,
    REQUESTS,
    Check,
    Fetch,
    Hello,
    Lookup,
    Refused,
    Request,
    Survey,
    Warm,
)

log = logging.getLogger(__name__)

GRUMBLE_S = 5.0
HELLO_BYTES_MAX = 4096
"""Who hasn't said who it is gets no more memory than this."""

FOR_ITS_CLIENT_ALONE = (Check, Fetch, Lookup, Survey, Warm)
"""Requests that end with their connection. Others change something, and go on to their end."""

Answer = object | Coroutine[Any, Any, object] | None


class _Grumble:
    """Warnings that a client can cause as often as it likes: one line of each kind in five seconds, with a count."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def __call__(self, text: str, *arguments: object) -> None:
        now = time.monotonic()
        if now < self._next.get(text, 0.0):
            self._held_back[text] = self._held_back.get(text, 0) + 1
            return
        self._next[text] = now + GRUMBLE_S
        held_back = self._held_back.pop(text, 0)
        log.warning(text + (f" (and {held_back} more before it)" if held_back else ""), *arguments)


_grumble = _Grumble()


class Service(Protocol):
    """What a connection needs of the store."""

    intake: Intake

    def welcome(self, hello: Hello) -> tuple[object, list[int], Client]:
        """The answer to Hello, descriptors that go with it (closed once sent), and the client's state."""

    def handle(self, connection: Connection, request: Request) -> Answer:
        """A reply, a coroutine that gives one, or None for messages that have none."""

    def gone(self, connection: Connection) -> None:
        """The connection has ended."""

    def crowded(self) -> bool:
        """Are there so many connections that another one isn't even listened to?"""


class Connection(asyncio.Protocol):
    """One client. Requests that need waiting run as tasks, a bounded number; everything else is answered
    before the next message is read."""

    def __init__(self, service: Service, limits: Limits, allowed: Callable[[int], bool]) -> None:
        self._service, self._limits, self._allowed = service, limits, allowed
        self._buffer: FrameBuffer[Request] = FrameBuffer(REQUESTS)
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._long: dict[asyncio.Task[None], Coroutine[Any, Any, object]] = {}
        self._unfinished = 0
        self._overdue: asyncio.TimerHandle | None = None
        self.client: Client | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: a client has connected."""
        # uvloop's transports have the interface without the base class.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=self._limits.reply_bytes_per_connection)
        with self._plain_socket() as plain:
            peer = peer_of(plain)
            widen(plain)
        if not self._allowed(peer.uid):
            _grumble("refused a connection of uid %d, pid %d", peer.uid, peer.pid)
            transport.abort()
        elif self._service.crowded():
            _grumble("hung up on uid %d, pid %d: there are too many connections", peer.uid, peer.pid)
            transport.abort()
        else:
            self._expect(self._limits.hello_s)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes have come."""
        try:
            for request in self._buffer.feed(data):
                if self.closed:
                    return
                self._take(request)
            if self.client is None and self._buffer.pending > HELLO_BYTES_MAX:
                raise ProtocolError(f"a Hello has at most {HELLO_BYTES_MAX} bytes")
            self._wait_for_the_rest()
        except ProtocolError as error:
            _grumble("dropped a client that broke the protocol: %s", error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection has ended, from either side."""
        self.closed = True
        self._service.intake.change(self._unfinished, 0)
        self._unfinished = 0
        self._expect(None)
        for waiting, answer in list(self._long.items()):  # what it has pinned meanwhile is free at once
            waiting.cancel()
            if inspect.getcoroutinestate(answer) == inspect.CORO_CREATED:
                answer.close()
        self._service.gone(self)

    def _wait_for_the_rest(self) -> None:
        """Account for a frame that isn't whole, and give its rest some time to come."""
        pending = self._buffer.pending
        if pending == self._unfinished:
            return
        self._service.intake.change(self._unfinished, pending)
        self._unfinished = pending
        if not pending:
            self._expect(None if self.client is not None else self._limits.hello_s)
        elif self._overdue is None:
            self._expect(self._limits.frame_s)

    def _expect(self, within_s: float | None) -> None:
        """Hang up unless something is whole by then; None expects nothing any more."""
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = None if within_s is None else asyncio.get_running_loop().call_later(within_s, self._late)

    def _late(self) -> None:
        _grumble("dropped a client that began to say something and didn't go on")
        self.abort()

    def pause_writing(self) -> None:
        """asyncio: the client doesn't read. Its replies are bounded, so it has to go."""
        _grumble("dropped a client that doesn't read its replies")
        self.abort()

    def abort(self) -> None:
        """End the connection now."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _take(self, request: Request) -> None:
        if isinstance(request, Hello):
            self._welcome(request)
            return
        if self.client is None:
            raise ProtocolError(f"{type(request).__name__} before Hello")
        try:
            answer = self._service.handle(self, request)
        except (ForebayError, OSError) as error:
            answer = self._refusal(request, error)
        if asyncio.iscoroutine(answer):
            self._run(request, answer)
        elif answer is not None:
            self._reply(request, answer)

    def _welcome(self, hello: Hello) -> None:
        if self.client is not None:
            raise ProtocolError("a second Hello")
        if hello.version != PROTOCOL_VERSION or len(hello.client) != CLIENT_ID_BYTES:
            spoken = f"this store speaks protocol {PROTOCOL_VERSION}, the client {hello.version}"
            self.send(Refused(rid=hello.rid, code="version", message=f"{spoken}: update the older one"))
            return
        try:
            message, descriptors, self.client = self._service.welcome(hello)
        except (ForebayError, OSError) as error:
            self.send(Refused(rid=hello.rid, code="busy", message=str(error)))
            self._hang_up()
            return
        self._expect(None)
        self.send(message, descriptors)

    def _hang_up(self) -> None:
        """End the connection once it has been told why."""
        self.closed = True
        assert self._transport is not None
        self._transport.close()

    def _run(self, request: Request, answer: Coroutine[Any, Any, object]) -> None:
        if len(self._tasks) >= self._limits.requests_per_connection:
            answer.close()
            raise ProtocolError(f"more than {self._limits.requests_per_connection} requests at a time")
        size = self._buffer.last_bytes
        try:
            self._service.intake.change(0, size)
        except ProtocolError:
            answer.close()
            raise
        task = asyncio.ensure_future(self._finish(request, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._service.intake.change(size, 0))
        if isinstance(request, FOR_ITS_CLIENT_ALONE):
            self._long[task] = answer
            task.add_done_callback(self._long.pop)

    async def _finish(self, request: Request, answer: Coroutine[Any, Any, object]) -> None:
        try:
            reply = await answer
        except ForebayError as error:
            reply = self._refusal(request, error)
        except Exception:
            log.exception("a %s failed in a way it should not", type(request).__name__)
            reply = self._refusal(request, RequestRefused("internal", "the store failed; its log has the details"))
        if not self.closed:
            self._reply(request, reply)

    def _reply(self, request: Request, reply: object) -> None:
        try:
            self.send(reply)
        except ProtocolError as error:  # over the limit of a frame
            self.send(self._refusal(request, RequestRefused("limits", str(error))))

    @staticmethod
    def _refusal(request: Request, error: ForebayError | OSError) -> Refused:
        rid = getattr(request, "rid", 0)
        code = error.code if isinstance(error, RequestRefused) else "internal"
        if isinstance(error, OSError):
            _grumble("the machine refuses what a client asks for: %s", error)
        return Refused(rid=rid, code=code, message=str(error))

    def send(self, message: object, descriptors: list[int] | None = None) -> None:
        """Send a reply; `descriptors` go with it and are closed here."""
        frame = REPLIES.encode(message)
        assert self._transport is not None
        if not descriptors:
            self._write(frame)
            return
        try:
            # Descriptors ride on the frame's first byte, so the transport must have nothing left to say.
            if self.closed or self._transport.get_write_buffer_size():
                raise ProtocolError("asked for descriptors without reading earlier replies")
            with self._plain_socket() as plain:
                sent = send_with_descriptors(plain, frame, descriptors)
        except OSError as error:
            raise ProtocolError(f"descriptors could not be handed over: {error.strerror}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if sent < len(frame):
            self._write(frame[sent:])

    def _write(self, data: bytes) -> None:
        # Between the end of a connection and being told of it uvloop refuses to write.
        assert self._transport is not None
        if not (self.closed or self._transport.is_closing()):
            self._transport.write(data)

    def _plain_socket(self) -> socket.socket:
        """A second handle on the connection, for what transports can't do; close it after use."""
        assert self._transport is not None
        return socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
