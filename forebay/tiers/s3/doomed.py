"""Objects outside of our books that have to go: others' that were cleared or are damaged, and what a crash left."""

from __future__ import annotations

import threading


class Doomed:
    """Names, with a cap. Until an object is gone its chunk is out of sight. Methods never block."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._names: dict[str, None] = {}
        self._lock = threading.Lock()
        self.lost = 0

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> bool:
        """Have it deleted. False, counted, if too many wait already."""
        with self._lock:
            if len(self._names) >= self._names_max and name not in self._names:
                self.lost += 1
                return False
            self._names[name] = None
            return True

    def some(self, limit: int) -> list[str]:
        """At most `limit` names, in the order in which they came."""
        with self._lock:
            return [name for name, _ in zip(self._names, range(limit), strict=False)]

    def gone(self, name: str) -> None:
        """It has been deleted, or is stored anew."""
        with self._lock:
            self._names.pop(name, None)

    def put_back(self, name: str) -> None:
        """It couldn't be deleted: others first."""
        with self._lock:
            if name in self._names:
                del self._names[name]
                self._names[name] = None
