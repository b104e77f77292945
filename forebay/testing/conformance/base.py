"""What the parts of the suite stand on: the fixtures, the hooks that an author fills in, and what a tier lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forebay.testing.conformance.abilities import check_lacks
from forebay.testing.conformance.chunks import Made, Pool
from forebay.testing.conformance.driver import Driver
from forebay.testing.conformance.engines import Engine, InProcess, OwnProcess
from forebay.tiers.host import TierHost
from forebay.tiers.messages import OptionValue
from forebay.tiers.registry import create_tier

QUOTA = 1 << 20
"""Bytes that a driver's tier may use, unless a test says other."""
QUEUE = 256 << 10
"""Bytes that the tier's store queue shall be bounded to, where it has one."""
BIG = 48 << 10
"""Granule size of chunks of which ten fill the quota."""

MakeDriver = Callable[[int], Driver]


class Suite:
    """Fixtures and hooks. An author gives `kind` and `options`, or a `make_driver` fixture of his own.

    `make_driver(quota)` returns a Driver over a tier with that byte quota. The first is empty; one that is made after
    the former was closed is the same tier started again, with what it kept.
    """

    kind: ClassVar[str] = ""
    lacks: ClassVar[dict[str, str]] = {}
    """Abilities (see `abilities`) that this kind of tier hasn't got, each with the reason."""
    partial: ClassVar[bool] = True
    persistent: ClassVar[bool] = True
    folder: Path
    """A fresh folder for each test."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.lacks = dict(cls.lacks)
        if not cls.partial:
            cls.lacks.setdefault("partial", "this tier answers for exact keys alone")
        if not cls.persistent:
            cls.lacks.setdefault("persistent", "what it holds ends with its process")
        check_lacks(cls.__name__, cls.lacks)

    # --- what an author fills in -----------------------------------------------------------------------

    def options(self, quota: int) -> dict[str, OptionValue]:
        """The options of a tier with this quota, a store queue of QUEUE bytes, and its data under `self.folder`."""
        raise NotImplementedError("give the suite options(quota), or a make_driver fixture")

    def damage(self, driver: Driver, chunk: Made) -> None:
        """Change a byte of the payload of `chunk` where the tier keeps it, behind its back."""
        raise NotImplementedError('give the suite damage(driver, chunk), or declare that it lacks "damage"')

    def stalled(self, driver: Driver) -> AbstractContextManager[None]:
        """While it is open, the tier's device or server answers nothing; nothing is lost."""
        raise NotImplementedError('give the suite stalled(driver), or declare that it lacks "stall"')

    # --- fixtures --------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def applies(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        """Skips what this tier lacks, with the declared reason."""
        self.folder = tmp_path
        for name in getattr(request.function, "needs", ()):
            if name in self.lacks:
                pytest.skip(f"{name}: {self.lacks[name]}")

    @pytest.fixture
    def pool(self) -> Iterator[Pool]:
        """Memory that jobs name."""
        made = Pool()
        yield made
        made.close()

    @pytest.fixture(params=["object", "process"])
    def make_driver(self, request: pytest.FixtureRequest, applies: None, pool: Pool) -> Iterator[MakeDriver]:
        """Drivers of the tier as an object, and through a process of its own."""

        def engine(quota: int) -> Engine:
            options = self.options(quota)
            if request.param == "object":
                return InProcess(create_tier(self.kind, "tier", options), pool)
            return OwnProcess(lambda **callbacks: TierHost("tier", self.kind, options, **callbacks), pool)

        yield from drivers(pool, engine)

    @pytest.fixture
    def driver(self, make_driver: MakeDriver) -> Driver:
        """A driver over an empty tier."""
        return make_driver(QUOTA)


def drivers(pool: Pool, make: Callable[[int], Engine]) -> Iterator[MakeDriver]:
    """The body of a `make_driver` fixture: closes whatever a test has left open."""
    made: list[Driver] = []

    def make_driver(quota: int) -> Driver:
        made.append(Driver(pool, make(quota)))
        return made[-1]

    yield make_driver
    for driver in made:
        driver.close()
