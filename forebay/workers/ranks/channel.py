"""One end of a socket pair on which messages are framed: blocking, for one thread at each end.

The other end belongs to a process that was given its descriptor: nobody else can open or even name it.
"""

from __future__ import annotations

import socket
from typing import Generic, TypeVar

from forebay.errors import ProtocolError
from forebay.ipc.framing import HEAD_BYTES, Codec
from forebay.workers.ranks.errors import RankLost

S = TypeVar("S")
R = TypeVar("R")


class Channel(Generic[S, R]):
    """Sends messages of type S, receives those of type R. `who` is at the other end, for messages."""

    def __init__(self, connection: socket.socket, sends: Codec[S], receives: Codec[R], who: str) -> None:
        self._connection, self._sends, self._receives, self._who = connection, sends, receives, who

    def send(self, message: S, patience_s: float | None = None) -> None:
        """Blocks while the other end doesn't read, but not longer than that. Raises RankLost."""
        self._connection.settimeout(patience_s)
        try:
            self._connection.sendall(self._sends.encode(message))
        except TimeoutError as error:
            raise RankLost(f"{self._who} has taken nothing for {patience_s:g} s") from error
        except OSError as error:
            raise RankLost(f"{self._who} is gone ({error.strerror or error})") from error

    def receive(self, patience_s: float | None = None) -> R:
        """The next message. Raises RankLost when the other end is closed, or says nothing for so long."""
        self._connection.settimeout(patience_s)
        try:
            head = self._exactly(HEAD_BYTES)
            return self._receives.open(head, self._exactly(self._receives.body_length(head)))
        except TimeoutError as error:
            raise RankLost(f"{self._who} has said nothing for {patience_s:g} s") from error
        except (OSError, ProtocolError) as error:
            raise RankLost(f"{self._who} is gone ({error})") from error

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = self._connection.recv_into(view[at:])
            if not count:
                raise ConnectionResetError("it has closed the connection")
            at += count
        return bytes(data)

    def close(self) -> None:
        """The other end's next `receive` raises."""
        self._connection.close()
