"""One host: the files of a pool that outlive its daemon, and one real daemon after another over them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from forebay.errors import ForebayError
from forebay.events.sockets import Sockets
from forebay.kvstore.announce import Announcer
from forebay.kvstore.cascade import TierTraffic
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.core import StoreCore
from forebay.kvstore.daemon import Daemon
from forebay.kvstore.extents import ClientLocks, PoolFiles
from forebay.kvstore.facts import HostFact
from forebay.kvstore.identity import decode_namespace
from forebay.kvstore.limits import Limits
from forebay.kvstore.server import Connection
from forebay.kvstore.service import StoreService
from forebay.testing.simulate.loop import Process
from forebay.testing.simulate.net import Borrowed, End, SimTransport
from forebay.testing.simulate.pool import SimPool
from forebay.tiers.host import TierHost
from forebay.tiers.supervise import Patience

if TYPE_CHECKING:
    from forebay.testing.simulate.world import World

PATIENCE = Patience(
    start_s=2.0, stop_s=0.5, heartbeat_s=0.2, hang_s=0.4, store_s=1.0, backoff_first_s=0.02, backoff_max_s=0.2
)
EPOCH_S = 1_800_000_000.0
"""What the wall clock shows when a simulation begins."""


@dataclass(frozen=True)
class SimConfig(StoreConfig):
    """A store's settings with extents far below what a real one takes."""

    small_extent_bytes: int = 1 << 16
    small_extents: int = 4
    drawn: Limits = field(default_factory=Limits)

    @property
    def extent_bytes(self) -> int:
        return self.small_extent_bytes

    @property
    def extents(self) -> int:
        return self.small_extents

    @property
    def limits(self) -> Limits:
        return self.drawn


class SimConnection(Connection):
    """A connection over a simulated end: descriptors go out through it."""

    def _plain_socket(self) -> Any:
        assert self._transport is not None
        return Borrowed(self._transport.get_extra_info("socket"))


class SimAnnouncer(Announcer):
    """Looks at every fact before it is told."""

    check: Callable[[HostFact], None] = staticmethod(lambda fact: None)

    def host(self, fact: HostFact) -> None:
        self.check(fact)
        super().host(fact)


@dataclass
class SimDaemon(Daemon):
    """The real daemon with simulated clock, randomness, sockets and child processes."""

    node: Node = field(kw_only=True)
    process: Process = field(kw_only=True)
    pool: SimPool = field(kw_only=True)
    core: StoreCore | None = None
    service: StoreService | None = None
    ready: bool = False
    checked_at: int = -1
    checked_as: tuple[int, ...] = ()

    async def serve(self) -> None:
        """From start to a clean stop."""
        try:
            clean = await self._with_pool(None, self.pool)
        except ForebayError:
            # A tier could not start: the command ends, and whoever watches it starts another.
            self.node.world.count("starts_failed")
            clean = self.node.boots == 1
            self.process.at_exit.append(lambda: self.node.world.chaos.start_again(self.node))
        others = [task for task in self.node.world.loop.tasks_of(self.process) if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.pool.close(remove=clean)
        self.process.kill()

    def _random(self, count: int) -> bytes:
        return self.node.world.rng.randbytes(count)

    def _clock(self) -> float:
        return EPOCH_S + self.node.world.loop.time()

    def _announcer(self, boot: bytes) -> Announcer:
        world, node = self.node.world, self.node
        events = f"tcp://127.0.0.1:{node.port}" if world.plan.subscribers else None
        replay = f"tcp://127.0.0.1:{node.port + 1}" if world.plan.replay else None
        sockets = cast(Sockets, world.events.sockets(self.process))
        announcer = SimAnnouncer(boot, events, replay, node.name, clock=self._clock, sockets=sockets)
        announcer.check = lambda fact: world.checks.fact(self, fact)  # type: ignore[method-assign]
        return announcer

    def _adopt(self, core: StoreCore, pool: PoolFiles, locks: ClientLocks) -> int:
        self.core = core
        self.node.world.count("adoptions", len(pool.existing()) > 0)
        adopted = super()._adopt(core, pool, locks)
        self.node.world.count("adopted_chunks", adopted)
        return adopted

    async def _start_tiers(self, service: StoreService, pool: PoolFiles) -> None:
        plan = self.node.world.plan
        for kind, copy in zip(plan.tiers, plan.copies, strict=True):
            await self._start_sim_tier(service, pool, kind, copy)

    async def _start_sim_tier(self, service: StoreService, pool: PoolFiles, name: str, copy: str) -> None:
        owner = self._random(16)
        tier = TierHost(
            name, name, {},
            on_finished=lambda results: service.finished(name, results),
            on_changes=lambda changes: service.changed(name, changes),
            lock_fd=service.locks.create(owner), patience=PATIENCE,
            new_child=lambda lock: self.node.world.tiers.child(self, name, lock),
        )  # fmt: skip
        self.process.at_exit.append(lambda: _close_descriptors(tier))
        await tier.start(dict(pool.descriptors))
        service.tiers[name] = tier
        service.cascade.tiers[name] = TierTraffic(name, owner, copy)
        for encoded in pool.saved_namespaces():
            tier.note_namespace(decode_namespace(encoded).id, encoded)

    async def _serve(self, listener: object, service: StoreService) -> Any:
        self.service = service

        def accept(end: End) -> None:
            connection = SimConnection(service, service.core.limits, self._allowed)
            service.connections.add(connection)
            SimTransport(end, connection)

        self.node.world.net.listen(self.node.address, self.process, accept)
        return _Listening(self)

    def _ready(self, adopted: int, extents: int) -> None:
        self.ready = True


@dataclass
class _Listening:
    daemon: SimDaemon

    def close(self) -> None:
        """As asyncio's server: nobody new comes in."""
        self.daemon.node.world.net.unlisten(self.daemon.node.address)


def _close_descriptors(tier: TierHost) -> None:
    """What the kernel does to a tier host's copies when the daemon dies."""
    for descriptor in tier._extents.values():
        os.close(descriptor)
    tier._extents.clear()
    if tier._lock_fd is not None:
        os.close(tier._lock_fd)
        tier._lock_fd = None
    channel = tier._supervisor.channel
    for out in channel._out if channel is not None else ():
        for descriptor in out.descriptors:
            os.close(descriptor)


class Node:
    """A host of the simulated cluster. `daemon` is the one that runs, or ran last."""

    def __init__(self, world: World, index: int, folder: Path) -> None:
        self.world, self.index = world, index
        self.name = f"node{index}"
        self.address = f"{self.name}.sock"
        self.port = 20000 + 100 * index
        self.folder = folder
        self.boots = 0
        self.daemon: SimDaemon | None = None

    @property
    def running(self) -> SimDaemon | None:
        """The daemon, if there is a living one."""
        daemon = self.daemon
        return daemon if daemon is not None and daemon.process.alive else None

    @property
    def serving(self) -> bool:
        """Is there a daemon that has started and isn't about to stop?"""
        return self.running is not None and self.running.ready and not self.running._stop.is_set()

    def start(self) -> SimDaemon:
        """Start a daemon over whatever the last one left."""
        assert self.running is None
        plan = self.world.plan
        self.boots += 1
        process = Process(f"{self.name}.{self.boots}", self.world.loop, node=self.index)
        pool = SimPool(self.folder, plan.extent_bytes, process=process)
        pool.open()
        config = SimConfig(
            Path(self.address), small_extent_bytes=plan.extent_bytes, small_extents=plan.extents, pool_dir=self.folder,
            tenants=plan.rules, drawn=plan.limits, policy=plan.policy,
        )  # fmt: skip
        daemon = SimDaemon(config, node=self, process=process, pool=pool)
        process.at_exit.append(pool.abandon)
        self.daemon = daemon
        process.spawn(daemon.serve())
        return daemon

    def kill(self) -> None:
        """SIGKILL."""
        if self.running is not None:
            self.running.process.kill()

    def stop_cleanly(self) -> None:
        """SIGTERM."""
        if self.running is not None:
            self.running.process.call(self.running._stop.set)
