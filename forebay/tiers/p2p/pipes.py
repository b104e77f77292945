"""One connection of a stream, plain or through TLS: calls that block, each for a bounded time."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import Protocol

SOCKET_BUFFER_BYTES = 4 << 20
SEND_BYTES = 1 << 20
"""Sent through TLS in one call."""
RECORD_BYTES = 16 << 10
"""What TLS hands out at a time."""
TIMEOUT_AGAIN_S = 0.1
"""How far a call through TLS may pass its limit, while bytes trickle in."""

_TIMEVAL = struct.Struct("ll")


class Pipe(Protocol):
    """A connection that one thread uses at a time. Calls raise BlockingIOError or TimeoutError when they take longer
    than `limit` says, ConnectionError and other OSErrors when it is over."""

    def limit(self, seconds: float) -> None:
        """How long each call may take from now on."""

    def send(self, data: bytes | memoryview) -> None:
        """All of it."""

    def receive(self, memory: memoryview) -> int:
        """Fill `memory`. Fewer bytes: it took too long, or the other side has hung up; 0: before the first."""

    def hang_up(self) -> None:
        """End it, from any thread: whoever waits in a call comes back."""

    def close(self) -> None:
        """Let go of it."""


class PlainPipe(Pipe):
    """TCP as it is. The kernel's timeouts are used: they cost no second system call for each."""

    def __init__(self, connection: socket.socket) -> None:
        tune(connection)
        connection.settimeout(None)
        self._connection = connection

    def limit(self, seconds: float) -> None:
        value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6) + 1)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, data: bytes | memoryview) -> None:
        self._connection.sendall(data)

    def receive(self, memory: memoryview) -> int:
        return self._connection.recv_into(memory, flags=socket.MSG_WAITALL)

    def hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


class TlsPipe(Pipe):
    """Through TLS, once `shake` has come to its end. What TLS objects to ends the connection: ConnectionError."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        tune(connection)
        self._connection = context.wrap_socket(
            connection, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        self._seconds = 1.0

    def limit(self, seconds: float) -> None:
        self._seconds = seconds
        self._connection.settimeout(seconds)

    def shake(self) -> None:
        """Shake hands, within the limit."""
        try:
            self._connection.do_handshake()
        except ssl.SSLError as error:
            raise ConnectionError(f"TLS: {error.reason or error}") from error

    @property
    def certificate(self) -> bytes:
        """The other side's, DER. That it has the key to it is proved by the handshake."""
        return self._connection.getpeercert(binary_form=True) or b""

    def send(self, data: bytes | memoryview) -> None:
        whole = memoryview(data)
        try:
            for at in range(0, len(whole), SEND_BYTES):
                self._connection.sendall(whole[at : at + SEND_BYTES])
        except ssl.SSLError as error:
            raise ConnectionError(f"TLS: {error.reason or error}") from error

    def receive(self, memory: memoryview) -> int:
        at, size = 0, len(memory)
        now = time.monotonic()
        until, again = now + self._seconds, now + TIMEOUT_AGAIN_S
        try:
            while at < size:
                count = self._connection.recv_into(memory[at : at + RECORD_BYTES])
                if not count:
                    break
                at += count
                now = time.monotonic()
                if now > again and at < size:
                    if now >= until:
                        break
                    again = now + TIMEOUT_AGAIN_S
                    self._connection.settimeout(until - now)
        except ssl.SSLError as error:
            raise ConnectionError(f"TLS: {error.reason or error}") from error
        return at

    def hang_up(self) -> None:
        # Of the socket below: SSLSocket.shutdown would go on without TLS.
        with suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def tune(connection: socket.socket) -> None:
    """Large buffers, and no waiting for more to send."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def exactly(pipe: Pipe, count: int) -> bytes | None:
    """So many bytes; None if the other side has hung up before the first. Raises ConnectionError in the middle."""
    data = bytearray(count)
    got = pipe.receive(memoryview(data))
    if got == 0 and count:
        return None
    if got < count:
        raise ConnectionError("cut off in the middle of a message")
    return bytes(data)
