"""How a worker is chosen: one class a policy, all from the same view.

    round-robin       each in turn
    least-load        fewest requests in flight
    power-of-two      the less loaded of two drawn at random
    longest-prefix    whoever has most of the prompt on its device; load breaks ties
    cache-aware       the longest prefix if it is long enough, unless loads are out of balance; else least load
    ttft              the least estimated time to first token (see `cost`)

The others are here to be compared with, and for clusters of which nothing is known. Loads are those of requests
that this router has in flight, counted on every path. Ties are drawn, so that no worker is everybody's first choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forebay.scheduler.cost import Estimate
from forebay.scheduler.fleet import Numbers
from forebay.scheduler.reach import Reach

Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class View:
    """What a policy may look at: one prompt, and every worker's state. `open` are the workers that may be chosen,
    at least one. `estimate` costs something, so it is made when it is asked for."""

    prompt_tokens: int
    reach: Reach
    requests: Numbers
    open: Flags
    estimate: Callable[[], Estimate]
    session: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker, and why it."""

    worker: int
    reason: str


class Policy(Protocol):
    """Chooses among the open workers. May keep state; never blocks."""

    name: str

    def choose(self, view: View) -> Choice:
        """One of the open workers."""
        ...


@dataclass
class RoundRobin:
    """Each in turn."""

    rng: random.Random
    name: str = "round-robin"
    _next: int = 0

    def choose(self, view: View) -> Choice:
        """The next open one."""
        order = np.roll(np.arange(view.open.size), -self._next)
        worker = int(order[view.open[order]][0])
        self._next = (worker + 1) % view.open.size
        return Choice(worker, "turn")


@dataclass
class LeastLoad:
    """Fewest requests in flight."""

    rng: random.Random
    name: str = "least-load"

    def choose(self, view: View) -> Choice:
        """One of the least loaded."""
        return Choice(_least(view.requests, view.open, self.rng), "load")


@dataclass
class PowerOfTwo:
    """The less loaded of two."""

    rng: random.Random
    name: str = "power-of-two"

    def choose(self, view: View) -> Choice:
        """Of two that are drawn, if there are two."""
        listed = np.flatnonzero(view.open).tolist()
        drawn = self.rng.sample(listed, min(2, len(listed)))
        return Choice(min(drawn, key=lambda worker: int(view.requests[worker])), "load")


@dataclass
class LongestPrefix:
    """Most of the prompt on the device."""

    rng: random.Random
    name: str = "longest-prefix"

    def choose(self, view: View) -> Choice:
        """Whoever has most; nobody has any: the least loaded."""
        device = np.where(view.open, view.reach.device, -1)
        longest = view.open & (device == device.max())
        return Choice(_least(view.requests, longest, self.rng), "prefix" if device.max() > 0 else "load")


@dataclass
class CacheAware:
    """Two thresholds: for balance, and for what counts as a prefix worth following.

    Out of balance is where the most loaded has over `slack` requests more than the least loaded and over `ratio`
    times as many. A prefix counts from `share` of the prompt on.
    """

    rng: random.Random
    share: float = 0.5
    slack: int = 32
    ratio: float = 1.1
    name: str = "cache-aware"

    def choose(self, view: View) -> Choice:
        """By balance, then by prefix, then by load."""
        loads = view.requests[view.open]
        most, least = int(loads.max()), int(loads.min())
        if most - least > self.slack and most > self.ratio * least:
            return Choice(_least(view.requests, view.open, self.rng), "balance")
        device = np.where(view.open, view.reach.device, -1)
        if device.max() > self.share * view.prompt_tokens:
            return Choice(_least(view.requests, view.open & (device == device.max()), self.rng), "prefix")
        return Choice(_least(view.requests, view.open, self.rng), "load")


@dataclass
class LeastTtft:
    """The least estimated time to first token, with what it costs others at `thrift` of its weight.

    Estimates within `near` of the best, or within `near_s`, count as equal: then the session's worker is taken if it
    is among them, else the one with the fewest requests.
    """

    rng: random.Random
    thrift: float = 0.5
    near: float = 0.02
    near_s: float = 0.002
    name: str = "ttft"

    def choose(self, view: View) -> Choice:
        """By cost."""
        estimate = view.estimate()
        cost = np.where(view.open, estimate.ttft_s + self.thrift * estimate.work_s, np.inf)
        least = float(cost.min())
        equal = view.open & (cost <= max(least * (1 + self.near), least + self.near_s))
        if view.session is not None and equal[view.session]:
            return Choice(view.session, "session")
        worker = _least(view.requests, equal, self.rng)
        return Choice(worker, self._reason(worker, estimate, view))

    @staticmethod
    def _reason(worker: int, estimate: Estimate, view: View) -> str:
        if estimate.moves[worker]:
            return "move"
        return "prefix" if view.reach.near[worker] > 0 else "load"


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "longest-prefix": LongestPrefix,
    "cache-aware": CacheAware,
    "ttft": LeastTtft,
}


def _least(requests: Numbers, among: Flags, rng: random.Random) -> int:
    """One of the least loaded among these, drawn."""
    loads = np.where(among, requests, np.iinfo(np.int64).max)
    listed = np.flatnonzero(loads == loads.min()).tolist()
    return int(listed[0] if len(listed) == 1 else rng.choice(listed))
