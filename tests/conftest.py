"""For all suites: how fast a machine makes examples says nothing about what is tested."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("forebay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forebay")
