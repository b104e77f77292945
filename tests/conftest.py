"""For all suites: how fast a machine makes examples says nothing about what is tested; nor does Python's collector."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("forebay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forebay")

gc.disable()  # until all is imported: torch, transformers and 5,000 tests stay, and would be looked at again and again

LONG = (Path(__file__).parent / "long_files.txt").read_text(encoding="utf-8").splitlines()
"""Files that take longest, in their order; what isn't named there comes after them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: else one core is idle while the other ends it."""
    root, place = Path(__file__).parents[1], {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.relative_to(root).as_posix(), len(LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Collect again, but only what tests make."""
    gc.freeze()
    gc.enable()
