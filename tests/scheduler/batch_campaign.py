"""Many worlds for the batch scheduler, one seed each.

    python -m tests.scheduler.batch_campaign --seeds 20000
    python -m tests.scheduler.batch_campaign --first 1234 --seeds 1        one of them again
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.scheduler.batch_worlds import crowd, halves, play, world


def campaign(first: int, seeds: int) -> list[str]:
    """Play seeds [first, first + seeds) as worlds of each kind; the names of those that failed. Prints figures."""
    failed: list[str] = []
    totals: Counter[str] = Counter()
    began = time.monotonic()
    for seed in range(first, first + seeds):
        for make in (world, crowd, halves):
            worker, arrivals = make(seed)
            try:
                play(worker, arrivals)
            except AssertionError:
                failed.append(f"{make.__name__} {seed}")
                traceback.print_exc()
            totals.update(
                worlds=1, turns=worker.turn, requests=len(arrivals), preempted=worker.preempted,
                loads=worker.gained, loads_failed=worker.failed, cancelled=worker.cancelled, pushes=len(worker.pushed),
                waited_for_draining=worker.drained, asleep=worker.slept, longest=0,
                met_halfway=worker.cuts.met, woken=worker.cuts.woken, broken_off=worker.cuts.broken,
            )  # fmt: skip
            totals["longest"] = max(totals["longest"], worker.turn)
    print(f"seeds {first} to {first + seeds - 1}, {time.monotonic() - began:.0f} s")
    for name, count in totals.items():
        print(f"  {name.replace('_', ' ')}: {count:,}")
    print(f"  failed: {', '.join(failed) or 'none'}")
    return failed


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=20_000)
    flags = parser.parse_args()
    return 1 if campaign(flags.first, flags.seeds) else 0


if __name__ == "__main__":
    sys.exit(main())
