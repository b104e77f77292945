"""The tier process's end of the socket pair: frames in with descriptors, frames out through a bounded buffer."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator

from forebay.errors import ProtocolError
from forebay.ipc.framing import FrameBuffer
from forebay.ipc.sockets import receive_with_descriptors
from forebay.tiers.messages import ToTier, from_tier_codec, to_tier_codec

READ_BYTES = 1 << 18
OUT_BYTES_HIGH = 32 << 20
"""With this much unsent, nothing more is read or taken from the tier: the daemon has to catch up first."""


class DaemonLink:
    """Non-blocking frames over a connected socket. `closed` once the daemon has gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._encode = from_tier_codec().encode
        self._frames: FrameBuffer[ToTier] = FrameBuffer(to_tier_codec())
        self._descriptors: deque[int] = deque()
        self._out: deque[memoryview] = deque()
        self._backlog: list[ToTier] = []
        self.out_bytes = 0
        self.closed = False

    @property
    def congested(self) -> bool:
        """Is so much unsent that the tier should be left alone?"""
        return self.out_bytes > OUT_BYTES_HIGH

    def send(self, message: object) -> None:
        """Queue a message and send what the socket takes."""
        frame = self._encode(message)
        self._out.append(memoryview(frame))
        self.out_bytes += len(frame)
        self._push()

    def _push(self) -> None:
        while self._out and not self.closed:
            try:
                sent = self._socket.send(self._out[0])
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            self.out_bytes -= sent
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]

    def flush(self, timeout_s: float) -> None:
        """Send what is queued, waiting at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        self._push()
        while self._out and not self.closed and (left := until - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            poller.poll(left * 1000)
            self._push()

    def wait(self, timeout_s: float | None, wake: int) -> None:
        """Sleep until a message, a wake-up on descriptor `wake`, room for output, or the timeout."""
        if self._backlog:
            return
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        events = (0 if self.congested else select.POLLIN) | (select.POLLOUT if self._out else 0)
        poller.register(self._socket, events)
        poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)

    def receive(self) -> Iterator[ToTier]:
        """Messages that have come. One that isn't consumed comes again with the next call.

        Raises ProtocolError on garbage: the process then ends.
        """
        self._push()
        if not self._backlog and not self.congested:
            self._read()
        while self._backlog:
            yield self._backlog.pop(0)

    def _read(self) -> None:
        try:
            data, descriptors = receive_with_descriptors(self._socket, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self.closed = True
            return
        self._descriptors.extend(descriptors)
        if not data:
            self.closed = True
            return
        self._backlog.extend(self._frames.feed(data))

    def take_descriptor(self) -> int:
        """The next descriptor that came along; the caller closes it. Raises ProtocolError if there is none."""
        if not self._descriptors:
            raise ProtocolError("a message that needs a descriptor came without one")
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close the socket and whatever descriptors nobody took."""
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._socket.close()
        self.closed = True
