"""Chunks, a pool and drivers for the tiers' tests: those of the conformance suite, by their short names."""

from __future__ import annotations

from forebay.testing.conformance.chunks import NAMESPACE, ROOT, Made, Pool, make_chunk, numbered
from forebay.testing.conformance.driver import Driver, Loaded
from forebay.testing.conformance.engines import PATIENCE_S, Engine, InProcess, OwnProcess

__all__ = [
    "NAMESPACE",
    "PATIENCE_S",
    "ROOT",
    "Driver",
    "Engine",
    "InProcess",
    "Loaded",
    "Made",
    "OwnProcess",
    "Pool",
    "make_chunk",
    "numbered",
]
