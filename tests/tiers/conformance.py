"""The suite lives in `forebay.testing.conformance`; this name is kept for what imports it from here."""

from __future__ import annotations

from forebay.testing.conformance import BIG, QUOTA, MakeDriver, TierConformance

__all__ = ["BIG", "QUOTA", "MakeDriver", "TierConformance"]
