"""The pool's real files, with a daemon that may die between any two of its writes to them, or inside of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from forebay.kvstore.entry import SlotRef
from forebay.kvstore.extents import PoolFiles
from forebay.kvstore.header import SlotState
from forebay.testing.simulate.loop import Killed, Process


@dataclass
class SimPool(PoolFiles):
    """Writes of a dead daemon do nothing. `die_in` counts down the writes until the one that it dies in."""

    process: Process | None = None
    die_in: int = 0
    cut_short: Callable[[int], int] = lambda length: length
    died_writing: int = 0
    writes: int = 0

    def write_header(self, slot: SlotRef, block: bytes) -> None:
        if self._dies():
            kept = self.cut_short(len(block))
            super().write_header(slot, block[:kept])
            self._die()
        if self._alive():
            self.writes += 1
            super().write_header(slot, block)

    def mark(self, slot: SlotRef, state: SlotState, generation: int) -> None:
        if self._dies():
            self._die()
        if self._alive():
            self.writes += 1
            super().mark(slot, state, generation)

    def cut(self, extent: int, slot_bytes: int) -> None:
        if self._dies():
            self.views[extent][:8] = bytes(8)
            self._die()
        if self._alive():
            self.writes += 1
            super().cut(extent, slot_bytes)

    def _alive(self) -> bool:
        return self.process is None or self.process.alive

    def _dies(self) -> bool:
        if self.die_in <= 0 or not self._alive():
            return False
        self.die_in -= 1
        return self.die_in == 0

    def _die(self) -> None:
        assert self.process is not None
        self.died_writing += 1
        self.process.kill()
        raise Killed(self.process.name)

    def abandon(self) -> None:
        """What the kernel does when the daemon's process ends: descriptors and locks go, files stay."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
