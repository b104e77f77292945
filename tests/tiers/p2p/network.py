"""Hosts of their own: network namespaces joined by a bridge, for root on Linux with iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """Namespaces `NAME0`, `NAME1`, ... with addresses 10.199.N.1, .2, ... on a bridge in one more namespace."""

    def __init__(self, count: int) -> None:
        self._id = f"fb{os.getpid() % 100000}"
        self._net = os.getpid() % 250 + 1
        self._switch = f"{self._id}s"
        self._spaces = [f"{self._id}h{index}" for index in range(count)]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "name", "sw0", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "sw0", "up")
        for index, space in enumerate(self._spaces):
            run("ip", "netns", "add", space)
            pair = (f"p{index}", "type", "veth", "peer", "name", "e0", "netns", space)
            run("ip", "-n", self._switch, "link", "add", "name", *pair)
            run("ip", "-n", self._switch, "link", "set", f"p{index}", "master", "sw0", "up")
            run("ip", "-n", space, "addr", "add", f"{self.address(index)}/24", "dev", "e0")
            run("ip", "-n", space, "link", "set", "e0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")

    def address(self, index: int) -> str:
        return f"10.199.{self._net}.{index + 1}"

    def inside(self, index: int) -> Sequence[str]:
        """What to put before a command so that it runs on that host."""
        return ["ip", "netns", "exec", self._spaces[index]]

    @contextmanager
    def cut_off(self, index: int) -> Iterator[None]:
        """That host's link is down."""
        run("ip", "-n", self._switch, "link", "set", f"p{index}", "down")
        try:
            yield
        finally:
            run("ip", "-n", self._switch, "link", "set", f"p{index}", "up")

    @contextmanager
    def slow(self, index: int, rate: str) -> Iterator[None]:
        """What that host sends is limited to this rate."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        run("tc", "-n", self._spaces[index], "qdisc", "add", "dev", "e0", *shape)
        try:
            yield
        finally:
            run("tc", "-n", self._spaces[index], "qdisc", "del", "dev", "e0", "root")

    def close(self) -> None:
        for space in (*self._spaces, self._switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=30, check=False)


def why_not() -> str | None:
    """Why there can be none here, if so."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return "takes iproute2"
    try:
        Network(1).close()
    except (RuntimeError, OSError) as error:
        return f"this kernel makes no network namespaces: {error}"
    return None
