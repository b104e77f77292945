"""A whole store in this process: the real daemon on this thread's loop, its tier's process as a thread.

So faults can be put into any call of either, and what is left afterwards can be looked at from inside.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from forebay.kvstore.cascade import TierTraffic
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.daemon import Daemon
from forebay.kvstore.extents import PoolFiles, pool_path
from forebay.kvstore.header import first_bad_granule, granule_checksums
from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.protocol import Found, NewChunk, Written
from forebay.kvstore.service import StoreService
from forebay.tiers.child import Child
from forebay.tiers.host import DEFAULT_PATIENCE, TierHost
from forebay.tiers.process import TierProcess
from forebay.tiers.rules import TierRule
from forebay.tiers.supervise import Patience
from tests.kvstore.running import prompt_of

HURRY = Patience(start_s=10.0, stop_s=5.0, heartbeat_s=0.1, hang_s=0.5, store_s=0.5, backoff_first_s=0.02)
"""So that a hang is soon found. On a busy machine that may be a false alarm, which costs a miss."""
SETTLE_S = 60.0
SPEC = Namespace(weights=b"f" * 32, groups=(GroupGeometry("full", "full", (0, 1), 4, 64, "float64"),), chunk_tokens=32)
"""One chunk of it takes a good quarter of a MiB: three fill an extent of the smallest size."""


class _TierThread(threading.Thread):
    """What a tier's process does, but for its signals."""

    def __init__(self, connection: socket.socket, ended: Callable[[], None]) -> None:
        super().__init__(name="tier-process", daemon=True)
        self._process = TierProcess(connection)
        self._ended = ended

    def run(self) -> None:
        try:
            self._process.serve()
        finally:
            self._process.close()
            self._ended()


class ThreadChild(Child):
    """A tier's process as a thread. A kill ends its socket; `unhang` has to let go of a call that hangs."""

    unhang: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, lock_fd: int | None) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.pid = os.getpid()
        self.dead = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._status: int | None = None
        # The flock belongs to the open file: a copy of the descriptor keeps it for as long as the thread lives.
        self._lock = -1 if lock_fd is None else os.dup(lock_fd)
        self._thread = _TierThread(theirs, self._thread_ended)
        self._thread.start()

    def _thread_ended(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        with suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        self._status = 0
        self.dead.set()

    @property
    def returncode(self) -> int | None:
        return self._status

    def reset(self) -> None:
        """The connection breaks; may be called from any thread."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        type(self).unhang()
        self.reset()


class InProcessDaemon(Daemon):
    """The daemon, with its tier as a thread, and its parts to be looked at."""

    service: StoreService

    def __init__(self, config: StoreConfig, patience: Patience = DEFAULT_PATIENCE) -> None:
        super().__init__(config)
        self.patience = patience
        self.child: ThreadChild | None = None
        self.ready = asyncio.Event()

    async def _start_tier(self, service: StoreService, pool: PoolFiles, name: str, rule: TierRule) -> None:
        def new_child(lock_fd: int | None) -> Child:
            self.child = ThreadChild(lock_fd)
            return self.child

        owner = os.urandom(16)
        tier = TierHost(
            name, rule.kind, rule.options,
            on_finished=lambda results: service.finished(name, results),
            on_changes=lambda changes: service.changed(name, changes),
            lock_fd=service.locks.create(owner), patience=self.patience, new_child=new_child,
        )  # fmt: skip
        await tier.start(dict(pool.descriptors))
        service.tiers[name] = tier
        service.cascade.tiers[name] = TierTraffic(name, owner, rule.copy, rule.pinned_share)

    async def _serve(self, listener: socket.socket | None, service: StoreService) -> asyncio.AbstractServer:
        self.service = service
        return await super()._serve(listener, service)

    async def _end_other_tasks(self) -> None:
        """The loop is not this store's alone; `settled` has waited for what reads the pool."""

    def _ready(self, adopted: int, extents: int) -> None:
        self.ready.set()

    def reset(self) -> None:
        """The connection to its tier breaks; may be called from any thread."""
        if self.child is not None:
            self.child.reset()

    def stop(self) -> None:
        """Tell it to stop."""
        self._stop.set()


def config(folder: Path, *, memory: int = 4 << 20, files: bool = True) -> StoreConfig:
    """A small store, its pool (in `pool/`, which is there) and files in a folder."""
    return StoreConfig(
        folder / "store.sock", memory=memory, extent=1 << 20, fs=folder / "files" if files else None,
        fs_quota=16 << 20, pool_dir=folder / "pool",
    )  # fmt: skip


def pool_of(folder: Path) -> Path:
    """Where that store's pool is."""
    return pool_path(folder / "pool", folder / "store.sock")


async def started(daemon: InProcessDaemon) -> asyncio.Task[int]:
    """Start a store; returns the task that ends with it. Raises what it raises."""
    run = asyncio.create_task(daemon.run())
    ready = asyncio.create_task(daemon.ready.wait())
    await asyncio.wait((run, ready), return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if run.done():
        run.result()
        raise AssertionError("the store ended without being told to")
    return run


async def whole(daemon: InProcessDaemon) -> asyncio.Task[int]:
    """Start a store and wait until all of its pool is there: what may be copied to tiers at a time is a share of it."""
    run = await started(daemon)
    until = asyncio.get_running_loop().time() + SETTLE_S
    while len(daemon.service.core.place.slots.extents) < daemon.config.extents:
        assert asyncio.get_running_loop().time() < until, "the pool did not grow"
        await asyncio.sleep(0.005)
    return run


def payload(key: bytes, tokens: int) -> bytes:
    """The bytes that belong under a key of SPEC."""
    return random.Random(key).randbytes(SPEC.groups[0].granule_bytes * (tokens // 16))


def chunks_of(tokens: list[int]) -> list[NewChunk]:
    """All chunks of a prompt, parents first."""
    prompt = prompt_of(SPEC, tokens)
    return [prompt.chunk(0, position) for position in range(prompt.positions)]


async def push(client: AsyncStoreClient, tokens: list[int]) -> int:
    """Store what is missing of a prompt; how many chunks were committed."""
    chunks = chunks_of(tokens)
    written = []
    for chunk, slot in zip(chunks, (await client.reserve(SPEC.id, "", chunks)).slots, strict=True):
        if slot.status == "reserved":
            data = payload(chunk.key, len(chunk.tokens) // 4)
            client.room(slot, len(data))[:] = data
            sums = granule_checksums(memoryview(data), SPEC.groups[0].granule_bytes)
            written.append(Written(slot.reservation, sums))
    return (await client.commit(written)).committed


async def pull(client: AsyncStoreClient, tokens: list[int], deadline_ms: int = 0) -> Found:
    """Look a prompt up, compare every byte that is served, and let go of it."""
    prompt = prompt_of(SPEC, tokens)
    found = await client.lookup(
        SPEC.id, prompt.root, prompt.tokens, prompt.keys, limit=len(tokens), deadline_ms=deadline_ms
    )
    compare(client, found)
    client.release([found.lease])
    return found


def compare(client: AsyncStoreClient, found: Found) -> None:
    """Every byte that a lookup serves is the one that was stored. Raises AssertionError."""
    granule = SPEC.groups[0].granule_bytes
    for chunk in found.chunks:
        served = client.payload(chunk)
        assert first_bad_granule(served, granule, client.checksums(chunk)) is None and client.intact(chunk)
        assert served == payload(chunk.key, chunk.tokens), "wrong bytes were served"


async def settled(service: StoreService, names: Sequence[str] = ("fs",)) -> None:
    """Wait until nothing is under way between the store and its tiers."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SETTLE_S
    while service.cascade.busy or len(service.core.chores) or any(not service.tiers[n].alive for n in names):
        assert loop.time() < until, "the store did not come to rest"
        await asyncio.sleep(0.005)
