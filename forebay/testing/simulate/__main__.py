"""`python -m forebay.testing.simulate`: run seeds, print what went wrong and how to see it again."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import traceback
from dataclasses import dataclass, field

from forebay.testing.simulate.plan import FAULTS, draw_plan
from forebay.testing.simulate.world import Outcome, simulate


@dataclass
class Figures:
    """What all seeds together did; `least` is the least that any one did."""

    passed: int = 0
    failed: list[int] = field(default_factory=list)
    virtual_s: float = 0.0
    total: dict[str, int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)

    def take(self, outcome: Outcome) -> None:
        """A seed has passed."""
        self.passed += 1
        self.virtual_s += outcome.virtual_s
        for name, count in outcome.counts.items():
            self.total[name] = self.total.get(name, 0) + count
        for name in ("op.lookup", "op.read", "op.commit", "ticks"):
            self.least[name] = min(self.least.get(name, 1 << 60), outcome.counts[name])


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m forebay.testing.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--minutes", type=float, help="stop after so much real time")
    parser.add_argument("--keep-going", action="store_true", help="don't stop at the first failure")
    parser.add_argument("--json", action="store_true", help="print figures as one line of JSON at the end")
    parser.add_argument("--verbose", action="store_true", help="show the plan of each seed and the parts' own logs")
    options = parser.parse_args(arguments)
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Run the seeds that were asked for."""
    told = Figures()
    began = time.monotonic()
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
            print(f"  again: python -m forebay.testing.simulate --seed {seed} --verbose", flush=True)
            told.failed.append(seed)
            if not options.keep_going:
                break
            continue
        told.take(outcome)
        if options.verbose:
            print(f"seed {seed}: digest {outcome.digest}, {outcome.steps} steps")
    report(told, time.monotonic() - began)
    if options.json:
        print(json.dumps(dataclasses.asdict(told)))
    return 1 if told.failed else 0


def report(told: Figures, real_s: float) -> None:
    """What was run and what was exercised."""
    failed, seeds = told.failed, told.passed + len(told.failed)
    print(
        f"{told.passed} seeds passed, {len(failed)} failed{f' ({failed})' if failed else ''}; "
        f"{told.virtual_s:.0f} virtual seconds in {real_s:.1f} s, {real_s / max(seeds, 1) * 1e3:.0f} ms a seed"
    )
    if not told.passed:
        return
    print("least in one seed: " + ", ".join(f"{name} {count}" for name, count in sorted(told.least.items())))
    print("faults: " + ", ".join(f"{fault} {told.total.get(f'fault.{fault}', 0)}" for fault in FAULTS))
    other = {name: count for name, count in sorted(told.total.items()) if not name.startswith("fault.")}
    print("events: " + ", ".join(f"{name} {count}" for name, count in other.items()))


if __name__ == "__main__":
    sys.exit(main())
