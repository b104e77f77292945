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
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from forebay.errors import ConfigError, TierUnavailable
from forebay.tiers.p2p.errors import PeerLost, TooLate, Unfenced
from forebay.tiers.p2p.wire import PIECE_BYTES

log = logging.getLogger("forebay.tier.p2p")

MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
SLOWEST_BYTES_S = 50 << 20
"""A transfer that is slower than this, after `stall_s`, is given up."""
POLL_S = 0.0002
BATCH_BYTES = 8 << 20
"""Chunks that wait for one peer are read with one transfer until it has so much; one always is."""


def _api() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError("p2p with bulk = \"nixl\" takes NIXL: pip install forebay[p2p]")


@dataclass(frozen=True, slots=True)
class _Read:
    """One chunk that is to be read."""

    peer: str
    address: int
    memory: memoryview
    due: float
    stall_s: float
    done: Future[None]


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
        self._waiting: deque[_Read] = deque()
        self._closed = False
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

    def read_soon(self, peer: str, address: int, memory: memoryview, due: float, stall_s: float) -> Future[None]:
        """Fill `memory` from the memory of a peer, by its agent's name; from any thread, never blocks.

        What waits for one peer is read with one transfer. Ends with PeerLost, TooLate before anything has begun,
        Unfenced if it had to be given up.
        """
        read = _Read(peer, address, memory, due, stall_s, Future())
        with self._lock:
            if self._closed:
                read.done.set_exception(PeerLost("NIXL is being closed"))
                return read.done
            self._waiting.append(read)
            if len(self._waiting) == 1:
                self.thread.submit(self._next)
        return read.done

    def _next(self) -> None:
        """One transfer; what it leaves waits for its turn behind whatever else the agent has to do meanwhile."""
        now = time.monotonic()
        with self._lock:
            if self._closed:
                return
            peer, size = self._waiting[0].peer, 0
            batch: list[_Read] = []
            while self._waiting and self._waiting[0].peer == peer and (not batch or size < BATCH_BYTES):
                read = self._waiting.popleft()
                if read.done.set_running_or_notify_cancel():
                    batch.append(read)
                    size += len(read.memory)
            if self._waiting:
                self.thread.submit(self._next)
        late = [read for read in batch if now >= read.due]
        for read in late:
            read.done.set_exception(TooLate("the deadline has passed"))
        self._together([read for read in batch if read not in late])

    def _together(self, batch: list[_Read]) -> None:
        if not batch:
            return
        until = min(read.due for read in batch)
        size = sum(len(read.memory) for read in batch)
        until = min(until, time.monotonic() + min(read.stall_s for read in batch) + size / SLOWEST_BYTES_S)
        try:
            self._transfer(batch[0].peer, batch, until)
        except Exception as error:
            for read in batch:
                read.done.set_exception(error)
            return
        with self._lock:
            self.counts["transfers"] += 1
        for read in batch:
            read.done.set_result(None)

    def _transfer(self, peer: str, batch: list[_Read], until: float) -> None:
        try:
            handle = self._begin(peer, batch)
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
            raise Unfenced(f"a NIXL transfer from {peer} was given up")
        if state != "DONE":
            raise PeerLost(f"NIXL ended with {state}")

    def _begin(self, peer: str, batch: list[_Read]) -> Any:
        ours, theirs = [], []
        for read in batch:
            base, length = _address(read.memory), len(read.memory)
            for at in range(0, length, PIECE_BYTES):
                size = min(PIECE_BYTES, length - at)
                ours.append((base + at, size, 0))
                theirs.append((read.address + at, size, 0))
        local, remote = (self._agent.get_xfer_descs(pieces, "DRAM") for pieces in (ours, theirs))
        return self._agent.initialize_xfer("READ", local, remote, peer)

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
        with self._lock:
            self._closed = True
            self.thread.shutdown(wait=False, cancel_futures=True)
            waiting, self._waiting = self._waiting, deque()
        for read in waiting:
            if read.done.set_running_or_notify_cancel():
                read.done.set_exception(PeerLost("NIXL is being closed"))
