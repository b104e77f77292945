"""The side of streams that dials: blocking calls, from any thread, each with a deadline."""

from __future__ import annotations

import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakSet

from forebay.kvstore.header import HEADER_BYTES_MAX
from forebay.tiers.base import ChunkId
from forebay.tiers.p2p.errors import NotThere, PeerLost, TooLate
from forebay.tiers.p2p.pipes import Pipe, PlainPipe, TlsPipe
from forebay.tiers.p2p.stream import (
    ALL,
    MAGIC,
    MISSING,
    OFFER,
    OK,
    PIECE_BYTES,
    PLACE,
    PUSH,
    REPLY,
    REQUEST,
    WHY,
)
from forebay.tiers.p2p.tls import dialling_context, pinned

KEPT_MAX = 8
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer takes tickets; with a `fingerprint` through TLS, as whoever has that certificate's key."""

    host: str
    port: int
    ticket: bytes
    fingerprint: bytes = b""


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


@dataclass(frozen=True, slots=True)
class Offered:
    """A chunk to push: its header's block, its payload in place, its namespace's encoding (empty: not known here)."""

    chunk: ChunkId
    block: bytes
    payload: memoryview
    namespace: bytes


@dataclass(frozen=True, slots=True)
class _Patience:
    """Until when all of it has to be done (monotonic), and how long without progress."""

    due: float
    stall_s: float

    def left(self) -> float:
        """For the next call; raises TimeoutError if there is none."""
        left = self.due - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return min(left, self.stall_s)


@dataclass
class Streams:
    """Connections to one peer, kept for the next chunk. Used from any thread."""

    place: Place
    _idle: deque[Pipe] = field(default_factory=deque)
    _all: WeakSet[Pipe] = field(default_factory=WeakSet)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._context: ssl.SSLContext | None = dialling_context() if self.place.fingerprint else None

    @property
    def way(self) -> str:
        """What figures call it."""
        return "tls" if self.place.fingerprint else "stream"

    # --- what is asked ---------------------------------------------------------------------------------

    def reach(self, stall_s: float) -> None:
        """Can it be dialled? Blocks and raises as `fetch`."""
        self._once(_Patience(time.monotonic() + stall_s, stall_s), lambda pipe, patience: None)

    def fetch(self, chunk: ChunkId, memory: memoryview, due: float, stall_s: float, check: Check) -> Fetched:
        """Read a chunk's payload into the front of `memory`. `check` is called as `Check` says.

        Blocks, until `due` (monotonic) at the latest and never longer than `stall_s` without progress; after that
        nothing is written any more. Raises PeerLost, NotThere, TooLate.
        """

        def act(pipe: Pipe, patience: _Patience) -> Fetched:
            head, block = self._ask(pipe, ALL, chunk, len(memory), patience)
            length = head[2]
            _fill(pipe, memory[:length], patience, check(block, length))
            return Fetched(block, length)

        return self._once(_Patience(due, stall_s), act)

    def open(self, chunk: ChunkId, capacity: int, due: float, stall_s: float) -> Placed:
        """Ask where a chunk lies; it stays there until `done`. Blocks and raises as `fetch`."""

        def act(pipe: Pipe, patience: _Patience) -> Placed:
            head, block = self._ask(pipe, PLACE, chunk, capacity, patience)

            def done() -> None:
                with suppress(OSError):
                    pipe.send(b".")
                    self._keep(pipe)

            return Placed(block, head[2], head[3], head[4], done, pipe.close)

        return self._once(_Patience(due, stall_s), act, keep=False)

    def push(self, offered: Offered, due: float, stall_s: float) -> str:
        """Push a chunk; empty once the peer has verified and stored it, else why not, as `DECLINED` names it.

        Blocks and raises as `fetch`, but not NotThere; afterwards the payload isn't read any more.
        """

        def act(pipe: Pipe, patience: _Patience) -> str:
            chunk, size = offered.chunk, len(offered.payload)
            pipe.limit(patience.left())
            request = REQUEST.pack(MAGIC, self.place.ticket, PUSH, chunk.group, chunk.key, size)
            pipe.send(request + OFFER.pack(len(offered.block), len(offered.namespace)))
            pipe.send(offered.block + offered.namespace)
            status = _reply(pipe, patience)[0]
            try:
                if status == OK:
                    for at in range(0, size, PIECE_BYTES):
                        pipe.limit(patience.left())
                        pipe.send(offered.payload[at : at + PIECE_BYTES])
                    status = _reply(pipe, patience)[0]
            except ConnectionError as error:  # it has been begun: not to be tried again
                raise PeerLost(f"the stream broke: {error}") from error
            if status != OK and status not in WHY:
                raise PeerLost(f"status {status} to a push")
            return WHY.get(status, "")

        return self._once(_Patience(due, stall_s), act)

    def _ask(
        self, pipe: Pipe, what: int, chunk: ChunkId, capacity: int, patience: _Patience
    ) -> tuple[tuple[int, int, int, int, int], bytes]:
        """The reply's fields and the header's block. Raises NotThere and as `fetch`."""
        pipe.limit(patience.left())
        pipe.send(REQUEST.pack(MAGIC, self.place.ticket, what, chunk.group, chunk.key, capacity))
        head = _reply(pipe, patience)
        status, block_length, length, _, _ = head
        if status == MISSING:
            raise NotThere("the peer hasn't got it any more")
        if status != OK or block_length > HEADER_BYTES_MAX or length > capacity:
            raise PeerLost(f"status {status} with {block_length} + {length} bytes")
        block = memoryview(bytearray(block_length))
        _fill(pipe, block, patience)
        return head, bytes(block)

    # --- connections -----------------------------------------------------------------------------------

    def _once(self, patience: _Patience, act: Callable[[Pipe, _Patience], T], *, keep: bool = True) -> T:
        """`act` on a connection; on a new one if the peer had hung up on one that was kept: that says nothing about
        it. Kept afterwards if all went well. Raises PeerLost, TooLate, and what `act` raises."""
        try:
            kept = self._kept()
            if kept is not None:
                with suppress(ConnectionError):
                    return self._on(kept, patience, act, keep)
            return self._on(self._dial(patience.left()), patience, act, keep)
        except (TimeoutError, BlockingIOError) as error:
            late = time.monotonic() >= patience.due
            raise TooLate("the deadline has passed") if late else PeerLost("it stalled") from error
        except OSError as error:
            raise PeerLost(f"the stream broke: {error}") from error

    def _on(self, pipe: Pipe, patience: _Patience, act: Callable[[Pipe, _Patience], T], keep: bool) -> T:
        whole = False
        try:
            result = act(pipe, patience)
            whole = True
        except NotThere:
            whole = keep = True
            raise
        finally:
            if not whole:
                pipe.close()
            elif keep:
                self._keep(pipe)
        return result

    def _dial(self, seconds: float) -> Pipe:
        connection = socket.create_connection((self.place.host, self.place.port), seconds)
        pipe: PlainPipe | TlsPipe
        if self._context is not None:
            pipe = pinned(connection, self._context, self.place.fingerprint, seconds)
        else:
            pipe = PlainPipe(connection)
        self._all.add(pipe)
        if self._closed:
            pipe.hang_up()
        return pipe

    def _kept(self) -> Pipe | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _keep(self, pipe: Pipe) -> None:
        if self._closed or len(self._idle) >= KEPT_MAX:
            pipe.close()
        else:
            self._idle.append(pipe)

    def close(self) -> None:
        """Hang up."""
        self._closed = True  # what is still out ends now, and is closed when it comes back
        for pipe in list(self._all):
            pipe.hang_up()
        while self._idle:
            self._idle.pop().close()


def _reply(pipe: Pipe, patience: _Patience) -> tuple[int, int, int, int, int]:
    raw = memoryview(bytearray(REPLY.size))
    _fill(pipe, raw, patience)
    status, block_length, length, address, epoch = REPLY.unpack(raw)
    return status, block_length, length, address, epoch


def _fill(
    pipe: Pipe, memory: memoryview, patience: _Patience, came: Callable[[int], None] = lambda count: None
) -> None:
    at = 0
    while at < len(memory):
        left = patience.left()
        if left < patience.stall_s:
            pipe.limit(left)
        # Less than was asked for: it stopped, or ended; the next call tells.
        count = pipe.receive(memory[at : at + PIECE_BYTES])
        if count == 0:
            raise ConnectionError("the peer hung up")
        at += count
        came(at)
