"""The command: anchors, then every policy at every cluster size and load."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.hit_rate.traces import TraceError
from benchmarks.report import Report, machine, parser
from benchmarks.simulate.anchors import anchors
from benchmarks.simulate.hardware import HARDWARE
from benchmarks.simulate.run import Figures, Setup, Simulation
from benchmarks.simulate.workload import (
    Request,
    at_load,
    copies_of,
    from_trace,
    generated,
    infinite_hits,
    share,
)
from forebay.cli.tables import table
from forebay.kvstore.policies.registry import POLICY_NAMES
from forebay.scheduler.policies import POLICIES

CONVERSATION = "mooncake_conversation_trace"
HEAD = (
    "workers", "load", "policy", "hit", "of infinite", "believed", "ttft p50", "p90", "p99", "imbalance", "busy",
    "rejected", "resent", "device TB", "disk TB", "net TB", "took",
)  # fmt: skip


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__ or "")
    made.add_argument("--trace", type=Path, help="a trace of requests (.jsonl or .jsonl.zst); default: generated ones")
    made.add_argument("--requests", type=int, help="only the first so many (default: all; generated: 12,000)")
    made.add_argument("--workers", default="8,64", help="cluster sizes, with commas between")
    made.add_argument("--copies", type=int, help="of the trace (default: one for 8 workers each, up to 8)")
    made.add_argument("--loads", default="70,85,95", help="percent of what the devices can do, with commas between")
    made.add_argument("--policies", default=",".join(POLICIES), help="with commas between")
    made.add_argument("--hardware", choices=sorted(HARDWARE), default="h100", help="see docs/hardware.md")
    made.add_argument("--eviction", choices=POLICY_NAMES, default="lru", help="of the stores' tiers")
    made.add_argument("--no-store", action="store_true", help="workers have their devices alone")
    made.add_argument("--predict", type=float, default=5.0, metavar="S", help="how long a prediction lives; 0: none")
    made.add_argument("--max-waiting", type=int, default=0, help="requests that a worker queues; beyond: rejected")
    made.add_argument("--kill", type=int, default=0, help="workers that die halfway, and come back after 30 s")
    made.add_argument("--open-loop", action="store_true", help="send turns at their times, answered or not")
    made.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    made.add_argument("--skip-anchors", action="store_true", help="don't reproduce known figures first")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code: 1 if an anchor isn't met."""
    given = arguments(argv)
    try:
        requests = _requests(given)
        sizes = [int(part) for part in given.workers.split(",")]
        loads = [float(part) / 100 for part in given.loads.split(",")]
        policies = given.policies.split(",")
        if unknown := set(policies) - set(POLICIES):
            raise ValueError(f"no policy {sorted(unknown)[0]!r}; there are {', '.join(POLICIES)}")
    except (TraceError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    code = 0
    if not given.skip_anchors:
        report = Report("Anchors: eight caches that cost nothing")
        known = given.trace is not None and CONVERSATION in given.trace.name and given.requests is None
        for measure in anchors(requests, known):
            report.add(measure)
        code = report.print(given.json)
    print(f"\n{machine()}\n" if not given.json else "", end="")
    rows = list(_all(given, requests, sizes, loads, policies))
    if not given.json:
        print(table(HEAD, rows, right=range(3, len(HEAD))))
    return code


def _requests(given: argparse.Namespace) -> list[Request]:
    if given.trace is not None:
        return from_trace(given.trace, given.requests)
    return generated(given.requests or 12_000, given.seed)


def _all(
    given: argparse.Namespace, requests: Sequence[Request], sizes: Sequence[int], loads: Sequence[float],
    policies: Sequence[str],
) -> Iterator[list[str]]:  # fmt: skip
    hardware = HARDWARE[given.hardware]
    for workers in sizes:
        copies = given.copies or max(1, min(8, workers // 8))
        copied = copies_of(requests, copies, given.seed)
        infinite = share(infinite_hits(copied), copied)
        for load in loads:
            scaled = at_load(copied, hardware, workers, load)
            for policy in policies:
                setup = Setup(
                    hardware, workers, policy, stores=not given.no_store, eviction=given.eviction,
                    predict_s=given.predict, max_waiting=given.max_waiting, kill=given.kill, seed=given.seed,
                    in_turn=not given.open_loop,
                )  # fmt: skip
                # Millions of cache entries live to the end: looking through them for garbage takes a fifth of the time.
                gc.collect()
                gc.disable()
                started = time.perf_counter()
                figures = Simulation(setup, scaled).run()
                took = time.perf_counter() - started
                gc.enable()
                if given.json:
                    print(json.dumps(_as_json(setup, load, copies, infinite, figures, took)), flush=True)
                else:
                    print(f"{workers} workers, {load:.0%}, {policy}: {took:.0f} s", file=sys.stderr)
                yield _row(setup, load, infinite, figures, took)


def _row(setup: Setup, load: float, infinite: float, figures: Figures, took: float) -> list[str]:
    hit = figures.hit_tokens / figures.tokens
    return [
        str(setup.workers), f"{load:.0%}", setup.policy, f"{hit:.3f}", f"{hit / infinite:.3f}",
        f"{figures.believed_tokens / figures.tokens:.3f}", *(f"{figures.quantile(q):.2f}" for q in (0.5, 0.9, 0.99)),
        f"{figures.imbalance:.2f}", f"{figures.utilisation:.0%}", str(figures.rejected), str(figures.resent),
        *(f"{figures.moved[link] / 1e12:.2f}" for link in ("device", "disk", "network")), f"{took:.0f} s",
    ]  # fmt: skip


def _as_json(
    setup: Setup, load: float, copies: int, infinite: float, figures: Figures, took: float
) -> dict[str, Any]:
    shown = asdict(figures) | {"ttft": {f"p{100 * q:g}": figures.quantile(q) for q in (0.5, 0.9, 0.99)}}
    settings = asdict(setup) | {"hardware": setup.hardware.name, "load": load, "copies": copies}
    return {"setup": settings, "infinite": infinite, "requests": len(figures.ttft), "took_s": took} | shown


if __name__ == "__main__":
    sys.exit(main())
