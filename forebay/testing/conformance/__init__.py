"""What every tier owes, as tests: for our own tiers and for anybody's. Needs pytest; `docs/tiers.md` shows how."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("forebay.testing.conformance.suite", "forebay.testing.conformance.driver")

from forebay.testing.conformance.chunks import Made, Pool, make_chunk, numbered  # noqa: E402
from forebay.testing.conformance.driver import Driver, Loaded  # noqa: E402
from forebay.testing.conformance.engines import Engine, InProcess, OwnProcess  # noqa: E402
from forebay.testing.conformance.suite import QUOTA, MakeDriver, TierConformance  # noqa: E402

__all__ = [
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
    "make_chunk",
    "numbered",
]
