"""Simulated stream sockets: bytes arrive late, in pieces and in order; connections break; descriptors travel along.

`End` has what the real code asks of a connected socket, so the clients, tier channels and connections of the store
run over it as they are. Descriptors are real ones: they are duplicated when sent, and closed when nobody takes them.
"""

from __future__ import annotations

import array
import asyncio
import os
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from forebay.testing.simulate.loop import PROCESS, Process, SimLoop

FIRST_DESCRIPTOR = 1 << 20
"""Simulated sockets have numbers that no real descriptor has."""


@dataclass
class Weather:
    """What the network does to what is sent. Shares are probabilities a send."""

    delay_s: float = 0.0001
    slow_share: float = 0.0
    slice_share: float = 0.0
    buffer_bytes: int = 1 << 18


@dataclass
class _Segment:
    data: bytes
    descriptors: list[int]


class Net:
    """All connections of one simulated world."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop, self.rng = loop, rng
        self.weather = Weather()
        self.counts = {"network_slow": 0, "network_sliced": 0, "network_small_buffers": 0}
        self._next = FIRST_DESCRIPTOR
        self._listeners: dict[str, tuple[Process, Callable[[End], None]]] = {}
        self.pairs: list[tuple[End, End]] = []

    def pair(self, one: Process, other: Process) -> tuple[End, End]:
        """Two connected ends."""
        a, b = End(self, one, self._next), End(self, other, self._next + 1)
        self._next += 2
        a.peer, b.peer = b, a
        for end in (a, b):
            self.loop.register_end(end)
            end.process.at_exit.append(end.close)
        self.pairs.append((a, b))
        return a, b

    def listen(self, address: str, process: Process, accept: Callable[[End], None]) -> None:
        """Connections to `address` go to `accept`, which runs as `process`."""
        self._listeners[address] = (process, accept)

    def unlisten(self, address: str) -> None:
        """Nobody is let in there any more."""
        self._listeners.pop(address, None)

    def connect(self, address: str, process: Process) -> End:
        """A connected end. Raises ConnectionRefusedError."""
        found = self._listeners.get(address)
        if found is None or not found[0].alive:
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = self.pair(process, found[0])
        found[0].call_soon(found[1], theirs)
        return ours

    def open_pairs(self) -> list[tuple[End, End]]:
        """Connections that are up."""
        self.pairs = [pair for pair in self.pairs if not (pair[0].closed or pair[1].closed)]
        return self.pairs

    def reset(self, pair: tuple[End, End]) -> None:
        """Break a connection: both ends get an error, what was under way is lost."""
        for end in pair:
            end.broken = True
            end.drop_inbox()
            end.poke()


class End:
    """One end of a connection, with a socket's methods."""

    def __init__(self, net: Net, process: Process, number: int) -> None:
        self._net, self._loop, self._number = net, net.loop, number
        self.process = process
        self.peer: End
        self._inbox: deque[_Segment] = deque()
        self._flying: deque[_Segment] = deque()
        self._arrives = 0.0
        self._pending = 0
        self._eof = False
        self.broken = False
        self.closed = False
        self._reader: tuple[Callable[[], None], Any] | None = None
        self._writer: tuple[Callable[[], None], Any] | None = None
        self._told: set[str] = set()

    # --- sockets' methods ------------------------------------------------------------------------------

    def fileno(self) -> int:
        """The number by which the loop knows it."""
        return self._number

    def setblocking(self, flag: bool) -> None:
        """Simulated sockets never block."""
        assert not flag

    def send(self, data: Any) -> int:
        """Take what fits into the buffers; raises BlockingIOError if nothing does, ConnectionError if it is over."""
        return self._send(bytes(data), [])

    def sendmsg(self, parts: list[bytes], ancillary: list[tuple[int, int, bytes]]) -> int:
        """As `send`, with descriptors on the first byte."""
        numbers = array.array("i")
        for _, _, payload in ancillary:
            numbers.frombytes(payload)
        return self._send(b"".join(parts), list(numbers))

    def recv(self, size: int) -> bytes:
        """What has come, at most `size` bytes; empty at the end. Raises BlockingIOError, ConnectionResetError."""
        data, descriptors = self._receive(size)
        for descriptor in descriptors:
            os.close(descriptor)
        return data

    def recvmsg(self, size: int, ancillary: int, flags: int = 0) -> tuple[bytes, list[Any], int, None]:
        """As `recv`, with descriptors."""
        data, descriptors = self._receive(size)
        rights = array.array("i", descriptors).tobytes()
        return data, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else [], 0, None

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Sizes of buffers are the weather's business."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """Credentials: everybody here is one user."""
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", os.getpid(), os.getuid(), os.getgid())

    def close(self) -> None:
        """End it; the peer reads what is under way, then the end."""
        if self.closed:
            return
        self.closed = True
        self._reader = self._writer = None
        self.drop_inbox()
        self._loop.forget_end(self._number)
        self.peer._flying.append(_Segment(b"", []))
        self._loop.call_at(max(self._arrives, self._loop.time()), self.peer.arrived, context=self._kernel())

    # --- bytes under way -------------------------------------------------------------------------------

    def _kernel(self) -> Any:
        context = self.process.context.copy()
        context.run(PROCESS.set, None)
        return context

    def _send(self, data: bytes, descriptors: list[int]) -> int:
        if self.closed or not self.process.alive or self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        if self.peer.closed:
            raise BrokenPipeError(32, "Broken pipe")
        weather, rng = self._net.weather, self._net.rng
        room = weather.buffer_bytes - self.peer.waiting_bytes
        if room <= 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        taken = data[:room]
        if len(taken) < len(data):
            self._net.counts["network_small_buffers"] += 1
        delay = weather.delay_s * (1 + rng.random())
        if rng.random() < weather.slow_share:
            self._net.counts["network_slow"] += 1
            delay += rng.choice((0.002, 0.02, 0.2))
        at = max(self._loop.time() + delay, self._arrives)
        copies = [os.dup(descriptor) for descriptor in descriptors]
        for piece in self._sliced(taken):
            self.peer._pending += len(piece)
            self.peer._flying.append(_Segment(piece, copies))
            self._loop.call_at(at, self.peer.arrived, context=self._kernel())
            copies = []
            if rng.random() < 0.5:
                at += weather.delay_s
        self._arrives = at
        return len(taken)

    def _sliced(self, data: bytes) -> list[bytes]:
        rng = self._net.rng
        if len(data) < 2 or rng.random() >= self._net.weather.slice_share:
            return [data]
        self._net.counts["network_sliced"] += 1
        cuts = sorted({rng.randrange(1, len(data)) for _ in range(rng.randint(1, 3))})
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    @property
    def waiting_bytes(self) -> int:
        """Bytes under way to this end or not yet read by it."""
        return self._pending

    def arrived(self) -> None:
        """The next segment is there. Nothing overtakes: whichever timer runs first brings what was sent first."""
        segment = self._flying.popleft()
        if not segment.data:
            self._eof = True
            self.poke()
            return
        if self.closed or self.broken:
            self._pending -= len(segment.data)
            for descriptor in segment.descriptors:
                os.close(descriptor)
            return
        self._inbox.append(segment)
        self.poke()

    def drop_inbox(self) -> None:
        """Whatever came and wasn't read is lost."""
        for segment in self._inbox:
            for descriptor in segment.descriptors:
                os.close(descriptor)
        self._pending -= sum(len(segment.data) for segment in self._inbox)
        self._inbox.clear()

    def _receive(self, size: int) -> tuple[bytes, list[int]]:
        if self.broken:
            raise ConnectionResetError(104, "Connection reset by peer")
        if not self._inbox:
            if self._eof:
                return b"", []
            raise BlockingIOError(11, "Resource temporarily unavailable")
        head = self._inbox[0]
        data, head.data = head.data[:size], head.data[size:]
        descriptors, head.descriptors = head.descriptors, []
        if not head.data:
            self._inbox.popleft()
        self._pending -= len(data)
        self.peer.poke()
        return data, descriptors

    # --- readiness -------------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        """Would `recv` return or raise at once?"""
        return bool(self._inbox) or self._eof or self.broken

    @property
    def writable(self) -> bool:
        """Would `send` take something, or raise at once?"""
        return self.broken or self.peer.closed or self.peer.waiting_bytes < self._net.weather.buffer_bytes

    def watch_readable(self, callback: Callable[[], None] | None) -> bool:
        """Call `callback` while it is readable, as the present process; None ends that."""
        had = self._reader is not None
        self._reader = (callback, self.process.context.copy()) if callback else None
        self.poke()
        return had

    def watch_writable(self, callback: Callable[[], None] | None) -> bool:
        """The same for writing."""
        had = self._writer is not None
        self._writer = (callback, self.process.context.copy()) if callback else None
        self.poke()
        return had

    def poke(self) -> None:
        """Tell whoever watches, once a turn of the loop."""
        for what, watched, ready in (("r", self._reader, self.readable), ("w", self._writer, self.writable)):
            if watched is not None and ready and what not in self._told and not self.closed:
                self._told.add(what)
                self._loop.call_soon(self._tell, what, context=watched[1])

    def _tell(self, what: str) -> None:
        self._told.discard(what)
        watched = self._reader if what == "r" else self._writer
        if watched is not None and (self.readable if what == "r" else self.writable):
            watched[0]()
        if not self.closed:
            self.poke()


class SimTransport(asyncio.Transport):
    """asyncio's transport over an end, for the daemon's connections."""

    def __init__(self, end: End, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.end, self._protocol = end, protocol
        self._out = bytearray()
        self._high = 1 << 16
        self._lost = False
        end.process.loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._protocol.connection_made(self)
        if not self._lost:
            self.end.watch_readable(self._readable)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.end if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high if high is not None else self._high

    def get_write_buffer_size(self) -> int:
        return len(self._out)

    def write(self, data: Any) -> None:
        if self._lost:
            return
        self._out += data
        self._push()

    def _push(self) -> None:
        while self._out and not self._lost:
            try:
                del self._out[: self.end.send(self._out)]
            except BlockingIOError:
                break
            except OSError as error:
                self._end(error)
                return
        self.end.watch_writable(self._push if self._out else None)
        if len(self._out) > self._high:
            self._protocol.pause_writing()

    def _readable(self) -> None:
        try:
            data = self.end.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            self._protocol.data_received(data)
        else:
            self._end(None)

    def abort(self) -> None:
        self._end(None)

    close = abort

    def is_closing(self) -> bool:
        return self._lost

    def _end(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._out.clear()
        self.end.close()
        self.end.process.loop.call_soon(self._protocol.connection_lost, error)


class Borrowed(AbstractContextManager["End"]):
    """A handle on an end that can be let go of without closing it."""

    def __init__(self, end: End) -> None:
        self._end = end

    def __enter__(self) -> End:
        return self._end

    def __exit__(self, *exc: object) -> None:
        pass
