"""What every tier owes, as tests: for our own tiers and for anybody's. Needs pytest; `docs/tiers.md` shows how."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(f"forebay.testing.conformance.{part}" for part in (
        "driver", "enduring", "keeping", "leaving", "looking", "pressing", "storing", "telling",
    ))
)  # fmt: skip

from forebay.testing.conformance.abilities import ABILITIES, needs  # noqa: E402
from forebay.testing.conformance.base import BIG, QUEUE, QUOTA, MakeDriver, drivers  # noqa: E402
from forebay.testing.conformance.chunks import Made, Pool, make_chunk, numbered  # noqa: E402
from forebay.testing.conformance.driver import Driver, Loaded  # noqa: E402
from forebay.testing.conformance.engines import Engine, InProcess, OwnProcess  # noqa: E402
from forebay.testing.conformance.suite import TierConformance  # noqa: E402

__all__ = [
    "ABILITIES",
    "BIG",
    "QUEUE",
    "QUOTA",
    "Driver",
    "Engine",
    "InProcess",
    "Loaded",
    "Made",
    "MakeDriver",
    "OwnProcess",
    "Pool",
    "TierConformance",
    "drivers",
    "make_chunk",
    "needs",
    "numbered",
]
