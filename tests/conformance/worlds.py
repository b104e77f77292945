"""What each kind of tier needs to run, and what can go wrong below it: for the campaign, one class a kind."""

from __future__ import annotations

import importlib.util
import random
import sqlite3
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from forebay.testing.conformance import Made
from forebay.testing.faults import files, memory
from forebay.testing.faults.dice import rates_text
from forebay.tiers.messages import OptionValue

QUOTA = 3 << 20
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tier"


class World(ABC):
    """A folder, servers if need be, and one tier's options. Its faults are counted in `struck`, or in `log`."""

    kind: str
    """The real tier, without any fault."""
    sick_kind: str
    """The same over a device with faults, where there is such a class."""
    persistent = True
    partial = False

    tells_length = True
    """Does a lookup know how long a chunk was when it was stored, whatever has become of it?"""
    slack = 0
    """Descriptors that what is here, in the campaign's own process, may open meanwhile: a library's connections."""
    chunks: Sequence[Made] = ()
    """What the campaign stores."""
    short = 500
    """Operations of the short form: fewer where each takes long."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.log = folder / "faults.log"
        self.struck: Counter[str] = Counter()

    @classmethod
    def absent(cls) -> str:
        """Why this kind can't be run here; empty if it can."""
        return ""

    @abstractmethod
    def options(self) -> dict[str, OptionValue]:
        """Of the real tier."""

    def sick_options(self) -> dict[str, OptionValue]:
        """Of the tier with faults below it."""
        return self.options()

    def ready(self, values: Mapping[str, float]) -> bool:
        """Has a tier with these figures found what is behind it?"""
        return True

    def trouble(self, rng: random.Random) -> None:
        """Something goes wrong outside of the tier's process; at most a fraction of a second of our own time."""

    def calm(self) -> None:
        """From now on nothing does."""

    def left_behind(self) -> list[str]:
        """What the tier should have cleaned up, after its end."""
        return []

    def close(self) -> None:
        """End what was started."""

    def _disk(self, faults: dict[str, float]) -> dict[str, OptionValue]:
        return {"disk_rates": rates_text(faults), "disk_seed": self.seed, "disk_log": str(self.log)}


class Sealed(World):
    """A mix-in: chunks are compressed and encrypted."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.key = folder / "key"
        self.key.write_text(random.Random(seed).randbytes(32).hex())
        self.key.chmod(0o600)
        super().__init__(folder, seed)

    @classmethod
    def absent(cls) -> str:
        lacking = [name for name in ("zstandard", "cryptography") if importlib.util.find_spec(name) is None]
        if lacking:
            return f"pip install 'forebay[compress,encrypt]' for {', '.join(lacking)}"
        return super().absent()

    def options(self) -> dict[str, OptionValue]:
        return super().options() | {"compress": "zstd", "encrypt_key_file": str(self.key)}  # type: ignore[safe-super]


class MemoryWorld(World):
    kind, sick_kind = "memory", "forebay.testing.faults.memory:FaultyMemory"
    persistent, partial = False, True

    def options(self) -> dict[str, OptionValue]:
        return {"quota_bytes": QUOTA}

    def sick_options(self) -> dict[str, OptionValue]:
        return self.options() | self._disk(dict.fromkeys(memory.FAULTS, 0.02))


class FsWorld(World):
    kind, sick_kind = "fs", "forebay.testing.faults.files:FaultyFs"
    partial = True

    def options(self) -> dict[str, OptionValue]:
        return {"directory": str(self.folder / "fs"), "quota_bytes": QUOTA}

    def sick_options(self) -> dict[str, OptionValue]:
        rates = dict.fromkeys(files.FAULTS, 0.01) | {"full": 0.002, "hang": 0.0003, "slow": 0.02}
        return self.options() | self._disk(rates)

    def left_behind(self) -> list[str]:
        return [str(path) for path in (self.folder / "fs" / "tmp").rglob("*") if path.is_file()]


class SqliteWorld(World):
    kind = sick_kind = "sqlite_tier:SqliteTier"

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.path = folder / "chunks.db"
        if str(EXAMPLE) not in sys.path:  # its process imports from where we import
            sys.path.append(str(EXAMPLE))

    def options(self) -> dict[str, OptionValue]:
        return {"path": str(self.path), "quota_bytes": QUOTA}

    def trouble(self, rng: random.Random) -> None:
        name, act = rng.choice((
            ("locked", self._lock), ("flip", self._change), ("flip", self._change), ("cut", self._cut),
            ("gone", self._drop), ("other", self._exchange),
        ))  # fmt: skip
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(self.path, 0.5, isolation_level=None)) as base:
            act(base, rng)
            self.struck[name] += 1

    def _lock(self, base: sqlite3.Connection, rng: random.Random) -> None:
        base.execute("BEGIN EXCLUSIVE")
        time.sleep(rng.random() * 0.2)
        base.execute("ROLLBACK")

    def _row(self, base: sqlite3.Connection, rng: random.Random) -> tuple[int, bytes] | None:
        rows = base.execute("SELECT rowid, payload FROM chunks").fetchall()
        return rng.choice(rows) if rows else None

    def _change(self, base: sqlite3.Connection, rng: random.Random) -> None:
        if (row := self._row(base, rng)) is not None:
            changed = bytearray(row[1])
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            base.execute("UPDATE chunks SET payload = ? WHERE rowid = ?", (bytes(changed), row[0]))

    def _cut(self, base: sqlite3.Connection, rng: random.Random) -> None:
        if (row := self._row(base, rng)) is not None:
            payload = row[1][: rng.randrange(len(row[1]))]
            base.execute("UPDATE chunks SET payload = ? WHERE rowid = ?", (payload, row[0]))

    def _drop(self, base: sqlite3.Connection, rng: random.Random) -> None:
        if (row := self._row(base, rng)) is not None:
            base.execute("DELETE FROM chunks WHERE rowid = ?", (row[0],))

    def _exchange(self, base: sqlite3.Connection, rng: random.Random) -> None:
        """One chunk, header and all, in the place of another."""
        one, two = self._row(base, rng), self._row(base, rng)
        if one is not None and two is not None:
            base.execute(
                "UPDATE chunks SET (header, payload) = (SELECT header, payload FROM chunks WHERE rowid = ?) "
                "WHERE rowid = ?", (one[0], two[0]),
            )  # fmt: skip


WORLDS: dict[str, type[World]] = {"memory": MemoryWorld, "fs": FsWorld, "sqlite": SqliteWorld}
"""By the name that the campaign's command takes."""
