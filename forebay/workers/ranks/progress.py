"""How many steps a rank has computed: copies wait until theirs is through.

Rank 0 may be done with a step whose last layer wants no logits while another rank still reads and writes KV in it: no
collective holds them together there. So an order to copy says after how many steps its blocks are free to be touched.
"""

from __future__ import annotations

import threading

from forebay.workers.ranks.errors import RankLost


class Progress:
    """Counted by the thread that computes, waited for by the one that copies."""

    def __init__(self) -> None:
        self._steps = 0
        self._changed = threading.Condition()

    @property
    def steps(self) -> int:
        """Steps that are computed, to their last byte."""
        return self._steps

    def advance(self) -> None:
        """One more."""
        with self._changed:
            self._steps += 1
            self._changed.notify_all()

    def wait(self, steps: int, patience_s: float) -> None:
        """Until that many are computed. Raises RankLost if it takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._steps >= steps, patience_s):
                raise RankLost(f"step {steps} isn't computed after {patience_s:g} s; this rank is at {self._steps}")
