"""A thread that only copies adds no OpenMP team to the process, and leaves the others' alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import torch
from forebay.connectors.teams import without_team

torch.set_num_threads(4)
source, target = torch.zeros(4 << 20), torch.zeros(4 << 20, dtype=torch.float64)

def copy():
    target.copy_(source)
    return torch.get_num_threads()

def threads():
    return len(os.listdir("/proc/self/task"))

copy()
before = threads()
with ThreadPoolExecutor(1, initializer=without_team if sys.argv[1] == "alone" else None) as pool:
    inside = pool.submit(copy).result()
    print(inside, threads() - before, torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [("alone", [1, 1, 4]), ("as-it-comes", [4, 4, 4])],
    ids=["one thread, by itself", "one thread and its team of four"],
)
def test_a_copying_thread_has_a_team_only_if_nobody_forbids_it(how: str, expected: list[int]) -> None:
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [int(word) for word in done.stdout.split()] == expected
