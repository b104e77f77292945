"""What is replayed: requests in order, each a time, a length in tokens and the numbers of its blocks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

BLOCK_TOKENS = 512
GAP_S_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `blocks` are numbers that determine their whole prefix; the last may stand for a partial block."""

    now: float
    tokens: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they are served. `blocks` counts the distinct ones, `parents` has each one's
    predecessor (-1: none).

    With `attention_tokens`, rates weigh a token by what computing it again costs: 1 + position / `attention_tokens`.
    """

    name: str
    asks: Sequence[Ask]
    parents: Sequence[int]
    starts: Sequence[int]
    attention_tokens: int = 0

    @property
    def blocks(self) -> int:
        return len(self.parents)

    @property
    def tokens(self) -> int:
        """Of all requests together."""
        return sum(ask.tokens for ask in self.asks)

    def saved(self, ask: Ask, leading: int) -> float:
        """What a hit on so many of its blocks is worth."""
        return self._worth(min(BLOCK_TOKENS * leading, ask.tokens))

    @property
    def whole(self) -> float:
        """What hits on everything would be worth."""
        return sum(self._worth(ask.tokens) for ask in self.asks)

    def _worth(self, tokens: int) -> float:
        return tokens + tokens * tokens / (2 * self.attention_tokens) if self.attention_tokens else tokens


Session = Sequence[Ask]
"""One session's requests at its own times; its block numbers mean nothing outside of it."""


def workload(name: str, asks: Iterable[tuple[float, int, Sequence[object]]]) -> Workload:
    """Number the blocks anew, from 0, in the order in which they come up."""
    numbers: dict[object, int] = {}
    parents, starts = array("q"), array("q")
    made = []
    for now, tokens, names in asks:
        blocks = array("q")
        for depth, block in enumerate(names):
            number = numbers.setdefault(block, len(numbers))
            if number == len(parents):
                parents.append(blocks[-1] if depth else -1)
                starts.append(depth * BLOCK_TOKENS)
            blocks.append(number)
        made.append(Ask(now, tokens, blocks))
    return Workload(name, made, parents, starts)


def timed(name: str, sessions: Sequence[Session], at_once: int = 16, seed: int = 1) -> Workload:
    """Sessions at their own times, gaps cut to GAP_S_MAX, starting at random so that `at_once` run on average."""
    times = [_times(session) for session in sessions]
    mean = sum(own[-1] for own in times) / len(times)
    rng, start = random.Random(seed), 0.0
    asks = []
    for number, (session, own) in enumerate(zip(sessions, times, strict=True)):
        start += rng.expovariate(at_once / mean)
        asks += [(start + now, ask, number) for now, ask in zip(own, session, strict=True)]
    asks.sort(key=lambda item: item[0])
    return workload(name, ((now, ask.tokens, [(s, b) for b in ask.blocks]) for now, ask, s in asks))


def _times(session: Session) -> list[float]:
    times = [0.0]
    for before, after in pairwise(session):
        times.append(times[-1] + min(after.now - before.now, GAP_S_MAX))
    return times


def round_robin(name: str, sessions: Sequence[Session], slots: int = 16) -> Workload:
    """One request of each running session in turn, a second apart; the next session takes a finished one's place."""
    waiting = list(range(len(sessions)))
    running = [(number, 0) for number in waiting[:slots]]
    waiting = waiting[slots:]
    asks: list[tuple[float, int, Sequence[object]]] = []
    while running:
        following = []
        for number, turn in running:
            ask = sessions[number][turn]
            asks.append((float(len(asks)), ask.tokens, [(number, block) for block in ask.blocks]))
            if turn + 1 < len(sessions[number]):
                following.append((number, turn + 1))
            elif waiting:
                following.append((waiting.pop(0), 0))
        running = following
    return workload(name, asks)
