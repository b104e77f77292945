"""Chunks over plain TCP, in place on both sides: for peers on this host, where nothing can listen in.

    -> magic "FBST" | ticket 16 | what u32 | group u32 | key 32 | capacity u64
    <- status u32 | length of the header u32 | length of the payload u64 | address u64 | epoch u64 | header | payload
    -> one byte, where only the place of the payload was asked for: it has been read (by NIXL)

One chunk after another on a connection. A ticket comes with Welcome, over the control connection, so whoever may ask
there may ask here. Both sides (`stream_server.py`, `streams.py`) run on threads, every call with a timeout.
"""

from __future__ import annotations

import socket
import struct

MAGIC = b"FBST"
REQUEST = struct.Struct("<4s16sII32sQ")
REPLY = struct.Struct("<IIQQQ")
ALL, PLACE = range(2)
OK, MISSING, TOO_LARGE, NO_TICKET = range(4)
SOCKET_BUFFER_BYTES = 4 << 20

_TIMEVAL = struct.Struct("ll")


def tune(connection: socket.socket) -> None:
    """Large buffers, no waiting for more to send, and calls that wait as `limit` says."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def limit(connection: socket.socket, seconds: float) -> None:
    """How long each call may wait from now on: the kernel's timeout, which costs no second system call for each."""
    value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6) + 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
