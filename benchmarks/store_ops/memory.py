"""Prints how many bytes of memory a core takes for each of N chunks: `python -m benchmarks.store_ops.memory N`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.synthetic import filled_core


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Fill a core and print the bytes a chunk."""
    chunks = int(sys.argv[1])
    before = resident()
    core = filled_core(chunks)
    print((resident() - before) / len(core.table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
