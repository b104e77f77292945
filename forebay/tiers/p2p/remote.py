"""What can be read of this process's memory from outside."""

from __future__ import annotations

from typing import Protocol


class Remote(Protocol):
    """What can be read of this process's memory from outside; NIXL, or nothing."""

    def metadata(self) -> bytes:
        """For whoever may read; empty if nobody can."""

    @property
    def epoch(self) -> int:
        """Grows when the metadata changes."""

    def address(self, extent: int, offset: int) -> int:
        """Where a piece of an extent lies; 0 if it can't be read."""


class NoRemote:
    """Where memory isn't given away."""

    epoch = 0

    def metadata(self) -> bytes:
        """Nothing."""
        return b""

    def address(self, extent: int, offset: int) -> int:
        """Nowhere."""
        return 0
