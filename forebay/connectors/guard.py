"""Nothing is raised into the engine: what goes wrong here costs a hit or a store, never a request."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)

guarded_errors: Counter[str] = Counter()
"""What was caught, by the call that it came from. One process has one connector."""


def guarded(fallback: Callable[[], Any]) -> Callable[[F], F]:
    """Log and count what a method raises, and return `fallback()` instead."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return method(*arguments, **named)
            except Exception:
                guarded_errors[method.__name__] += 1
                log.exception("%s failed in a way it should not; the engine goes on without the store", method.__name__)
                return fallback()

        return call  # type: ignore[return-value]

    return wrap


def nothing() -> None:
    """A fallback."""
