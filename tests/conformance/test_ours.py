"""The conformance suite, run on our tiers as objects and through their own processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.testing.conformance import (
    QUEUE,
    Driver,
    Engine,
    InProcess,
    Made,
    MakeDriver,
    OwnProcess,
    Pool,
    TierConformance,
    drivers,
)
from forebay.tiers.fs.device import AlignedBuffer, Device, Expected, Loaded, TempFile
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.tier import FsTier
from forebay.tiers.host import TierHost
from forebay.tiers.memory import MemoryTier
from forebay.tiers.messages import OptionValue

AT_ONCE = "it does everything at once in the calling thread"
ELSEWHERE = "what holds it still is an object in the tier's process"


class TestMemoryTier(TierConformance):
    persistent = False
    lacks = {"stall": AT_ONCE, "queue": AT_ONCE, "deadline": AT_ONCE}  # noqa: RUF012

    @pytest.fixture
    def make_driver(self, pool: Pool) -> Iterator[MakeDriver]:
        yield from drivers(pool, lambda quota: InProcess(MemoryTier("m", {"quota_bytes": quota}), pool))

    def damage(self, driver: Driver, chunk: Made) -> None:
        assert isinstance(driver.engine, InProcess) and isinstance(driver.engine.tier, MemoryTier)
        held = driver.engine.tier._chunks[chunk.id]
        held.payload = bytes([held.payload[0] ^ 1]) + held.payload[1:]


class TestMemoryTierInItsOwnProcess(TierConformance):
    persistent = False
    lacks = {  # noqa: RUF012
        "stall": AT_ONCE, "queue": AT_ONCE, "deadline": AT_ONCE, "damage": "its bytes are in another process's memory",
    }  # fmt: skip

    @pytest.fixture
    def make_driver(self, pool: Pool) -> Iterator[MakeDriver]:
        def make(quota: int) -> Engine:
            return OwnProcess(lambda **hooks: TierHost("m", "memory", {"quota_bytes": quota}, **hooks), pool)

        yield from drivers(pool, make)


class Gated(Device):
    """Reads and writes wait while the gate is shut."""

    gate: threading.Event

    def write(
        self, path: str, block: bytes, payload: memoryview, buffer: AlignedBuffer, *, aligned: bool
    ) -> TempFile:
        assert self.gate.wait(60)
        return super().write(path, block, payload, buffer, aligned=aligned)

    def read(
        self, descriptor: int, expected: Expected, payload: memoryview, buffer: AlignedBuffer, *, direct: bool
    ) -> Loaded:
        assert self.gate.wait(60)
        return super().read(descriptor, expected, payload, buffer, direct=direct)


class FilesOf(TierConformance):
    """What the file tier's suites share."""

    __test__ = False

    def options(self, quota: int) -> dict[str, OptionValue]:
        return {"directory": str(self.folder / "fs"), "quota_bytes": quota, "write_queue_bytes": QUEUE}

    def damage(self, driver: Driver, chunk: Made) -> None:
        path = Path(Paths(self.folder / "fs").chunk(chunk.id))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


class TestFsTier(FilesOf):
    __test__ = True

    @pytest.fixture
    def make_driver(self, pool: Pool) -> Iterator[MakeDriver]:
        self.gate = threading.Event()
        self.gate.set()

        def device(paths: Paths, found: FsOptions) -> Device:
            made = Gated(paths, found.odirect, found.fsync == "file")
            made.gate = self.gate
            return made

        def make(quota: int) -> Engine:
            return InProcess(FsTier("f", self.options(quota), device=device), pool)

        yield from drivers(pool, make)

    @contextmanager
    def stalled(self, driver: Driver) -> Iterator[None]:
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


class TestFsTierInItsOwnProcess(FilesOf):
    __test__ = True
    lacks = {"stall": ELSEWHERE}  # noqa: RUF012

    @pytest.fixture
    def make_driver(self, pool: Pool) -> Iterator[MakeDriver]:
        yield from drivers(
            pool, lambda quota: OwnProcess(lambda **hooks: TierHost("f", "fs", self.options(quota), **hooks), pool)
        )


class TestSealedFsTier(FilesOf):
    """Compressed and encrypted, and through the page cache."""

    __test__ = True
    lacks = {"stall": "the plain file tier's suite has it"}  # noqa: RUF012

    @pytest.fixture
    def make_driver(self, pool: Pool, tmp_path: Path) -> Iterator[MakeDriver]:
        pytest.importorskip("zstandard")
        pytest.importorskip("cryptography")
        key = tmp_path / "key"
        key.write_text("5e" * 32)
        key.chmod(0o600)
        more: dict[str, OptionValue] = {"compress": "zstd", "encrypt_key_file": str(key), "odirect": "off"}
        yield from drivers(pool, lambda quota: InProcess(FsTier("f", self.options(quota) | more), pool))
