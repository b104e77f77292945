"""Generated sessions of the shape that agents and conversations have; ours, from a seed.

A session begins with a system prompt that it shares with others of its kind, grows turn by turn by what tools and
people say, waits briefly for tools and long for people, and now and then starts a subagent with a short prompt of its
own and waits for that.
"""

from __future__ import annotations

import random

from benchmarks.hit_rate.workload import BLOCK_TOKENS, Ask, Session, Workload, round_robin, timed

SYSTEM_BLOCKS = 24


def generate(sessions: int, seed: int, in_turn: bool) -> Workload:
    """`sessions` sessions, sixteen at a time."""
    rng = random.Random(seed)
    made = [_session(rng, number) for number in range(sessions)]
    name = f"{sessions} generated sessions, "
    return round_robin(name + "round robin", made) if in_turn else timed(name + "own times", made)


class _Names:
    """Block names that no two prefixes share."""

    def __init__(self, number: int) -> None:
        self._next = number << 32

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def _session(rng: random.Random, number: int) -> Session:
    names = _Names(number + 1)
    # Names are local to a session when it is replayed: a shared system prompt shows as what its subagents begin with.
    system = names.take(SYSTEM_BLOCKS)
    chain = system + names.take(rng.randint(10, 240))
    asks, now = [], 0.0
    pace = rng.lognormvariate(2.6, 0.4)
    for _ in range(1 + int(rng.expovariate(1 / 50))):
        asks.append(Ask(now, len(chain) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS), list(chain)))
        if rng.random() < 0.03:
            now = _subagent(rng, names, system, asks, now)
        person = rng.random() < 0.12
        now += rng.lognormvariate(4.5, 1.2) if person else 3 + rng.lognormvariate(0, 0.6) * pace
        chain += names.take(min(int(rng.expovariate(1 / 3)), 60))
        if rng.random() < 0.01:  # the session is summed up, and goes on from that
            chain = system + names.take(rng.randint(10, 60))
    return asks


def _subagent(rng: random.Random, names: _Names, system: list[int], asks: list[Ask], now: float) -> float:
    chain = system[: SYSTEM_BLOCKS // 2] + names.take(rng.randint(1, 8))
    for _ in range(rng.randint(2, 12)):
        now += 2 + rng.lognormvariate(1.5, 0.6)
        asks.append(Ask(now, len(chain) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS), list(chain)))
        chain += names.take(int(rng.expovariate(1 / 3)))
    return now
