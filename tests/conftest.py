"""For all suites: how fast a machine makes examples says nothing about what is tested; nor does Python's collector."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("forebay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forebay")

gc.disable()  # until all is imported: torch, transformers and 5,000 tests stay, and would be looked at again and again


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Collect again, but only what tests make."""
    gc.freeze()
    gc.enable()
