"""What the scheduler asks of the device's memory. The worker's block pool answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from forebay.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Admission:
    """A request got its footprint. `load` says that a longer prefix may come from the store first."""

    load: bool


class Growth(Enum):
    """Answer to "room for more tokens, please".

    READY: the blocks are there. SHORT: other requests hold them. DRAINING: they are free as soon as copies
    that are under way have ended. PARKED: it doesn't lack blocks, but something that its next step reads is on its way.
    """

    READY = "ready"
    SHORT = "short"
    DRAINING = "draining"
    PARKED = "parked"


class Memory(Protocol):
    """Blocks by request. No call blocks; all are made by the engine's thread."""

    def admit(self, request: Request, leave: int) -> Admission | None:
        """Reserve what all of `request`'s known tokens need, lookahead and one tail block in every group,
        and still leave `leave` blocks to others; sets `request.computed` to the device's prefix. None: not
        now."""
        ...

    def grow(self, request: Request, upto: int) -> Growth:
        """Blocks for the tokens [computed, upto). Takes all of them or nothing."""
        ...

    def claim(self, request: Request, count: int) -> int:
        """For a request with a `cut`: how many of its next `count` tokens are to be computed now; 0 says to wait for
        its load. Where the two have met, sets `request.computed` behind what was loaded, and ends the cut."""
        ...

    def release(self, request: Request) -> None:
        """Let go of all blocks, after what is worth keeping has been handed to the store."""
        ...
