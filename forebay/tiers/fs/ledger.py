"""The byte account of one directory. Room is reserved before anything is written, so the cap is never passed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Bytes on disk by what they are for. Methods may be called from any thread.

    `open` is false until what is on disk is known; nothing can be reserved before that. `headroom` is left free for
    the first small files of a store that comes to this directory later.
    """

    quota: int
    stored: int = 0
    leaving: int = 0
    reserved: int = 0
    quarantine: int = 0
    other: int = 0
    headroom: int = 0
    open: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def used(self) -> int:
        """All bytes that count against the quota. `leaving` are removed chunks whose files are still there."""
        return self.stored + self.leaving + self.reserved + self.quarantine + self.other

    @property
    def limit(self) -> int:
        """What may be used."""
        return max(0, self.quota - self.headroom)

    def widen(self, size: int) -> None:
        """The quota grows by so many bytes."""
        with self._lock:
            self.quota += size

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes: 0 if that worked, else how many bytes are missing."""
        with self._lock:
            missing = self.used + size - self.limit
            if not self.open or missing > 0:
                return max(1, missing)
            self.reserved += size
            return 0

    def release(self, size: int) -> None:
        """Give a reservation back."""
        self.move(reserved=-size)

    def move(
        self, *, stored: int = 0, leaving: int = 0, reserved: int = 0, quarantine: int = 0, other: int = 0
    ) -> None:
        """Change several accounts in one step."""
        with self._lock:
            self.stored += stored
            self.leaving += leaving
            self.reserved += reserved
            self.quarantine += quarantine
            self.other += other
            assert min(self.stored, self.leaving, self.reserved, self.quarantine, self.other) >= 0, self
