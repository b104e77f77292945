"""Chunks over plain TCP, in place on both sides: for peers on this host, where nothing can listen in.

    -> magic "FBST" | ticket 16 | what u32 | group u32 | key 32 | capacity u64
    <- status u32 | length of the header u32 | length of the payload u64 | address u64 | epoch u64 | header | payload
    -> one byte, where only the place of the payload was asked for: it has been read (by NIXL)

One chunk after another on a connection. A ticket comes with Welcome, over the control connection, so whoever may ask
there may ask here. Both sides run on threads of their own, every call with a timeout.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from forebay.kvstore.header import HEADER_BYTES_MAX
from forebay.tiers.base import ChunkId
from forebay.tiers.p2p.errors import NotThere, PeerLost, TooLate
from forebay.tiers.p2p.remote import Remote
from forebay.tiers.p2p.source import Loan

log = logging.getLogger("forebay.tier.p2p")

MAGIC = b"FBST"
REQUEST = struct.Struct("<4s16sII32sQ")
REPLY = struct.Struct("<IIQQQ")
ALL, PLACE = range(2)
OK, MISSING, TOO_LARGE, NO_TICKET = range(4)
CONNECTIONS_MAX = 64
IDLE_S = 30.0
DAEMON_S = 5.0
KEPT_MAX = 8
SOCKET_BUFFER_BYTES = 4 << 20
PIECE_BYTES = 1 << 20


_TIMEVAL = struct.Struct("ll")


def _tune(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def _limit(connection: socket.socket, seconds: float) -> None:
    """How long each call may wait from now on: the kernel's timeout, which costs no second system call for each."""
    value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6) + 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


# --- serving -------------------------------------------------------------------------------------------


class StreamServer:
    """Listens on `host` at a port of the kernel's choice. `lend` is a coroutine function of `loop`, which
    is asked for what `at_once`, called from any thread, hasn't got; `known` says
    whether a ticket is good; a peer that makes no progress for `stall_s` is hung up on."""

    def __init__(
        self,
        host: str,
        loop: asyncio.AbstractEventLoop,
        lend: Callable[[ChunkId], Coroutine[Any, Any, Loan | None]],
        at_once: Callable[[ChunkId], Loan | None],
        remote: Remote,
        known: Callable[[bytes], bool],
        stall_s: float,
    ) -> None:
        self._loop, self._lend, self._at_once = loop, lend, at_once
        self._remote, self._known, self._stall_s = remote, known, stall_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        threading.Thread(target=self._accept, name="p2p-accept", daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if len(self._connections) >= CONNECTIONS_MAX:
                    self.counts["turned_away"] += 1
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="p2p-send", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _tune(connection)
            while True:
                _limit(connection, IDLE_S)
                request = _exactly(connection, REQUEST.size)
                if request is None:
                    return
                _limit(connection, self._stall_s)
                if not self._answer(connection, request):
                    return
        except OSError:
            self.counts["broken"] += 1
        except Exception:
            self.counts["failures"] += 1
            log.exception("p2p: serving a stream failed")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, request: bytes) -> bool:
        magic, ticket, what, group, key, capacity = REQUEST.unpack(request)
        if magic != MAGIC or not self._known(ticket):
            self.counts["no_ticket"] += 1
            connection.sendall(REPLY.pack(NO_TICKET, 0, 0, 0, 0))
            return False
        chunk = ChunkId(group, key)
        loan = self._at_once(chunk) or _result(asyncio.run_coroutine_threadsafe(self._lend(chunk), self._loop))
        if loan is None:
            connection.sendall(REPLY.pack(MISSING, 0, 0, 0, 0))
            return True
        try:
            if len(loan.payload) > capacity:
                connection.sendall(REPLY.pack(TOO_LARGE, 0, 0, 0, 0))
                return True
            place = self._remote.address(loan.extent, loan.offset)
            epoch = self._remote.epoch  # in this order: an address is in the metadata of the epoch that is read after it
            connection.sendall(REPLY.pack(OK, len(loan.block), len(loan.payload), place, epoch) + loan.block)
            if what == PLACE:
                return bool(connection.recv(1))
            connection.sendall(loan.payload)
            self.counts["sent_bytes"] += len(loan.payload)
            return True
        finally:
            if loan.anywhere:
                loan.give_back()
            else:
                self._loop.call_soon_threadsafe(loan.give_back)

    def close(self) -> None:
        """Listen no more, hang up."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _result(asked: Future[Loan | None]) -> Loan | None:
    try:
        return asked.result(DAEMON_S)
    except TimeoutError:
        asked.cancel()
        return None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    """So many bytes; None if the other side has hung up before the first."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            if data:
                raise ConnectionError("cut off in the middle of a message")
            return None
        data += piece
    return bytes(data)


# --- fetching ------------------------------------------------------------------------------------------


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
        _tune(connection)
        return connection, True

    def open(self, chunk: ChunkId, capacity: int, due: float, stall_s: float) -> Placed:
        """Ask where a chunk lies; it stays there until `done`. Blocks and raises as `fetch`."""
        try:
            connection, _ = self._connection(due, stall_s)
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
        if len(self._idle) < KEPT_MAX:
            self._idle.append(connection)
        else:
            connection.close()

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
            _limit(connection, _patience(due, stall_s))
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
        """Hang up what is idle."""
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
            _limit(connection, left)
        # BlockingIOError says that nothing has come in time; less than was asked for, that it stopped or ended.
        count = connection.recv_into(memory[at : at + PIECE_BYTES], flags=socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the peer hung up")
        at += count
        came(at)
