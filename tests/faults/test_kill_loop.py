"""The kill loop in its short form. The long one: `python -m tests.faults.kill_loop --rounds 200 --memory 2GiB`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.faults.kill_loop import KillLoop

ROUNDS = int(os.environ.get("FOREBAY_KILLS", "20"))


def test_no_wrong_byte_no_leak_and_no_lost_commit_after_any_kill(tmp_path: Path) -> None:
    loop = KillLoop(tmp_path, memory=96 << 20, clients=2, seed=5, tell=sys.stderr)
    figures = loop.run(ROUNDS)
    print("\n".join(figures.lines()))
    assert sum(figures.kills.values()) == ROUNDS and min(figures.kills.values()) > 0
    assert figures.acknowledged > 100 and figures.checked > figures.missing
    assert max(figures.readopted) > 100
