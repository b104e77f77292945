"""Stop strings: found across token boundaries, never emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class StopFinder:
    """Holds back text that may turn out to be the beginning of a stop string."""

    stops: Sequence[str]
    stopped: bool = False
    _held: str = field(default="")

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Text that can be emitted now. Once `stopped`, nothing more. What comes while it may not stop is no part of a
        stop string."""
        if self.stopped:
            return ""
        if not self.stops:
            return text
        if not may_stop:
            held, self._held = self._held, ""
            return held + text
        self._held += text
        found = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        keep = max(overlap(self._held, stop) for stop in self.stops)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready

    def flush(self) -> str:
        """The output has ended: what was held back is no stop string."""
        rest, self._held = self._held, ""
        return "" if self.stopped else rest


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
