"""Figures that are known from elsewhere, to be reproduced before anything else is believed: hit rates of block-level
caches that cost nothing, on eight workers; and what following the longest prefix comes to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.report import Measure
from benchmarks.simulate.caches import Device
from benchmarks.simulate.hardware import BLOCK
from benchmarks.simulate.workload import Request, infinite_hits, share
from forebay.scheduler.cost import estimate
from forebay.scheduler.fleet import Fleet, Worker
from forebay.scheduler.places import Holders
from forebay.scheduler.policies import LongestPrefix, Policy, RoundRobin, View
from forebay.scheduler.reach import nothing

WORKERS, PRIVATE_TOKENS = 8, 1_000_000
KNOWN = {"infinite": 0.374, "round robin, private 1 M tokens": 0.081, "longest prefix, imbalance": 8.0}


def anchors(requests: Sequence[Request], known: bool) -> Iterator[Measure]:
    """The anchors. `known`: this is the conversation trace, of which they are known."""
    rotated = _private(requests, RoundRobin(random.Random(1)))
    herded = _private(requests, LongestPrefix(random.Random(1)))
    found = {
        "infinite": share(infinite_hits(requests), requests),
        "round robin, private 1 M tokens": share(rotated[0], requests),
        "longest prefix, imbalance": max(herded[1].values()) * WORKERS / sum(herded[1].values()),
    }
    for name, value in found.items():
        target = KNOWN[name] if known else None
        ok = None if target is None else abs(value - target) <= 0.01 * max(target, 0.1)
        yield Measure(name, value, "", target="" if target is None else f"{target:g}", ok=ok)


def _private(requests: Sequence[Request], policy: Policy) -> tuple[list[int], Counter[int]]:
    """Tokens that hit, and requests a worker: eight private caches, and load that never lasts."""
    fleet = Fleet([Worker(str(number)) for number in range(WORKERS)], Holders())
    caches = [Device(PRIVATE_TOKENS // BLOCK) for _ in range(WORKERS)]
    everyone, idle, none = np.ones(WORKERS, np.bool_), np.zeros(WORKERS, np.int64), np.zeros(WORKERS)
    hits, sent = [], Counter[int]()
    for request in requests:
        reach = nothing(fleet)
        reach.device = np.array([_leading(cache, request.blocks) * BLOCK for cache in caches])
        view = View(
            request.tokens, reach, idle, everyone,
            lambda reach=reach, length=request.tokens: estimate(length, reach, fleet, none, none, idle),  # type: ignore[misc]
        )  # fmt: skip
        worker = policy.choose(view).worker
        hits.append(min(int(reach.device[worker]), request.tokens))
        caches[worker].take(request.blocks)
        sent[worker] += 1
    return hits, sent


def _leading(cache: Device, blocks: Sequence[int]) -> int:
    return next((at for at, block in enumerate(blocks) if block not in cache), len(blocks))
