"""Who is alive among the stores of one directory.

On a local file system the kernel says it: a living process holds the flock of its seat's lock file, a dead one
doesn't. A mount over the network may keep locks to one machine, or have none. There a process also counts a number up
in its seat's `.beat`; a number that stands still for `dead_after_s` on the onlooker's own clock is a dead process's.
Clocks of different machines are never compared.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from forebay.tiers.fs.paths import Paths

_LOCAL = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signs:
    """What shows that a process lives: its flock, its beat, or either."""

    flock: bool
    beat: bool


class Beat(msgspec.Struct, frozen=True):
    """The contents of `.beat`."""

    token: str
    boot: str
    count: int


def boot_id() -> str:
    """This machine since it was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def file_system(path: Path) -> str:
    """The type of the file system that `path` is on; empty if that can't be found out."""
    where, found = os.path.realpath(path), ("", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted = before.split()[4].encode().decode("unicode_escape")
        inside = where == mounted or where.startswith(mounted.rstrip("/") + "/")
        if inside and len(mounted) >= len(found[0]):
            found = (mounted, after.split()[0])
    return found[1]


def signs_for(liveness: Literal["auto", "flock", "heartbeat"], path: Path) -> Signs:
    """What to go by in a directory."""
    if liveness == "auto":
        return Signs(flock=True, beat=file_system(path) not in _LOCAL)
    return Signs(flock=liveness == "flock", beat=liveness == "heartbeat")


def is_locked(path: Path) -> bool:
    """Does a process hold this lock file's flock?"""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class Pulse:
    """Our own beat. `beat` is called by one thread, often."""

    def __init__(self, paths: Paths, token: str) -> None:
        self._path, self._token = paths.beat, token
        self._boot = boot_id()
        self._count = 0

    def beat(self) -> None:
        """Count on. OSError passes through."""
        self._count += 1
        data = msgspec.json.encode(Beat(self._token, self._boot, self._count)).ljust(256)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)


def read_beat(paths: Paths) -> Beat | None:
    """The beat of a seat; None if there is none that can be read."""
    try:
        return msgspec.json.decode(paths.beat.read_bytes(), type=Beat)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


@dataclass
class Onlooker:
    """Judges the seats of others. Used by one thread."""

    signs: Signs
    dead_after_s: float
    clock: Callable[[], float] = time.monotonic
    _seen: dict[int, tuple[Beat | None, float]] = field(default_factory=dict)
    _dead_since: dict[int, float] = field(default_factory=dict)

    def alive(self, number: int, paths: Paths) -> bool:
        """Is somebody at this seat, as far as one can see?"""
        living = (self.signs.flock and is_locked(paths.lock)) or (self.signs.beat and self._beats(number, paths))
        if living:
            self._dead_since.pop(number, None)
        else:
            self._dead_since.setdefault(number, self.clock())
        return living

    def _beats(self, number: int, paths: Paths) -> bool:
        found, now = read_beat(paths), self.clock()
        before = self._seen.get(number)
        if before is None or before[0] != found:
            self._seen[number] = (found, now)
            return True
        return now - before[1] < self.dead_after_s

    def dead_for_s(self, number: int) -> float:
        """For how long `alive` has been saying no."""
        since = self._dead_since.get(number)
        return 0.0 if since is None else self.clock() - since

    def forget(self, number: int) -> None:
        """The seat is no more."""
        self._seen.pop(number, None)
        self._dead_since.pop(number, None)
