"""The file tier's manifest, its marker and its lock file, damaged: see `tests.formats.damaged_state`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("name", "step", "whole"), [(".lock", 3, 20), ("marker.json", 16, 20), ("data.mdb", 53, 40)])
def test_damage_in_a_state_file_costs_misses_at_most(tmp_path: Path, name: str, step: int, whole: int) -> None:
    command = [sys.executable, "-m", "tests.formats.damaged_state", str(tmp_path), name, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = {
        what: int(count) for count, _, what in (part.partition(" ") for part in done.stdout.strip().split(", "))
    }
    assert outcomes["whole"] >= whole, "most bytes describe something else than what is looked at"
