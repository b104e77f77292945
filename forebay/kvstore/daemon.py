"""`forebay store`: start, serve, stop.

    socket, pool directory  -> taken, or AlreadyRunning
    extents left behind     -> re-adopted, read in the background
    tiers                   -> a process each
    missing extents         -> granted on a thread while clients are served already
    SIGTERM, SIGINT         -> finish what tiers are being given, remove the pool, exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import uvloop

from forebay.errors import AlreadyRunning, ForebayError, NoSpace, ResourceError
from forebay.ipc.sockets import listen
from forebay.kvstore.announce import Announcer, placements
from forebay.kvstore.cascade import TierTraffic
from forebay.kvstore.collecting import Collector
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.core import StoreCore
from forebay.kvstore.extents import ClientLocks, PoolFiles, pool_path
from forebay.kvstore.identity import decode_namespace
from forebay.kvstore.leftovers import unheld
from forebay.kvstore.metrics import MetricsServer
from forebay.kvstore.policies.registry import PolicyChoice
from forebay.kvstore.readopt import readopt
from forebay.kvstore.server import Connection
from forebay.kvstore.service import StoreService
from forebay.tiers.rules import TierRule

log = logging.getLogger(__name__)

DRAIN_S = 10.0
TICK_S = 1.0


def run_store(config: StoreConfig) -> int:
    """Run a store until it is told to stop; returns the exit code. Raises ForebayError if it can't start."""
    return uvloop.run(Daemon(config).run())


@dataclass
class Daemon:
    """One store from start to stop."""

    config: StoreConfig
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Start, serve, stop. Whatever was taken is given back on every way out."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        listener = listen(self.config.socket, group=self.config.socket_group)
        pool = PoolFiles(pool_path(self.config.pool_dir, self.config.socket), self.config.extent_bytes)
        clean = fresh = opened = False
        try:
            fresh = not pool.path.exists()
            pool.open()
            opened = True
            clean = await self._with_pool(listener, pool)
        except (ForebayError, OSError) as error:
            # What could not start leaves nothing behind that wasn't there, unless somebody else has it now.
            clean = fresh and (opened or not isinstance(error, AlreadyRunning))
            if isinstance(error, ForebayError):
                raise
            why = f"the pool {pool.path} can't be used ({error.strerror or error})"
            raise ResourceError(f"{why}: choose another --pool-dir, or start again") from error
        finally:
            await self._end_other_tasks()
            listener.close()
            self.config.socket.unlink(missing_ok=True)
            pool.close(remove=clean)
        return 0

    async def _with_pool(self, listener: socket.socket | None, pool: PoolFiles) -> bool:
        boot = self._random(16)
        announcer = self._announcer(boot)
        core = StoreCore(
            pool, tell=announcer.host, first_generation=int(self._clock() * 1e9), tenants=self.config.tenants,
            limits=self.config.limits, clock=asyncio.get_running_loop().time,
            policy=PolicyChoice(self.config.policy, self.config.attention_tokens),
        )  # fmt: skip
        announcer.core = core
        locks = ClientLocks(pool.path / "clients")
        service = StoreService(core, pool, locks, boot, announcer)
        service.info.update(self._info(pool))
        adopted = self._adopt(core, pool, locks)
        self._tell_of_leftovers(pool)
        self._check_room(pool, len(core.place.slots.extents))
        first = await self._grow(core, pool, 1)
        background: set[asyncio.Task[None]] = set()
        metrics = MetricsServer(self.config.metrics, service)
        try:
            await self._start_tiers(service, pool)
            await metrics.start()
            server = await self._serve(listener, service)
            for job in (
                self._grow_all(core, pool, service),
                service.read_adopted(),
                self._ticks(service),
                announcer.serve_replays(),
            ):
                background.add(asyncio.create_task(self._watched(core, job)))
            self._ready(adopted, first)
            await self._stop.wait()
            server.close()
            await service.drain(DRAIN_S)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            for connection in list(service.connections):
                connection.abort()
            for tier in service.tiers.values():
                await tier.stop()
            await metrics.stop()
            announcer.close()
            service.stop()
        return True

    async def _end_other_tasks(self) -> None:
        """Whoever reads the pool on a thread has to let go of it before it is unmapped."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_default_executor()

    # --- what a simulation puts others in place of ------------------------------------------------------

    def _random(self, count: int) -> bytes:
        return secrets.token_bytes(count)

    def _clock(self) -> float:
        return time.time()

    def _announcer(self, boot: bytes) -> Announcer:
        return Announcer(
            boot, self.config.events, self.config.replay, socket.gethostname(), endpoints=self.config.endpoints,
            tiers=placements(self.config.all_tiers), keys=self.config.event_keys,
        )  # fmt: skip

    def _info(self, pool: PoolFiles) -> dict[str, str]:
        return {
            "socket": str(self.config.socket),
            "pool": str(pool.path),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    # --- memory ----------------------------------------------------------------------------------------

    def _adopt(self, core: StoreCore, pool: PoolFiles, locks: ClientLocks) -> int:
        began, busy = time.perf_counter(), time.thread_time()
        left = pool.existing()
        for extent in left[self.config.extents :]:
            pool.discard(extent)
        left = left[: self.config.extents]
        for encoded in pool.saved_namespaces():
            try:
                core.remember(decode_namespace(encoded))
            except ValueError as error:  # whole, as its name says, and still not ours
                pool.refuse(f"a namespace in it: {error}")
        found = readopt(core, pool, left, locks.writers_of)
        for client in locks.known():
            if client not in core.quarantine and not locks.writers_of(client):
                locks.forget(client)
        if left:
            took = time.perf_counter() - began
            core.counters.add("host.readopt_seconds", took)
            core.counters.add("host.readopt_cpu_seconds", time.thread_time() - busy)
            log.info(
                "re-adopted %d chunks in %.3f s (%d slots freed, %d quarantined, %d corrupt headers)",
                found.chunks, took, found.freed, found.quarantined, found.corrupt,
            )  # fmt: skip
        return found.chunks

    def _tell_of_leftovers(self, pool: PoolFiles) -> None:
        left = unheld(self.config.pool_dir, pool.path)
        if left:
            log.warning(
                "%d pools of stores that were killed hold %d MiB of %s: `forebay fsck --pools` lists them, "
                "--repair removes them", len(left), sum(found.bytes for found in left) >> 20, self.config.pool_dir,
            )  # fmt: skip

    def _check_room(self, pool: PoolFiles, have: int) -> None:
        wanted = (self.config.extents - have) * self.config.extent_bytes
        stat = os.statvfs(pool.path)
        free = stat.f_bavail * stat.f_frsize
        if wanted > free:
            raise NoSpace(
                f"{self.config.pool_dir} has {free >> 20} MiB free, --memory needs {wanted >> 20} MiB more: "
                "lower --memory, enlarge that tmpfs, or choose another --pool-dir"
            )

    async def _grow(self, core: StoreCore, pool: PoolFiles, count: int) -> int:
        """Grant up to `count` more extents, each on a thread: first touch of memory is slow."""
        for _ in range(count):
            extents = core.place.slots.extents
            if len(extents) >= self.config.extents:
                break
            extent = next(i for i in range(self.config.extents + len(extents)) if i not in extents)
            await asyncio.to_thread(pool.create, extent)
            core.place.add_extent(extent, len(pool.map(extent)))
        return len(core.place.slots.extents)

    async def _grow_all(self, core: StoreCore, pool: PoolFiles, service: StoreService) -> None:
        try:
            while len(core.place.slots.extents) < self.config.extents:
                before = set(core.place.slots.extents)
                await self._grow(core, pool, 1)
                for extent in set(core.place.slots.extents) - before:
                    for tier in service.tiers.values():
                        tier.attach(extent, pool.descriptors[extent])
        except NoSpace as error:
            # Somebody else filled the tmpfs meanwhile: serve with what there is, and say so.
            core.counters.add("host.extents_missing", self.config.extents - len(core.place.slots.extents))
            log.error("the pool stays at %d MiB: %s", core.place.slots.total_bytes >> 20, error)

    # --- parts -----------------------------------------------------------------------------------------

    async def _start_tiers(self, service: StoreService, pool: PoolFiles) -> None:
        for name, rule in self.config.all_tiers.items():
            await self._start_tier(service, pool, name, rule)

    async def _start_tier(self, service: StoreService, pool: PoolFiles, name: str, rule: TierRule) -> None:
        from forebay.tiers.host import HostLimits, TierHost
        from forebay.tiers.supervise import Patience

        owner = self._random(16)
        tier = TierHost(
            name, rule.kind, rule.options,
            on_finished=lambda results: service.finished(name, results),
            on_changes=lambda changes: service.changed(name, changes),
            lock_fd=service.locks.create(owner),
            limits=HostLimits(rule.store_queue, rule.load_queue),
            patience=Patience(hang_s=self.config.tier_hang, heartbeat_s=min(2.0, self.config.tier_hang / 4)),
        )  # fmt: skip
        await tier.start(dict(pool.descriptors))
        service.tiers[name] = tier
        service.cascade.tiers[name] = TierTraffic(name, owner, rule.copy, rule.pinned_share)
        for namespace_id, encoded in ((n, e) for e in pool.saved_namespaces() for n in [decode_namespace(e).id]):
            tier.note_namespace(namespace_id, encoded)

    async def _serve(self, listener: socket.socket | None, service: StoreService) -> asyncio.AbstractServer:
        def connected() -> Connection:
            connection = Connection(service, service.core.limits, self._allowed)
            service.connections.add(connection)
            return connection

        return await asyncio.get_running_loop().create_unix_server(connected, sock=listener)

    def _allowed(self, uid: int) -> bool:
        # With a group, the socket's mode has decided already: all its members are one trust domain.
        return uid in (os.getuid(), 0) or self.config.socket_group is not None

    async def _ticks(self, service: StoreService) -> None:
        collector = Collector(lambda: service.core.generation)
        collector.freeze()
        while True:
            await asyncio.sleep(TICK_S)
            service.tick()
            collector.tick()

    @staticmethod
    async def _watched(core: StoreCore, job: Coroutine[Any, Any, None]) -> None:
        """A background job that fails is a bug, but no reason to stop serving: it is told and counted."""
        try:
            await job
        except Exception:
            core.counters.add("store.background_failures")
            log.exception("a background job of the store has failed")

    def _ready(self, adopted: int, extents: int) -> None:
        note = f", {adopted} chunks re-adopted" if adopted else ""
        print(
            f"forebay store: ready on {self.config.socket}, {self.config.memory >> 20} MiB of pool{note}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
