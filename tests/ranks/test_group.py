"""Collectives of real processes: a sum has the same bits on every rank, so all of them choose the same experts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SIZE = 3


def test_every_rank_has_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ranks.sums", str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(SIZE)], stdout=subprocess.PIPE, text=True) for rank in range(SIZE)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * SIZE
    assert len(set(said)) == 1 and len(said[0].strip()) == 64
