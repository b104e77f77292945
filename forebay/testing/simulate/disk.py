"""A disk: what was written is volatile until it is synced, and nobody promises in which order it arrives.

At a power loss unsynced contents become nothing, a torn front, zeros, or all of it; of the directory's changes a front
of random length survives. Bits rot. There is an end to the room.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.tiers.base import ChunkId
from forebay.tiers.fs.paths import chunk_of_name

if TYPE_CHECKING:
    from forebay.testing.simulate.world import World


@dataclass
class _File:
    data: bytes
    synced: bool = False


class SimDisk:
    """Files by name. Methods raise OSError as a real disk would, when the world says so."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._files: dict[str, _File] = {}
        self._durable: dict[str, _File] = {}
        self._journal: list[tuple[str, str, _File | None]] = []
        self.capacity = world.disk_rng.choice((60, 150, 1000)) << 10

    def _may_fail(self) -> None:
        if self._world.strikes("disk_error", 0.05, self._world.disk_rng):
            raise OSError(5, "Input/output error")

    def write(self, name: str, data: bytes) -> None:
        """A whole file, in place of whatever has the name."""
        self._may_fail()
        used = sum(len(file.data) for file in self._files.values())
        if used + len(data) > self.capacity or self._world.strikes("disk_full", 0.1, self._world.disk_rng):
            raise OSError(28, "No space left on device")
        self._files[name] = file = _File(data)
        self._journal.append(("name", name, file))

    def sync(self, name: str) -> None:
        """The file's bytes are safe, and the directory up to now."""
        self._may_fail()
        self._files[name].synced = True
        self._commit(len(self._journal))

    def rename(self, old: str, new: str) -> None:
        """In one step, in place of what has the new name."""
        self._may_fail()
        self._files[new] = file = self._files.pop(old)
        self._journal.append(("unname", old, None))
        self._journal.append(("name", new, file))

    def unlink(self, name: str) -> None:
        """Remove a file; none there is fine."""
        self._may_fail()
        if self._files.pop(name, None) is not None:
            self._journal.append(("unname", name, None))

    def read(self, name: str) -> bytes:
        """All of a file. Raises FileNotFoundError."""
        self._may_fail()
        if name not in self._files:
            raise FileNotFoundError(2, "No such file or directory")
        return self._files[name].data

    def names(self) -> list[str]:
        """All files."""
        return sorted(self._files)

    def chunks(self) -> Iterator[tuple[ChunkId, bytes]]:
        """The files that are chunks."""
        for name, file in self._files.items():
            chunk = chunk_of_name(name)
            if chunk is not None:
                yield chunk, file.data

    def _commit(self, count: int) -> None:
        for what, name, file in self._journal[:count]:
            if what == "name" and file is not None:
                self._durable[name] = file
            else:
                self._durable.pop(name, None)
        del self._journal[:count]

    def lose_power(self, rng: random.Random) -> None:
        """What is on it afterwards."""
        self._commit(rng.randint(0, len(self._journal)))
        self._journal.clear()
        for file in self._durable.values():
            if not file.synced:
                cut = rng.randrange(len(file.data) + 1)
                file.data = rng.choice((b"", file.data[:cut], file.data[:cut].ljust(len(file.data), b"\0"), file.data))
                file.synced = True
        self._files = dict(self._durable)

    def rot(self, rng: random.Random) -> bool:
        """Flip one bit of one file; False if there is none."""
        names = [name for name, file in self._files.items() if file.data]
        if not names:
            return False
        file = self._files[rng.choice(sorted(names))]
        at = rng.randrange(len(file.data))
        file.data = file.data[:at] + bytes([file.data[at] ^ 1 << rng.randrange(8)]) + file.data[at + 1 :]
        return True
