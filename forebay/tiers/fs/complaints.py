"""Log lines that a broken disk would repeat thousands of times: one of each kind in five seconds, with a count."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger("forebay.tier.fs")

QUIET_S = 5.0


class Complaints:
    """Logs to one logger. May be called from any thread."""

    def __init__(self, logger: logging.Logger = log) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._next: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def __call__(self, kind: str, text: str, *arguments: object) -> None:
        """Log an error, unless one of this kind was logged just now."""
        with self._lock:
            now = time.monotonic()
            if now < self._next.get(kind, 0.0):
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return
            self._next[kind] = now + QUIET_S
            held_back = self._held_back.pop(kind, 0)
        if held_back:
            self._logger.error("%d more of the same kind (%s) before this:", held_back, kind)
        self._logger.error(text, *arguments)


complain = Complaints()
