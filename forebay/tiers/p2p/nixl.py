"""NIXL: a peer's memory is read straight into ours, without its processor's help where the fabric can.

All calls to the agent are made on one thread of its own: on one host the copy happens inside `transfer()`, and the
agent's own progress thread would keep a core busy for ever. NIXL has no timeout, so there is one here; a transfer
that is given up may still write, and only the end of this process stops it (`Unfenced`).

Whoever has the agent's metadata can read and write the whole pool: only peers that are trusted with that get it.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forebay.errors import ConfigError, TierUnavailable
from forebay.tiers.p2p.errors import PeerLost, TooLate, Unfenced
from forebay.tiers.p2p.wire import PIECE_BYTES

log = logging.getLogger("forebay.tier.p2p")

MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
SLOWEST_BYTES_S = 50 << 20
"""A transfer that is slower than this, after `stall_s`, is given up."""
POLL_S = 0.0002


def _api() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError("p2p with bulk = \"nixl\" takes NIXL: pip install forebay[p2p]")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class NixlAgent:
    """One agent, with the pool's extents registered. Raises ConfigError without the package, TierUnavailable without
    UCX. `loopback` keeps UCX on this host's loopback, unless the environment says otherwise."""

    def __init__(self, name: str, *, loopback: bool) -> None:
        if loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
            os.environ.setdefault("UCX_TLS", "cma,tcp,self")
        api = _api()
        self.thread = ThreadPoolExecutor(1, "p2p-nixl")
        self._extents: dict[int, int] = {}
        self._peers: dict[str, bytes] = {}
        self._metadata = b""
        self._lock = threading.Lock()
        self.epoch = 0
        self.counts: Counter[str] = Counter()
        try:
            self._agent = self.thread.submit(self._create, api, name).result()
        except Exception as error:
            self.thread.shutdown(wait=False)
            raise TierUnavailable(f"p2p: NIXL's UCX can't be used here: {error!r}; set bulk = \"auto\"") from error

    @staticmethod
    def _create(api: Any, name: str) -> Any:
        return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))

    def attach(self, extent: int, memory: memoryview) -> None:
        """Register an extent, on the agent's thread, some time soon."""
        self.thread.submit(self._attach, extent, memory)

    def _attach(self, extent: int, memory: memoryview) -> None:
        address = _address(memory)
        try:
            self._agent.register_memory([(address, len(memory), 0, "")], "DRAM")
            metadata = self._agent.get_agent_metadata()
        except Exception:
            self.counts["register_failures"] += 1
            log.exception("p2p: NIXL doesn't take extent %d; chunks in it go another way", extent)
            return
        with self._lock:
            self._extents[extent], self._metadata = address, metadata
            self.epoch += 1

    def metadata(self) -> bytes:
        """For peers that may read this host's memory."""
        with self._lock:
            return self._metadata

    def address(self, extent: int, offset: int) -> int:
        """Where a piece of an extent lies; 0 for one that isn't registered."""
        with self._lock:
            base = self._extents.get(extent, 0)
        return base + offset if base else 0

    def attached(self, extent: int) -> bool:
        """May transfers write into this extent?"""
        return extent in self._extents

    def meet(self, metadata: bytes) -> str:
        """Take a peer's metadata; its agent's name. On the agent's thread. Raises PeerLost."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise PeerLost(f"NIXL doesn't take the peer's metadata: {error!r}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, agent: str) -> None:
        """Forget a peer. On the agent's thread."""
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:
            log.debug("p2p: NIXL can't forget %s: %r", agent, error)

    def read(self, agent: str, address: int, memory: memoryview, due: float, stall_s: float) -> None:
        """Fill `memory` from a peer's. On the agent's thread; blocks.

        Raises PeerLost, TooLate before anything has begun, Unfenced if it had to be given up.
        """
        now = time.monotonic()
        if now >= due:
            raise TooLate("the deadline has passed")
        until = min(due, now + stall_s + len(memory) / SLOWEST_BYTES_S)
        try:
            handle = self._begin(agent, address, memory)
        except Exception as error:
            raise PeerLost(f"NIXL can't begin: {error!r}") from error
        state = "PROC"
        try:
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < until:
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            state = "ERR"
            raise PeerLost(f"NIXL: {error!r}") from error
        finally:
            self._release(handle)
        if state == "PROC":
            self.counts["given_up"] += 1
            raise Unfenced(f"a NIXL transfer from {agent} was given up")
        if state != "DONE":
            raise PeerLost(f"NIXL ended with {state}")

    def _begin(self, agent: str, address: int, memory: memoryview) -> Any:
        base, length = _address(memory), len(memory)
        pieces = [(at, min(PIECE_BYTES, length - at)) for at in range(0, length, PIECE_BYTES)]
        ours = self._agent.get_xfer_descs([(base + at, size, 0) for at, size in pieces], "DRAM")
        theirs = self._agent.get_xfer_descs([(address + at, size, 0) for at, size in pieces], "DRAM")
        return self._agent.initialize_xfer("READ", ours, theirs, agent)

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            log.debug("p2p: NIXL can't release a transfer: %r", error)

    def progress(self) -> None:
        """Let those who read from us over TCP go on. On the agent's thread."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Take no more work."""
        self.thread.shutdown(wait=False, cancel_futures=True)
