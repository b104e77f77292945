"""Two more worlds of the file tier: chunks that are compressed and encrypted, and a directory that two stores use."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from forebay.testing.conformance import Driver, InProcess, Made, Pool
from forebay.tiers.fs.tier import FsTier
from forebay.tiers.messages import OptionValue
from tests.conformance.worlds import QUOTA, FsWorld, Sealed

NEIGHBOURS_MOVES = 8


class SealedFsWorld(Sealed, FsWorld):
    """Both codecs."""


class SharedFsWorld(FsWorld):
    """A second store's tier on the same directory, in this process: it stores, loads and forgets the same chunks."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.pool = Pool()
        tier = FsTier("neighbour", super().options() | {"state_dir": str(folder / "neighbour")})
        self.neighbour = Driver(self.pool, InProcess(tier, self.pool))

    def options(self) -> dict[str, OptionValue]:
        return super().options() | {"state_dir": str(self.folder / "state"), "takeover_s": 0.2}

    def ready(self, values: Mapping[str, float]) -> bool:
        """Has it been given its part of the quota? Who comes second waits until the first has made room."""
        return values.get("bytes_quota", 0.0) > QUOTA / 4

    def trouble(self, rng: random.Random) -> None:
        for _ in range(NEIGHBOURS_MOVES):
            chunk: Made = rng.choice(self.chunks)
            move = rng.random()
            if move < 0.5:
                self.struck["neighbour loads ok"] += self.neighbour.serves(chunk)
            elif move < 0.9:
                self.struck["neighbour stores ok"] += self.neighbour.store(chunk).ok
            else:
                self.neighbour.engine.forget([chunk.id], "cleared")
                self.struck["neighbour forgets"] += 1

    def left_behind(self) -> list[str]:
        found = super().left_behind()
        self.neighbour.close()
        return found

    def close(self) -> None:
        self.neighbour.close()
        self.pool.close()
