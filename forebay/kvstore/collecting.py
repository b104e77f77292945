"""Keeping Python's cycle collector away from what stays.

A full collection looks at everything that is alive: half a second for a million chunks, in which nobody is answered.
Chunks make no cycles; they end by their counts alone. So what has been made is frozen again and again, a few thousand
objects at a time: the collector then looks only at what is newer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

NEW_CHUNKS = 4096


class Collector:
    """The collector's settings for one daemon. `made` counts chunks that were ever made; it only grows.

    A cycle that is frozen alive is never collected. There are few that live so long (a connection's), and they are
    frozen only when many chunks have come meanwhile.
    """

    def __init__(self, made: Callable[[], int]) -> None:
        self._made = made
        self._frozen_at = 0

    def freeze(self) -> None:
        """Collect what is new and keep the rest from being looked at again. Takes as long as that is much."""
        gc.collect()
        gc.freeze()
        self._frozen_at = self._made()

    def tick(self) -> None:
        """Freeze, if enough has come."""
        if self._made() - self._frozen_at >= NEW_CHUNKS:
            self.freeze()
