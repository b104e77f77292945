"""Keeps a copying thread's OpenMP to itself.

libgomp gives every thread that runs a parallel region a team of its own. A copy of torch that is large enough is one,
and a second team, even an idle one, makes more threads than cores; from then on all teams of the process sleep at
every barrier instead of spinning, and a forward of the engine has hundreds of barriers. Measured with vLLM on two
cores: docs/benchmarks.md, "A decode beside the connector's copies".
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

LIBRARIES = ("libgomp", "libomp", "libiomp")


def without_team() -> None:
    """From now on torch's operations on the calling thread run on it alone; other threads keep what they have.

    Not `torch.set_num_threads`: that also sets MKL's threads, for the whole process.
    """
    torch.get_num_threads()  # the first question in a thread sets torch's own number, and would undo ours later
    for library in _loaded():
        ctypes.CDLL(library).omp_set_num_threads(1)


def _loaded() -> list[str]:
    """Paths of the OpenMP runtimes in this process, such as torch's own copy."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return sorted(path for path in mapped if Path(path).name.startswith(LIBRARIES))
