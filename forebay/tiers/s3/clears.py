"""Clears that are still being carried out among objects that this daemon hasn't stored.

Own chunks are out of sight at once. Of others only a walk over the bucket finds out whose they are; until that is
through, nothing that a clear covers is seen or served, unless the service says that it is younger than the clear.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from forebay.tiers.base import ClearScope
from forebay.tiers.fs.manifest import tenant_digest

OPEN_MAX = 64


@dataclass(eq=False)
class Clear:
    """One clear. `before` is the service's time at which it began; not known yet: everything is older. `part_of` is
    the wider one that it has become part of."""

    scope: ClearScope
    before: float = float("inf")
    part_of: Clear | None = None

    def covers(self, namespace: bytes, tenant: bytes, start: int, modified: float) -> bool:
        """May a chunk, whose tenant has this digest, be what the clear is for? Behind a prefix, all that starts there
        or later in the namespace is: what it goes on from can't be told."""
        scope = self.scope
        return (
            scope.namespace in (b"", namespace)
            and (scope.tenant is None or tenant_digest(scope.tenant) == tenant)
            and (not scope.parent or start >= scope.start) and self.is_after(modified)
        )  # fmt: skip

    def is_after(self, modified: float) -> bool:
        """Did the clear begin after an object was made, or in the same second? `before` is a whole one, and some
        services list objects with parts of seconds."""
        return int(modified) <= self.before


class Clears:
    """Methods may be called from any thread and never block."""

    def __init__(self) -> None:
        self._open: list[Clear] = []
        self._lock = threading.Lock()
        self.merged = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, scope: ClearScope) -> Clear:
        """A clear begins. Beyond the cap it becomes one with the last, wider than both."""
        with self._lock:
            if len(self._open) >= OPEN_MAX:
                self.merged += 1
                last = self._open.pop()
                same = last.scope.namespace == scope.namespace
                scope = ClearScope(scope.namespace if same else b"")
                clear = last.part_of = Clear(scope)
            else:
                clear = Clear(scope)
            self._open.append(clear)
            return clear

    def is_open(self, clear: Clear) -> bool:
        """Is it still to be carried out, by itself or as a part of another?"""
        with self._lock:
            while clear.part_of is not None:
                clear = clear.part_of
            return clear in self._open

    def first(self) -> Clear | None:
        """The clear that is to be carried out next."""
        with self._lock:
            return self._open[0] if self._open else None

    def done(self, clear: Clear) -> None:
        """Everything that it covers is gone."""
        with self._lock:
            if clear in self._open:
                self._open.remove(clear)

    def hide(self, namespace: bytes, tenant: bytes, start: int, modified: float) -> bool:
        """Is this covered by a clear that isn't done?"""
        return any(clear.covers(namespace, tenant, start, modified) for clear in list(self._open))
