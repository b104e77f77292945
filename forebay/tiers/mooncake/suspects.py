"""Hosts of the pool that hang: nothing is asked of them for a while, so that one doesn't hold up the loads of all."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

HOSTS_MAX = 1024


class Suspects:
    """Endpoints with a time until which they are left alone. May be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def suspect(self, endpoint: str, seconds: float) -> None:
        """A call to this host has failed, or taken too long. What is known already isn't shortened: a call that hung
        comes back as a failed one."""
        with self._lock:
            known = self._until.pop(endpoint, 0.0)
            if len(self._until) >= HOSTS_MAX:
                self._until.popitem(last=False)
            self._until[endpoint] = max(known, self._clock() + seconds)

    def trust(self, endpoint: str) -> None:
        """It has answered."""
        with self._lock:
            self._until.pop(endpoint, None)

    def hangs(self, endpoint: str) -> bool:
        """Is it to be left alone for now?"""
        until = self._until.get(endpoint)
        if until is None:
            return False
        if until > self._clock():
            return True
        with self._lock:
            self._until.pop(endpoint, None)
        return False
