"""The daemon's end of the socket pair, on an asyncio loop (plain or uvloop).

Asyncio's transports can't pass descriptors, so this one speaks to the socket itself. Nothing here waits:
what the socket doesn't take stays in a bounded buffer.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from forebay.errors import ProtocolError
from forebay.ipc.framing import FrameBuffer
from forebay.ipc.sockets import send_with_descriptors
from forebay.tiers.messages import FromTier, from_tier_codec, to_tier_codec

READ_BYTES = 1 << 18
READS_PER_TURN = 8
"""So that a chatty tier can't keep the loop from its other work."""


@dataclass(slots=True)
class _Out:
    """A frame, or the rest of one; descriptors go with its first byte and are closed once sent."""

    data: memoryview
    descriptors: list[int]


class Channel:
    """Frames to and from one tier process. `on_message` is called on the loop for each that comes,
    `on_closed` once, when the peer has gone or spoken garbage."""

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[FromTier], None],
        on_closed: Callable[[str], None],
        out_bytes_max: int,
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._encode = to_tier_codec().encode
        self._frames: FrameBuffer[FromTier] = FrameBuffer(from_tier_codec())
        self._on_message = on_message
        self._on_closed = on_closed
        self._out: deque[_Out] = deque()
        self._out_bytes_max = out_bytes_max
        self._writing = False
        self._broken = False
        self.out_bytes = 0
        self.closed = False
        self._loop.add_reader(connection.fileno(), self._readable)

    def send(self, message: object, descriptors: list[int] | None = None, *, force: bool = False) -> bool:
        """Queue a message. False, and nothing is sent, if the buffer is full or the channel is closed.

        `force` ignores the buffer's cap, for the few messages that must not be lost. Takes ownership of
        `descriptors` in any case.
        """
        descriptors = descriptors or []
        closed = self.closed or self._broken
        frame = b"" if closed else self._encode(message)
        if closed or (not force and self.out_bytes + len(frame) > self._out_bytes_max):
            for descriptor in descriptors:
                os.close(descriptor)
            return False
        self._out.append(_Out(memoryview(frame), descriptors))
        self.out_bytes += len(frame)
        if not self._writing:
            self._push()
        return True

    def _push(self) -> None:
        while self._out and not self._broken:
            head = self._out[0]
            try:
                if head.descriptors:
                    sent = send_with_descriptors(self._socket, head.data.tobytes(), head.descriptors)
                else:
                    sent = self._socket.send(head.data)
            except BlockingIOError:
                break
            except OSError as error:
                # Not now: what the peer has said last is passed on first, and never from inside of a send.
                self._broken = True
                self._loop.call_soon(self._end_after_last_words, f"send: {error.strerror}")
                return
            while head.descriptors:
                os.close(head.descriptors.pop())
            self.out_bytes -= sent
            if sent == len(head.data):
                self._out.popleft()
            else:
                head.data = head.data[sent:]
        self._watch_writable(bool(self._out))

    def _end_after_last_words(self, why: str) -> None:
        self.drain()
        self._end(why)

    def _watch_writable(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._socket.fileno(), self._push)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._socket.fileno())
        self._writing = wanted

    def _readable(self) -> None:
        for _ in range(READS_PER_TURN):
            if self.closed or not self._read_some():
                return

    def drain(self) -> None:
        """Handle everything that a dead peer has left in the socket."""
        while not self.closed and self._read_some():
            pass

    def _read_some(self) -> bool:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(f"receive: {error.strerror}")
            return False
        if not data:
            self._end("end of file")
            return False
        try:
            messages = list(self._frames.feed(data))
        except ProtocolError as error:
            self._end(str(error))
            return False
        for message in messages:
            self._on_message(message)
        return True

    def _end(self, why: str) -> None:
        if not self.closed:
            self.close()
            self._on_closed(why)

    def close(self) -> None:
        """Stop reading and writing, close the socket. What is queued is lost. May be called again."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._watch_writable(False)
        for out in self._out:
            for descriptor in out.descriptors:
                os.close(descriptor)
        self._out.clear()
        self.out_bytes = 0
        self._socket.close()
