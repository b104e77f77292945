"""Compiled loops where numba is installed (`pip install forebay[router]`), numpy everywhere.

Both work on the same arrays, so either may go on where the other stopped; the tests hold them against each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Choice:
    """Looked for once, when first asked."""

    def __init__(self) -> None:
        self._found: Any = None
        self._looked = False
        self.plain = False

    def now(self) -> Any:
        """The module, or None."""
        if not self._looked:
            self._looked = True
            try:
                self._found = importlib.import_module("forebay.scheduler.compiled")
            except ImportError:
                return None
        return None if self.plain else self._found


_CHOICE = _Choice()


def compiled_loops() -> Any:
    """`forebay.scheduler.compiled`, or None without numba. The first call may take seconds, since it compiles."""
    return _CHOICE.now()


@contextmanager
def without_compiled_loops() -> Iterator[None]:
    """Numpy alone, inside: to compare with, and to test."""
    before, _CHOICE.plain = _CHOICE.plain, True
    try:
        yield
    finally:
        _CHOICE.plain = before
