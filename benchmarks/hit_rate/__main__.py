"""The command: which workload, which capacities, which policies."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.hit_rate import plot
from benchmarks.hit_rate.generated import generate
from benchmarks.hit_rate.reference import TEXTBOOK, Belady, infinite, textbook
from benchmarks.hit_rate.replay import Replay
from benchmarks.hit_rate.traces import TraceError, load
from benchmarks.hit_rate.workload import BLOCK_TOKENS, Workload
from benchmarks.report import Measure, Report, parser
from forebay.kvstore.policies.registry import POLICY_NAMES

CAPACITIES = "0.25,0.5,1,2,4,8,16"
GENERATED = 128
SLACK = 1.0
"""Points that `foresight` may be below the better of LRU and ARC, which stand as its peer."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__ or "")
    made.add_argument("--trace", type=Path, help="a trace (.jsonl or .jsonl.zst); default: generated sessions")
    made.add_argument("--capacity", default=CAPACITIES, help="millions of tokens, separated by commas")
    made.add_argument("--policies", default=",".join(POLICY_NAMES), help="the daemon's, separated by commas")
    made.add_argument("--in-turn", action="store_true", help="sessions take turns, instead of keeping their own times")
    made.add_argument("--first", type=int, default=1, help="the first session of the trace to replay")
    made.add_argument("--sessions", type=int, help="how many (default: 128 at their own times, 64 in turn)")
    made.add_argument("--seed", type=int, default=1, help="of generated sessions")
    made.add_argument(
        "--order", choices=("definition", "daemon"), default="definition",
        help="blocks are used and stored deepest first, nothing pinned; or as the daemon does it",
    )  # fmt: skip
    made.add_argument(
        "--attention-tokens", type=int, default=0,
        help="weigh tokens by what they cost: where attention costs as much as all else (0: all the same)",
    )  # fmt: skip
    made.add_argument("--plot", type=Path, help="draw the curves into this file (needs matplotlib)")
    return made.parse_args(argv)


def measure(work: Workload, capacities: Sequence[float], policies: Sequence[str], order: str) -> Iterator[Measure]:
    """Every policy at every capacity, smallest first."""
    whole, optimum = 100 * infinite(work), Belady(work)
    for millions in capacities:
        blocks = int(millions * 1e6 / BLOCK_TOKENS)
        best = 100 * optimum.hit_rate(blocks)
        reference = {name: 100 * textbook(work, name, blocks) for name in TEXTBOOK}
        for name, rate in reference.items():
            yield Measure(f"{millions:g} M, {name} (textbook)", rate, "%", limit=best, ratio=rate / best)
        peer = max(reference["LRU"], reference["ARC"])
        for name in policies:
            rate = 100 * Replay(work, name, blocks, "daemon" if order == "daemon" else "definition").run()
            target = f"{peer - SLACK:.1f}" if name == "foresight" else ""
            ok = rate >= peer - SLACK if target else None
            label = f"{millions:g} M, {name}"
            yield Measure(label, rate, "%", peer=peer, limit=best, ratio=rate / best, target=target, ok=ok)
        yield Measure(f"{millions:g} M, optimum", best, "%", limit=whole, ratio=best / whole)
    yield Measure("infinite", whole, "%")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    given = arguments(argv)
    try:
        capacities = sorted(float(part) for part in given.capacity.split(","))
        policies = [name for name in given.policies.split(",") if name]
        if unknown := set(policies) - set(POLICY_NAMES):
            raise ValueError(f"no policy {sorted(unknown)[0]!r}; there are {', '.join(POLICY_NAMES)}")
        if given.trace is not None:
            work = load(given.trace, given.first - 1, given.sessions, given.in_turn)
        else:
            work = generate(given.sessions or GENERATED, given.seed, given.in_turn)
        work = replace(work, attention_tokens=given.attention_tokens)
        if given.plot is not None:
            plot.check()
    except (TraceError, ValueError, plot.PlotError) as error:
        print(f"hit_rate: {error}", file=sys.stderr)
        return 2
    started = time.monotonic()
    report = Report(f"Token hit rate: {work.name}, {len(work.asks):,} requests, {work.tokens / 1e6:,.1f} M tokens")
    for one in measure(work, capacities, policies, given.order):
        report.add(one)
        print(f"\r{time.monotonic() - started:6.0f} s  {one.name:40}", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    if given.plot is not None:
        plot.draw(report.measures, work.name, given.plot)
    return report.print(given.json)


if __name__ == "__main__":
    sys.exit(main())
