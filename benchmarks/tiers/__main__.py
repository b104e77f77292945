"""What tiers reach: store, load and lookup, each beside what is under it, and beside a peer where there is one.

    python -m benchmarks.tiers [fs s3 p2p mooncake codec beside] [--json]

All of them in turn, or those that are named; `python -m benchmarks.tiers.fs --help` tells what one alone takes.
"""

from __future__ import annotations

import importlib
import sys

NAMES = ("fs", "s3", "p2p", "mooncake", "codec", "beside")


def main() -> int:
    """Run them; exit code 1 if any target is missed."""
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    unknown = sorted(set(names) - set(NAMES))
    if unknown or "--help" in options:
        print((__doc__ or "").strip())
        return 2 if unknown else 0
    worst = 0
    for name in names or NAMES:
        sys.argv = [f"benchmarks.tiers.{name}", *options]
        worst = max(worst, importlib.import_module(f"benchmarks.tiers.{name}").main())
        print()
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
