"""Tier processes: the real host, channel, link and service on both sides of a simulated socket pair."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from forebay.errors import ForebayError, ProtocolError
from forebay.testing.simulate.bucket import Bucket, BucketTier
from forebay.testing.simulate.disk import SimDisk
from forebay.testing.simulate.disktier import DiskTier
from forebay.testing.simulate.files import Directory
from forebay.testing.simulate.loop import Process
from forebay.testing.simulate.net import End
from forebay.testing.simulate.peer import PeerTier
from forebay.tiers.base import ChunkId, SecondaryTier
from forebay.tiers.child import Child
from forebay.tiers.link import DaemonLink
from forebay.tiers.messages import Start, Started, StartFailed
from forebay.tiers.service import TierService

if TYPE_CHECKING:
    from forebay.testing.simulate.node import Node, SimDaemon
    from forebay.testing.simulate.world import World


class SimChild:
    """What the supervisor asks of a tier's process."""

    def __init__(self, world: World, daemon: SimDaemon, name: str, lock_fd: int | None, pid: int) -> None:
        self.world, self.node, self.tier, self.pid = world, daemon.node, name, pid
        self._parent = daemon.process
        self.process = Process(f"{daemon.process.name}/{name}", world.loop, parent=daemon.process)
        self.connection, theirs = world.net.pair(daemon.process, self.process)
        self.dead = asyncio.Event()
        self.returncode: int | None = None
        self._lock = os.dup(lock_fd) if lock_fd is not None else -1
        self.runner = TierRunner(self, theirs)
        self.process.at_exit.append(self._exit)
        daemon.process.at_exit.append(self.process.kill)
        self.process.call_soon(self.runner.begin)

    def _exit(self) -> None:
        if self.returncode is None:
            self.returncode = -9
        if self._lock >= 0:
            os.close(self._lock)
        self.runner.drop()
        self._parent.call_soon(self.dead.set)

    def kill(self) -> None:
        """SIGKILL; a process deep in the kernel takes a while to die, and may write meanwhile."""
        if not self.process.alive:
            return
        if self.world.plan.has("tier_dies_slowly") and not self.world.healthy:
            self.world.fault("tier_dies_slowly")
            self.world.loop.call_later(0.3, self.process.kill, context=self.world.kernel)
        else:
            self.process.kill()

    def ended(self) -> None:
        """It has returned from main."""
        self.returncode = 0
        self.process.kill()


class TierRunner:
    """The tier process's loop: as `forebay.tiers.process`, driven by the simulated loop instead of by `poll`."""

    def __init__(self, child: SimChild, end: End) -> None:
        self._child, self._end = child, end
        self._loop = child.world.loop
        self._service: TierService | None = None
        self._look: asyncio.TimerHandle | None = None
        self._woken = False
        self.link = DaemonLink(cast(Any, end))

    def begin(self) -> None:
        """First step of the process."""
        self._loop.add_reader(self._end.fileno(), self._pump)

    def drop(self) -> None:
        """What the kernel does at its end."""
        with suppress(OSError):
            self.link.close()

    def wake(self) -> None:
        """The tier has something new."""
        if not self._woken:
            self._woken = True
            self._child.process.call_soon(self._pump)

    def _pump(self) -> None:
        self._woken = False
        try:
            for message in self.link.receive():
                self._take(message)
                if not self._child.process.alive:
                    return
        except ProtocolError as error:
            self._child.world.fail(f"a tier process was sent garbage: {error}")
        if self._service is not None:
            self._service.progress()
            if self._service.stopping or self.link.closed:
                self._service.close()
                self._child.ended()
                return
            self._look_later(self._service.next_look_s())
        elif self.link.closed:
            self._child.ended()

    def _look_later(self, wait: float | None) -> None:
        if self._look is not None:
            self._look.cancel()
        if self.link.out_bytes:
            wait = 0.001
        self._look = self._loop.call_later(max(wait, 0.0005), self._pump) if wait is not None else None

    def _take(self, message: Any) -> None:
        if self._service is not None:
            self._service.handle(message)
            return
        assert isinstance(message, Start)
        try:
            tier = self._child.world.tiers.open(self._child.node, message.kind, self._child.process)
        except ForebayError as error:
            self.link.send(StartFailed(type(error).__name__, str(error)))
            self._child.ended()
            return
        tier.set_waker(self.wake)
        self._service = TierService(tier, self.link, clock=self._loop.time)
        self.link.send(Started(self._child.pid))


class Tiers:
    """All tier processes of a world, and the devices behind them, which outlive every process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.children: list[SimChild] = []
        self.disks: dict[int, SimDisk] = {}
        self.directories: dict[int, Directory] = {}
        self.bucket = Bucket(world)

    def child(self, daemon: SimDaemon, name: str, lock_fd: int | None) -> Child:
        """Start a tier's process."""
        child = SimChild(self._world, daemon, name, lock_fd, 1000 + len(self.children))
        self.children.append(child)
        return cast(Child, child)

    def living(self) -> list[SimChild]:
        """Processes that can still be hurt."""
        return [child for child in self.children if child.process.alive]

    def disk(self, node: Node) -> SimDisk:
        """A node's disk."""
        if node.index not in self.disks:
            self.disks[node.index] = SimDisk(self._world)
        return self.disks[node.index]

    def directory(self, node: Node) -> Directory:
        """Where a node's real file tier keeps its files."""
        if node.index not in self.directories:
            self.directories[node.index] = Directory(self._world, self._world.folder / f"files{node.index}")
        return self.directories[node.index]

    def devices(self) -> list[tuple[int, str, SimDisk | Directory]]:
        """All disks with the node and the tier that they are of."""
        disks = [(index, "disk", disk) for index, disk in sorted(self.disks.items())]
        return [*disks, *((index, "fs", directory) for index, directory in sorted(self.directories.items()))]

    def stored(self) -> Iterator[tuple[str, ChunkId, bytes]]:
        """Every chunk that a tier would find, with the bytes that it has of it."""
        for chunk, blob in self.bucket.objects.items():
            yield "bucket", chunk, blob
        for _, kind, device in self.devices():
            if not self._world.plan.has("disk_error"):  # what couldn't be unlinked is still there, if out of sight
                yield from ((kind, chunk, blob) for chunk, blob in device.chunks())

    def open(self, node: Node, kind: str, process: Process) -> SecondaryTier:
        """The tier object of a process."""
        match kind:
            case "disk":
                return DiskTier(self._world, process, kind, self.disk(node))
            case "fs":
                return self.directory(node).open(kind, process)
            case "bucket":
                return BucketTier(self._world, process, kind, self.bucket)
            case _:
                return PeerTier(self._world, process, kind, node)
