"""Imports that take their time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Inside, Python's cycle collector rests: what is imported stays, and to look at it again and again is a quarter of
    what importing torch takes. Afterwards the collector, if it was on, looks only at what is newer. For a process's
    start: garbage of before is never collected."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
