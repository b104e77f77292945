"""Requests of a trace (or generated ones), with the prefix keys that the router computes of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.hit_rate.traces import TraceError, lines
from benchmarks.simulate.hardware import BLOCK, Hardware
from forebay.scheduler.key_table import Keys
from forebay.scheduler.prefix_keys import as_tokens, prefix_keys, root_of
from forebay.scheduler.routing import Prompt

MODEL = "simulated"
TURNS_MEAN, SYSTEMS = 6, 12


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when, how long, and the numbers of its blocks, each of which stands for all before it too.

    `after` is the `number` of the turn before it, -1 for the first one of a conversation.
    """

    at: float
    tokens: int
    output: int
    blocks: tuple[int, ...]
    number: int = 0
    after: int = -1


@dataclass(frozen=True, slots=True)
class TracePrompt(Prompt):
    """A prompt of which block numbers are known instead of tokens: to the index, one number is one token."""

    ready: Keys | None = None

    def keys(self, block_tokens: int) -> Keys:
        """Made once, whatever the size that costs are counted in."""
        assert self.ready is not None
        return self.ready


def prompt_of(request: Request) -> TracePrompt:
    """What the router is given."""
    keys = prefix_keys(root_of(MODEL, 1), as_tokens(request.blocks), 1)
    return TracePrompt(MODEL, None, request.tokens, ready=keys)


def from_trace(path: Path, limit: int | None = None) -> list[Request]:
    """A trace of requests with times of their own. Raises TraceError."""
    rows = [row for row in lines(path) if "timestamp" in row]
    if not rows:
        raise TraceError(f"{path}: has no requests with a timestamp")
    rows.sort(key=lambda row: row["timestamp"])
    numbers: dict[int, int] = {}
    return in_turn(
        Request(
            row["timestamp"] / 1000, row["input_length"], row.get("output_length", 1),
            tuple(numbers.setdefault(name, len(numbers)) for name in row["hash_ids"]),
        )
        for row in rows[:limit]
    )  # fmt: skip


def in_turn(requests: Iterable[Request]) -> list[Request]:
    """The same requests, numbered in order of time, each told which one it continues: the last one before it of which
    it has all whole blocks, two at least (the first one is everybody's), and which nobody continues yet."""
    last: dict[int, int] = {}
    made = []
    for number, request in enumerate(sorted(requests, key=lambda request: request.at)):
        whole = request.blocks[:-1]
        end = next((block for block in reversed(request.blocks[1:]) if block in last), None)
        made.append(replace(request, number=number, after=-1 if end is None else last.pop(end)))
        if len(whole) > 1:
            last[whole[-1]] = number
    return made


def generated(count: int, seed: int) -> list[Request]:
    """Conversations of the shape that the conversation trace has: a shared first block, a few system prompts, turns
    that grow, minutes between them, inputs of 12,000 tokens on average."""
    rng = random.Random(seed)
    fresh = iter(range(1 + SYSTEMS * 8, 1 << 31))
    systems = [[0, *range(1 + 8 * number, 1 + 8 * number + rng.randrange(8))] for number in range(SYSTEMS)]
    made: list[Request] = []
    while len(made) < count:
        start = rng.uniform(0, 3600)
        chain = [*rng.choice(systems), *(next(fresh) for _ in range(int(rng.lognormvariate(2.5, 1.0))))]
        for _ in range(1 + int(rng.expovariate(1 / TURNS_MEAN) * (rng.random() < 0.06))):
            tokens = max(1, BLOCK * len(chain) - rng.randrange(BLOCK))
            made.append(Request(start, tokens, 1 + int(rng.expovariate(1 / 343)), tuple(chain)))
            start += rng.lognormvariate(3.5, 1.0)
            chain = chain + [next(fresh) for _ in range(1 + int(rng.expovariate(1 / 4)))]
    return in_turn(made[:count])


def copies_of(requests: Sequence[Request], count: int, seed: int) -> list[Request]:
    """So many users of the same habits, who share nothing: each copy has blocks of its own and begins up to a minute
    later. For clusters that would otherwise replay an hour in seconds."""
    rng, blocks = random.Random(seed), 1 + max(max(request.blocks, default=0) for request in requests)
    made = list(requests)
    for copy in range(1, count):
        late, first = rng.uniform(0, 60), copy * blocks
        made += [
            replace(
                request, at=request.at + late, blocks=tuple(first + block for block in request.blocks),
                number=copy * len(requests) + request.number,
                after=-1 if request.after < 0 else copy * len(requests) + request.after,
            )
            for request in requests
        ]  # fmt: skip
    return sorted(made, key=lambda request: request.at)


def infinite_hits(requests: Sequence[Request]) -> list[int]:
    """For each request: the tokens of it that were computed before, ever."""
    seen: set[int] = set()
    hits = []
    for request in requests:
        leading = next((at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        hits.append(min(BLOCK * leading, request.tokens))
        seen.update(request.blocks)
    return hits


def at_load(requests: Sequence[Request], hardware: Hardware, workers: int, load: float) -> list[Request]:
    """The same requests, with arrival times scaled to this share of what the workers could compute at best."""
    first, last = requests[0].at, requests[-1].at
    scale = seconds_for(requests, hardware, workers, load) / max(last - first, 1e-9)
    return [replace(request, at=(request.at - first) * scale) for request in requests]


def seconds_for(requests: Sequence[Request], hardware: Hardware, workers: int, load: float) -> float:
    """How long the workers are given for all of them: their devices then are busy for `load` of the time, if nothing
    is computed twice. Streams that are decoded beside it slow a prefill, and there are the more of them the less time
    there is."""
    work = sum(
        hardware.prefill_s(min(hit, request.tokens - 1), request.tokens)
        for request, hit in zip(requests, infinite_hits(requests), strict=True)
    ) * math.exp(hardware.noise**2 / 2)  # fmt: skip
    slowed = work * hardware.decode_slows * hardware.decode_s * sum(request.output for request in requests)
    # busy = work * (1 + slows * streams a worker) = load * given, where streams a worker = decoded seconds / given
    given = (work + math.sqrt(work**2 + 4 * load * slowed)) / (2 * load)
    return given / workers


def share(parts: Iterable[int], requests: Sequence[Request]) -> float:
    """Of all tokens."""
    return float(np.sum(np.fromiter(parts, np.int64))) / sum(request.tokens for request in requests)
