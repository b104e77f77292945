"""Which network interface ranks may use: loopback, unless somebody vouches for another one.

What ranks send each other is neither encrypted nor authenticated, as collectives never are. Left to itself gloo listens
on whatever address the host's name has.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from forebay.errors import ConfigError

LOOPBACK = "lo"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What tells the two libraries where to listen."""

_NET = Path("/sys/class/net")
_IFF_LOOPBACK = 0x8


def ranks_interface(trusted: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The interface for collectives. `trusted` is the one of `--trusted-network`. Raises ConfigError for any other that
    leaves this machine."""
    known = {name for _, name in socket.if_nameindex()}
    if trusted is not None and trusted not in known:
        there = ", ".join(sorted(known))
        raise ConfigError(f"--trusted-network {trusted}: there is no such interface; there are {there}")
    for variable in VARIABLES:
        wanted = environment.get(variable, "")
        if wanted and wanted != trusted and not _is_loopback(wanted):
            raise ConfigError(
                f"{variable} is {wanted}, but tensor parallel ranks talk over loopback only, since what they send is "
                f"neither encrypted nor authenticated: unset it, or give --trusted-network {wanted} if nobody else "
                "can reach that network"
            )
    return trusted or LOOPBACK


def use_interface(interface: str) -> None:
    """From now on the collectives of this process, and of those that it starts, use that interface."""
    for variable in VARIABLES:
        os.environ[variable] = interface


def _is_loopback(interface: str) -> bool:
    try:
        return bool(int((_NET / interface / "flags").read_text(), 16) & _IFF_LOOPBACK)
    except (OSError, ValueError):
        return False
