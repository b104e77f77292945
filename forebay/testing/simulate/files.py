"""The real file tier on virtual time: its threads are steps, its device fails, and its directory loses power.

Files, manifest and locks are real ones on tmpfs. What a power loss does to them is done to them afterwards: files
that weren't synced become nothing, a torn front or zeros, or are gone; removed ones are back; the manifest is of
another boot.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.testing.simulate.loop import Process
from forebay.tiers.base import ChunkId
from forebay.tiers.fs.device import AlignedBuffer, Device, Expected, Loaded, TempFile
from forebay.tiers.fs.keeper import Keeper
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import Paths, chunk_of_name
from forebay.tiers.fs.pool import Task, WorkPool
from forebay.tiers.fs.tier import FsTier

if TYPE_CHECKING:
    from forebay.testing.simulate.world import World


class SimWorkPool(WorkPool):
    """Each task runs in one step at some later moment, in whatever order the moments come."""

    def __init__(self, world: World, process: Process, bytes_max: int) -> None:
        self._world, self._process, self._bytes_max = world, process, bytes_max
        self._waiting: dict[int, Task] = {}
        self._serial = 0
        self._closing = False
        self.bytes = self.crashes = 0

    def submit(self, task: Task) -> bool:
        if self._closing or (self.bytes and self.bytes + task.size > self._bytes_max):
            return False
        self._serial += 1
        self.bytes += task.size
        self._waiting[self._serial] = task
        wait = self._world.tier_rng.choice((0.0002, 0.001, 0.005))
        if self._world.strikes("tier_slow", 0.1, self._world.tier_rng):
            wait = self._world.tier_rng.choice((0.05, 0.3, 0.9))
        self._world.loop.call_later(wait, self._run, self._serial)
        return True

    def _run(self, serial: int) -> None:
        task = self._waiting.pop(serial, None)
        if task is not None:
            task.run()
            self.bytes -= task.size

    def close(self, timeout_s: float) -> bool:
        self._closing = True
        for serial in list(self._waiting):
            task = self._waiting.pop(serial)
            task.abandon()
            self.bytes -= task.size
        return True


class SimKeeper(Keeper):
    """The keeper's turns, from the simulated loop."""

    world: World

    def start(self) -> None:
        self._next(0.0)

    def _next(self, wait: float) -> None:
        self.world.loop.call_later(wait, self._once)

    def _once(self) -> None:
        if self.working:
            self.turn()
            self._next(0.02 if self._kicked.is_set() or self._walk is not None else 0.3)

    def close(self) -> None:
        self._closing = True


class _SimFsTier(FsTier):
    ended: Callable[[], None]

    def close(self) -> None:
        super().close()
        self._shelf.manifest._env.close()
        self.ended()


@dataclass
class Directory:
    """What a node's file tier works in, and what isn't safe there yet. Outlives every process."""

    world: World
    path: Path
    unsynced: dict[str, None] = field(default_factory=dict)
    removed: dict[str, bytes] = field(default_factory=dict)
    tier: FsTier | None = None

    def open(self, name: str, process: Process) -> FsTier:
        """The tier, in a new process."""
        self.path.mkdir(exist_ok=True)
        world = self.world

        def keeper(*args: Any, **more: Any) -> Keeper:
            made = SimKeeper(*args, **more)
            made.world = world
            return made

        options = {
            "directory": str(self.path), "quota_bytes": 1 << 20, "odirect": "off", "manifest_bytes": 1 << 20,
            "fsync": "file" if world.disk_syncs else "none",
        }  # fmt: skip
        tier = _SimFsTier(
            name, options, device=lambda paths, found: SimDevice(self, paths, found), clock=world.loop.time,
            new_pool=lambda name, threads, bytes_max: SimWorkPool(world, process, bytes_max), new_keeper=keeper,
        )  # fmt: skip
        self.tier = tier
        tier.ended = self.closed
        process.at_exit.append(lambda: self.closed_by_the_kernel(tier))
        return tier

    def closed_by_the_kernel(self, tier: FsTier) -> None:
        """The process has ended: its locks are gone. What it has written to the manifest is there."""
        if self.tier is tier:
            self.tier = None
            with suppress(OSError):
                os.close(tier._lock)
            tier._shelf.manifest._env.close()

    def closed(self) -> None:
        """The process has let go of everything by itself."""
        self.tier = None

    def files(self) -> list[Path]:
        """The chunks' files."""
        return sorted(path for path in (self.path / "chunks").rglob("*") if path.is_file())

    def chunks(self) -> Iterator[tuple[ChunkId, bytes]]:
        """The chunks that the running tier has in its manifest, with their files' bytes."""
        for file in self.files() if self.tier is not None else ():
            chunk = chunk_of_name(file.name)
            if chunk is not None and self.tier is not None and self.tier._shelf.manifest.get(chunk) is not None:
                yield chunk, file.read_bytes()

    def lose_power(self, rng: random.Random) -> None:
        """What is in it afterwards. Its process is dead."""
        for name in self.unsynced:
            if os.path.exists(name):
                _spoil(Path(name), rng)
        for name, data in self.removed.items():
            if rng.random() < 0.3 and not os.path.exists(name):
                Path(name).write_bytes(data)
        self.unsynced.clear()
        self.removed.clear()
        marker = next((self.path / ".state").glob("*.json"), None) if (self.path / ".state").is_dir() else None
        if marker is not None:
            found = msgspec.json.decode(marker.read_bytes())
            marker.write_bytes(msgspec.json.encode({**found, "boot": "another"}).ljust(512))

    def rot(self, rng: random.Random) -> bool:
        """Flip one bit of one file; False if there is none."""
        files = [file for file in self.files() if file.stat().st_size]
        if not files:
            return False
        file = rng.choice(files)
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        return True


def _spoil(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    cut = rng.randrange(len(data) + 1)
    fate = rng.randrange(5)
    if fate == 0:
        file.unlink()
    elif fate < 4:
        file.write_bytes((b"", data[:cut], data[:cut].ljust(len(data), b"\0"))[fate - 1])


class SimDevice(Device):
    """The real device, when the disk is well."""

    def __init__(self, directory: Directory, paths: Paths, options: FsOptions) -> None:
        super().__init__(paths, options.odirect, options.fsync == "file")
        self._directory, self._world = directory, directory.world

    def _may_fail(self) -> None:
        if self._world.strikes("disk_error", 0.05, self._world.disk_rng):
            raise OSError(errno.EIO, "Input/output error")

    def write(self, path: str, block: bytes, payload: memoryview, buffer: AlignedBuffer, *, aligned: bool) -> TempFile:
        self._may_fail()
        if self._world.strikes("disk_full", 0.1, self._world.disk_rng):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(path, block, payload, buffer, aligned=aligned)

    def publish(self, temp: TempFile, path: str) -> None:
        self._may_fail()
        super().publish(temp, path)
        if not self._world.disk_syncs:
            self._directory.unsynced[path] = None

    def remove(self, path: str) -> None:
        self._may_fail()
        removed = self._directory.removed
        with suppress(FileNotFoundError):
            removed[path] = Path(path).read_bytes()
        while len(removed) > 8:
            del removed[next(iter(removed))]
        super().remove(path)
        self._directory.unsynced.pop(path, None)

    def open(self, path: str, *, direct: bool = False) -> int:
        self._may_fail()
        return super().open(path, direct=direct)

    def read(
        self, descriptor: int, expected: Expected, payload: memoryview, buffer: AlignedBuffer, *, direct: bool
    ) -> Loaded:
        self._may_fail()
        loaded = super().read(descriptor, expected, payload, buffer, direct=direct)
        if self._world.strikes("tier_wrong_bytes", 0.2, self._world.tier_rng):
            payload[self._world.tier_rng.randrange(loaded.payload_length)] ^= 1
        return loaded
