"""Ports of this host for servers that are about to be started."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

LOWEST = 20_000
_random = random.SystemRandom()  # tests seed the common one, and many of them run at a time


def free_port() -> int:
    """One that nobody listens on now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones that nobody listens on now. They aren't those that the kernel gives to outgoing connections, of
    which some process makes one at any moment. Raises OSError if there are none."""
    with contextlib.ExitStack() as open_now:
        return [_bound(open_now.enter_context(socket.socket())) for _ in range(count)]


def _bound(probe: socket.socket) -> int:
    for _ in range(1000):
        port = _random.randrange(LOWEST, max(_first_of_the_kernel(), LOWEST + 1000))
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    raise OSError(errno.EADDRINUSE, f"no port from {LOWEST} up is free")


def _first_of_the_kernel() -> int:
    """Where the ports begin that the kernel gives away."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
