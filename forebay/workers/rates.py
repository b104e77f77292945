"""How fast this worker computes prompts, and how fast tiers bring what they have: moving estimates.

The engine's thread tells of steps, the transfer thread of arrivals, and either asks; each figure has one writer, and a
reader may see one that is a moment old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

PREFILL_S_GUESS = 1e-3
"""Seconds a token, until a step has been measured."""

SMALL_STEP = 16
"""Steps of fewer tokens say what a step costs, others what a token does."""

KEPT = 0.9
"""How much of the past each new step leaves."""

LOADS_KEPT = 0.5
"""How much of the past each new arrival leaves: a tier that has become faster, or slower, is soon taken at that."""

TIERS_MAX = 64
"""Tiers that are told apart; their names come from outside."""


class PrefillRate:
    """What a step costs however little it feeds, and seconds a token as a line over its position: attention makes later
    tokens dearer. Fitted to the last steps."""

    def __init__(self) -> None:
        self.samples = 0
        self.step_s = 0.0
        self._sums = [0.0] * 5

    def step(self, start: float, tokens: int, seconds: float) -> None:
        """A step fed `tokens` tokens in all, from position `start` on (a mean, if of several requests)."""
        if tokens < SMALL_STEP:
            self.step_s = seconds if self.step_s == 0.0 else KEPT * self.step_s + (1 - KEPT) * seconds
            return
        x, y, w = start + tokens / 2, max(seconds - self.step_s, 0.1 * seconds) / tokens, float(tokens)
        news = (w, w * x, w * y, w * x * x, w * x * y)
        self._sums = [KEPT * old + new for old, new in zip(self._sums, news, strict=True)]
        self.samples += 1

    def line(self) -> tuple[float, float]:
        """Seconds of a token at position 0, and what each position adds."""
        w, wx, wy, wxx, wxy = self._sums
        if w == 0.0:
            return PREFILL_S_GUESS, 0.0
        x, y = wx / w, wy / w
        spread = wxx / w - x * x
        slope = (wxy / w - x * y) / spread if spread > 1.0 else 0.0
        # A line that is steeper than through the origin would make the first tokens cost less than nothing.
        slope = min(max(slope, 0.0), y / x)
        return y - slope * x, slope

    def seconds(self, begin: int, end: int) -> float:
        """What computing the tokens [begin, end) of one prompt takes, in one step."""
        if end <= begin:
            return 0.0
        level, slope = self.line()
        return self.step_s + (end - begin) * (level + slope * (begin + end) / 2)


@dataclass(slots=True)
class _Link:
    """One tier's bytes and the seconds that they took, of late; `open` loads are under way, `since` when one last
    ended, or the first began."""

    bytes: float = 0.0
    seconds: float = 0.0
    open: int = 0
    since: float = 0.0


class LoadRates:
    """Bandwidth of each tier over the time in which anything was being loaded from it, by whichever request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._links: dict[str, _Link] = {}

    def begin(self, tiers: Mapping[str, int]) -> None:
        """Loads from these tiers begin."""
        for name in tiers:
            link = self._links.get(name)
            if link is None:
                if len(self._links) >= TIERS_MAX:
                    continue
                link = self._links[name] = _Link()
            if link.open == 0:
                link.since = self._clock()
            link.open += 1

    def end(self, tiers: Mapping[str, int], *, arrived: bool) -> None:
        """Those loads have ended: their bytes are here, or nothing is."""
        now = self._clock()
        for name, size in tiers.items():
            link = self._links.get(name)
            if link is None or link.open == 0:
                continue
            link.open -= 1
            took, link.since = max(now - link.since, 1e-6), now
            link.bytes = LOADS_KEPT * link.bytes + (size if arrived else 0)
            link.seconds = LOADS_KEPT * link.seconds + took

    def bandwidth(self, tier: str) -> float | None:
        """Bytes a second; None if nothing is known."""
        link = self._links.get(tier)
        return None if link is None or link.seconds == 0.0 else max(link.bytes, 1.0) / link.seconds

    def idle(self, tier: str) -> bool:
        """Is nothing being loaded from this tier?"""
        link = self._links.get(tier)
        return link is None or link.open == 0

    def values(self) -> dict[str, float]:
        """Bandwidth by tier."""
        known = {name: self.bandwidth(name) for name in tuple(self._links)}
        return {name: rate for name, rate in known.items() if rate is not None}


class Rates:
    """Both sides of a cut. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.prefill = PrefillRate()
        self.loads = LoadRates(clock)

    def gauges(self) -> dict[str, float]:
        """For people: tokens a second at the beginning of a prompt, and bytes a second of each tier."""
        level, slope = self.prefill.line()
        values = {
            "rates.prefill.tokens_per_s": 1 / (level + slope * 256) if self.prefill.samples else 0.0,
            "rates.step_s": self.prefill.step_s,
        }
        return values | {f"rates.{tier}.bytes_per_s": rate for tier, rate in self.loads.values().items()}
