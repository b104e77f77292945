"""A pool for tests and benchmarks: Mooncake's master, and other hosts' clients, as processes.

    python -m forebay.testing.mooncake MASTER SEGMENT_BYTES     a client that lends memory until its stdin ends
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from forebay.errors import TierUnavailable
from forebay.testing import standstill
from forebay.testing.ports import free_port
from forebay.tiers.mooncake.library import IBVERBS
from forebay.tiers.mooncake.options import Address, mooncake_options
from forebay.tiers.mooncake.remote import Remote, route_to

START_S = 60.0


def why_not() -> str:
    """Why Mooncake can't be used here; empty if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake isn't installed: pip install 'forebay[mooncake]'"
    try:
        ctypes.CDLL(IBVERBS)
    except OSError:
        return "Mooncake needs libibverbs1: apt-get install libibverbs1"
    return ""


class Master:
    """`mooncake_master` on a free port. `start` again after `kill` is a master that has forgotten everything."""

    def __init__(self, folder: Path, *, lease_ms: int = 500, client_ttl_s: int = 2) -> None:
        """`lease_ms`: so long what was read can't be evicted; `client_ttl_s`: so long a dead host counts as alive."""
        self.address = Address("127.0.0.1", free_port())
        self.metrics = Address("127.0.0.1", free_port())
        self._folder = folder
        self._flags = ["-default_kv_lease_ttl", str(lease_ms), "-client_ttl", str(client_ttl_s)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it; returns when it answers."""
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None, why_not()
        command = [
            str(Path(spec.origin).parent / "mooncake_master"), "-rpc_address", self.address.host,
            "-rpc_port", str(self.address.port), "-metrics_host", self.metrics.host,
            "-metrics_port", str(self.metrics.port), *self._flags,
        ]  # fmt: skip
        with open(self._folder / "mooncake_master.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while True:
            try:
                route_to(self.address)
                return self
            except TierUnavailable:
                if self.process.poll() is None and time.monotonic() < end:
                    time.sleep(0.02)
                    continue
                self.kill()
                told = (self._folder / "mooncake_master.log").read_text(errors="replace")
                raise AssertionError(f"mooncake_master didn't start in {START_S} s: {told[-3000:]}") from None

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """It answers nothing from now on."""
        assert self.process is not None
        standstill.pause(self.process.pid)

    def resume(self) -> None:
        """It goes on."""
        assert self.process is not None
        standstill.resume(self.process.pid)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Member:
    """Another host of the pool: a process that lends memory and does nothing else."""

    def __init__(self, master: Master, segment_bytes: int = 256 << 20) -> None:
        """Returns when it has joined."""
        command = [sys.executable, "-m", "forebay.testing.mooncake", str(master.address), str(segment_bytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stderr is not None
        if self.process.stdout.readline() != b"joined\n":
            raise AssertionError(self.process.stderr.read().decode(errors="replace"))

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def pause(self) -> None:
        """Whoever reads from it or writes to it waits, from now on."""
        standstill.pause(self.process.pid)

    def resume(self) -> None:
        """It goes on."""
        standstill.resume(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def main() -> int:
    """Lend memory to a pool."""
    master, segment = sys.argv[1:]
    options = {"master": master, "segment_bytes": int(segment), "trusted_network": True}
    remote = Remote("member", mooncake_options("member", options))
    print("joined", flush=True)
    sys.stdin.read()
    remote.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
