"""`python -m forebay.testing.simulate`: run seeds, print what went wrong and how to see it again."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from forebay.testing.simulate.plan import FAULTS, draw_plan
from forebay.testing.simulate.world import simulate


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m forebay.testing.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--minutes", type=float, help="stop after so much real time")
    parser.add_argument("--keep-going", action="store_true", help="don't stop at the first failure")
    parser.add_argument("--verbose", action="store_true", help="show the plan of each seed and the parts' own logs")
    options = parser.parse_args(arguments)
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Run the seeds that were asked for."""
    began, total, failed = time.monotonic(), Counter[str](), []
    least: dict[str, int] = {}
    virtual = 0.0
    done = 0
    for seed in range(options.seed, options.seed + options.seeds):
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            break
        plan = draw_plan(seed)
        if options.verbose:
            print(f"seed {seed}: {plan.describe()}")
        try:
            outcome = simulate(plan, verbose=options.verbose)
        except Exception as error:
            traceback.print_exception(error)
            print(f"seed {seed} failed: {error}\n  {plan.describe()}")
            print(f"  again: python -m forebay.testing.simulate --seed {seed} --verbose")
            failed.append(seed)
            if not options.keep_going:
                break
            continue
        done += 1
        virtual += outcome.virtual_s
        total.update(outcome.counts)
        for name in ("op.lookup", "op.read", "op.commit", "ticks"):
            least[name] = min(least.get(name, 1 << 60), outcome.counts[name])
        if options.verbose:
            print(f"seed {seed}: digest {outcome.digest}, {outcome.steps} steps")
    report(done, failed, total, least, virtual, time.monotonic() - began)
    return 1 if failed else 0


def report(
    done: int, failed: list[int], total: Counter[str], least: dict[str, int], virtual_s: float, real_s: float
) -> None:
    """What was run and what was exercised."""
    print(
        f"{done} seeds passed, {len(failed)} failed{f' ({failed})' if failed else ''}; "
        f"{virtual_s:.0f} virtual seconds in {real_s:.1f} s, {real_s / max(done + len(failed), 1) * 1e3:.0f} ms a seed"
    )
    if not done:
        return
    print("least in one seed: " + ", ".join(f"{name} {count}" for name, count in sorted(least.items())))
    print("faults: " + ", ".join(f"{fault} {total[f'fault.{fault}']}" for fault in FAULTS))
    other = {name: count for name, count in sorted(total.items()) if not name.startswith("fault.")}
    print("events: " + ", ".join(f"{name} {count}" for name, count in other.items()))


if __name__ == "__main__":
    sys.exit(main())
