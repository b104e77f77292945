"""The fetching side of streams: blocking calls, from any thread, each with a deadline."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakSet

from forebay.kvstore.header import HEADER_BYTES_MAX
from forebay.tiers.base import ChunkId
from forebay.tiers.p2p.errors import NotThere, PeerLost, TooLate
from forebay.tiers.p2p.stream import ALL, MAGIC, MISSING, OK, PLACE, REPLY, REQUEST, limit, tune

KEPT_MAX = 8
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer takes tickets."""

    host: str
    port: int
    ticket: bytes


Check = Callable[[bytes, int], Callable[[int], None]]
"""Called with a header's block and the payload's length before any of the payload comes; what it returns is called
with how many bytes have come, while they are still in the processor's cache. Either may raise."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A chunk's header block, and how many bytes its payload has; nothing of it is verified."""

    block: bytes
    length: int


@dataclass(frozen=True, slots=True)
class Placed:
    """An open chunk, and where it lies in the peer's memory (0: out of reach), by its metadata of `epoch`. `done` ends
    it, once it has been read; `drop` if that went wrong."""

    block: bytes
    length: int
    address: int
    epoch: int
    done: Callable[[], None]
    drop: Callable[[], None]


@dataclass
class Streams:
    """Connections to one peer, kept for the next chunk. Used from any thread."""

    place: Place
    _idle: deque[socket.socket] = field(default_factory=deque)
    _all: WeakSet[socket.socket] = field(default_factory=WeakSet)
    _closed: bool = False

    def fetch(self, chunk: ChunkId, memory: memoryview, due: float, stall_s: float, check: Check) -> Fetched:
        """Read a chunk's payload into the front of `memory`. `check` is called as `Check` says.

        Blocks, until `due` (monotonic) at the latest and never longer than `stall_s` without progress; after that
        nothing is written any more. Raises PeerLost, NotThere, TooLate.
        """
        try:
            connection, fresh = self._connection(due, stall_s)
            try:
                got = self._fetch(connection, chunk, memory, due, stall_s, check)
            except ConnectionError:
                connection.close()
                if fresh:
                    raise
                # The peer had hung up on a connection that was kept: that says nothing about it.
                connection, _ = self._connection(due, stall_s, kept=False)
                got = self._fetch(connection, chunk, memory, due, stall_s, check)
        except (TimeoutError, BlockingIOError) as error:
            raise TooLate("the deadline has passed") if time.monotonic() >= due else PeerLost("it stalled") from error
        except OSError as error:
            raise PeerLost(f"the stream broke: {error}") from error
        self._keep(connection)
        return got

    def _connection(self, due: float, stall_s: float, *, kept: bool = True) -> tuple[socket.socket, bool]:
        with suppress(IndexError):
            if kept:
                return self._idle.pop(), False
        connection = socket.create_connection((self.place.host, self.place.port), _patience(due, stall_s))
        tune(connection)
        self._all.add(connection)
        return connection, True

    def open(self, chunk: ChunkId, capacity: int, due: float, stall_s: float) -> Placed:
        """Ask where a chunk lies; it stays there until `done`. Blocks and raises as `fetch`."""
        try:
            connection, fresh = self._connection(due, stall_s)
            try:
                head, block = self._ask(connection, PLACE, chunk, capacity, due, stall_s)
            except ConnectionError:
                if fresh:
                    raise
                connection, _ = self._connection(due, stall_s, kept=False)
                head, block = self._ask(connection, PLACE, chunk, capacity, due, stall_s)
        except (TimeoutError, BlockingIOError) as error:
            raise TooLate("the deadline has passed") if time.monotonic() >= due else PeerLost("it stalled") from error
        except OSError as error:
            raise PeerLost(f"the stream broke: {error}") from error
        _, _, length, address, epoch = head

        def done() -> None:
            with suppress(OSError):
                connection.sendall(b".")
                self._keep(connection)

        return Placed(block, length, address, epoch, done, connection.close)

    def _keep(self, connection: socket.socket) -> None:
        if self._closed or len(self._idle) >= KEPT_MAX:
            connection.close()
        else:
            self._idle.append(connection)

    def _fetch(
        self, connection: socket.socket, chunk: ChunkId, memory: memoryview, due: float, stall_s: float, check: Check
    ) -> Fetched:
        head, block = self._ask(connection, ALL, chunk, len(memory), due, stall_s)
        try:
            length = head[2]
            _fill(connection, memory[:length], due, stall_s, check(block, length))
        except BaseException:
            connection.close()
            raise
        return Fetched(block, length)

    def _ask(
        self, connection: socket.socket, what: int, chunk: ChunkId, capacity: int, due: float, stall_s: float
    ) -> tuple[tuple[int, int, int, int, int], bytes]:
        """The reply's fields and the header's block. Raises NotThere (the connection is kept) and as `fetch`."""
        try:
            limit(connection, _patience(due, stall_s))
            connection.sendall(REQUEST.pack(MAGIC, self.place.ticket, what, chunk.group, chunk.key, capacity))
            raw = memoryview(bytearray(REPLY.size))
            _fill(connection, raw, due, stall_s)
            head = REPLY.unpack(raw)
            status, block_length, length, _, _ = head
            if status == MISSING:
                self._keep(connection)
                raise NotThere("the peer hasn't got it any more")
            if status != OK or block_length > HEADER_BYTES_MAX or length > capacity:
                raise PeerLost(f"status {status} with {block_length} + {length} bytes")
            block = memoryview(bytearray(block_length))
            _fill(connection, block, due, stall_s)
        except NotThere:
            raise
        except BaseException:
            connection.close()
            raise
        return head, bytes(block)

    def close(self) -> None:
        """Hang up."""
        self._closed = True  # what is still out ends now, and is closed when it comes back
        for connection in list(self._all):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        while self._idle:
            self._idle.pop().close()


def _patience(due: float, stall_s: float) -> float:
    left = due - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, stall_s)


def _fill(
    connection: socket.socket,
    memory: memoryview,
    due: float,
    stall_s: float,
    came: Callable[[int], None] = lambda count: None,
) -> None:
    at = 0
    while at < len(memory):
        left = _patience(due, stall_s)
        if left < stall_s:
            limit(connection, left)
        # BlockingIOError says that nothing has come in time; less than was asked for, that it stopped or ended.
        count = connection.recv_into(memory[at : at + PIECE_BYTES], flags=socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the peer hung up")
        at += count
        came(at)
