"""A file tier that tests can open again, damage, and look at from outside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.tiers.base import ChunkId
from forebay.tiers.fs.device import Device
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.tier import FsTier
from tests.tiers.support import Driver, InProcess, Made, Pool


def disk_usage(directory: Path) -> int:
    """What all files but the manifest take, as the file system counts it."""
    total = 0
    for folder, folders, names in os.walk(directory):
        if ".state" in folders:
            folders.remove(".state")
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # a thread of the tier has removed it
    return total


class FsRig:
    """One directory, and the tier over it while one is open."""

    def __init__(self, pool: Pool, directory: Path, **options: Any) -> None:
        self.pool = pool
        self.directory = directory
        self.options = options
        self.paths = Paths(directory)
        self.device: type[Device] = Device
        self.driver: Driver | None = None

    def open(self, **options: Any) -> Driver:
        """Open the tier, with these options on top."""
        assert self.driver is None
        self.options.update(options)

        def device(paths: Paths, found: FsOptions) -> Device:
            return self.device(paths, found.odirect, found.fsync == "file")

        tier = FsTier("f", {"directory": str(self.directory), **self.options}, device=device)
        self.driver = Driver(self.pool, InProcess(tier, self.pool))
        return self.driver

    def close(self) -> None:
        if self.driver is not None:
            self.driver.close()
            self.driver = None

    def reopen(self, **options: Any) -> Driver:
        self.close()
        return self.open(**options)

    @property
    def tier(self) -> FsTier:
        assert self.driver is not None
        engine = self.driver.engine
        assert isinstance(engine, InProcess)
        assert isinstance(engine.tier, FsTier)
        return engine.tier

    @contextmanager
    def opened(self, **options: Any) -> Iterator[Driver]:
        try:
            yield self.open(**options)
        finally:
            self.close()

    def file(self, chunk: Made | ChunkId) -> Path:
        return Path(self.paths.chunk(chunk.id if isinstance(chunk, Made) else chunk))

    def files(self) -> list[Path]:
        return sorted(path for path in self.paths.chunks.rglob("*") if path.is_file())

    def quarantined(self) -> list[Path]:
        return sorted(self.paths.quarantine.iterdir())

    def usage(self) -> int:
        return disk_usage(self.directory)

    def lose_manifest(self) -> None:
        assert self.driver is None
        shutil.rmtree(self.directory / ".state")
