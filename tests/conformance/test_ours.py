"""The conformance suite, run on our tiers as objects and through their own processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.testing.conformance import Driver, Engine, InProcess, MakeDriver, OwnProcess, Pool, TierConformance
from forebay.tiers.fs.tier import FsTier
from forebay.tiers.host import TierHost
from forebay.tiers.memory import MemoryTier
from forebay.tiers.messages import OptionValue


def drivers(pool: Pool, make: Callable[[int], Engine]) -> Iterator[MakeDriver]:
    made: list[Driver] = []

    def make_driver(quota: int) -> Driver:
        made.append(Driver(pool, make(quota)))
        return made[-1]

    yield make_driver
    for driver in made:
        driver.close()


class TestMemoryTier(TierConformance):
    @pytest.fixture
    def make_driver(self, pool: Pool) -> Iterator[MakeDriver]:
        yield from drivers(pool, lambda quota: InProcess(MemoryTier("m", {"quota_bytes": quota}), pool))


class TestFsTier(TierConformance):
    @pytest.fixture(params=["auto", "off"])
    def make_driver(self, pool: Pool, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeDriver]:
        def make(quota: int) -> Engine:
            options = {"directory": str(tmp_path / "fs"), "quota_bytes": quota, "odirect": request.param}
            return InProcess(FsTier("f", options), pool)

        yield from drivers(pool, make)


class TestMemoryTierInItsOwnProcess(TierConformance):
    @pytest.fixture
    def make_driver(self, pool: Pool) -> Iterator[MakeDriver]:
        def make(quota: int) -> Engine:
            def host(**callbacks: Any) -> TierHost:
                return TierHost("m", "memory", {"quota_bytes": quota}, **callbacks)

            return OwnProcess(host, pool)

        yield from drivers(pool, make)


class TestFsTierInItsOwnProcess(TierConformance):
    @pytest.fixture
    def make_driver(self, pool: Pool, tmp_path: Path) -> Iterator[MakeDriver]:
        def make(quota: int) -> Engine:
            def host(**callbacks: Any) -> TierHost:
                options: dict[str, OptionValue] = {"directory": str(tmp_path / "fs"), "quota_bytes": quota}
                return TierHost("f", "fs", options, **callbacks)

            return OwnProcess(host, pool)

        yield from drivers(pool, make)
