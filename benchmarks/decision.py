"""How long one decision takes: `python -m benchmarks.decision`.

512 workers, eight to a store, and prompts of 100,000 tokens in blocks of 16 that many of them have in part. Includes
hashing the prompt, not tokenising it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.report import Measure, Report, parser
from forebay.scheduler.fleet import Fleet, Worker
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.places import Holders, Tier
from forebay.scheduler.policies import LeastTtft
from forebay.scheduler.routing import Prompt, Routing

LIMIT_S = 0.001
STORE_WORKERS, CUTS = 8, 200


def routing_of(workers: int, prompts: Sequence[Prompt], rng: random.Random) -> Routing:
    """Workers and stores that hold the prompts up to a few hundred different places."""
    holders, index = Holders(), PrefixIndex()
    fleet = Fleet([Worker(f"w{n}", f"s{n // STORE_WORKERS}") for n in range(workers)], holders)
    for prompt in prompts:
        keys = prompt.keys(16)
        for worker in rng.sample(range(workers), workers // 16):
            index.stored(holders.number(f"w{worker}", Tier.DEVICE), keys[: CUTS * rng.randrange(30)])
        for store in range(len(fleet.stores)):
            end = CUTS * rng.randrange(30)
            index.stored(holders.number(f"s{store}", Tier.HOST), keys[end // 2 : end])
            index.stored(holders.number(f"s{store}", Tier.DISK), keys[:end])
    return Routing.of(fleet, index, LeastTtft(random.Random(1)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    made = parser(__doc__ or "")
    made.add_argument("--workers", type=int, default=512, help="how many")
    made.add_argument("--tokens", type=int, default=100_000, help="of a prompt")
    made.add_argument("--decisions", type=int, default=1000, help="how many are timed")
    given = made.parse_args(argv)
    rng, numbers = random.Random(1), np.random.default_rng(1)
    prompts = [
        Prompt("m", numbers.integers(0, 1 << 17, given.tokens).astype(np.uint32), given.tokens) for _ in range(8)
    ]
    routing = routing_of(given.workers, prompts, rng)
    everyone, took, cpu = np.ones(given.workers, np.bool_), [], []
    for number in range(given.decisions):
        # A prompt of its own, since it remembers its keys.
        prompt, now = replace(prompts[number % len(prompts)]), 0.05 * number
        started, begun = time.perf_counter(), time.process_time()
        decision = routing.decide(prompt, now, everyone)
        took.append(time.perf_counter() - started)
        cpu.append(time.process_time() - begun)
        routing.ended(routing.sent(decision, now), now)
    report = Report(f"Decisions: {given.workers} workers, {given.tokens:,} tokens")
    for share in (0.5, 0.99):
        value = float(np.quantile(took, share))
        ok = value <= LIMIT_S if share == 0.99 else None
        report.add(Measure(f"p{100 * share:g}", 1e3 * value, "ms", target="1" if share == 0.99 else "", ok=ok))
        report.add(Measure(f"p{100 * share:g} of processor time", 1e3 * float(np.quantile(cpu, share)), "ms"))
    return report.print(given.json)


if __name__ == "__main__":
    sys.exit(main())
