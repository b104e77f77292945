"""Processes that stand still (SIGSTOP) and go on, as hung ones do in tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

PATIENCE_S = 30.0


def pause(pid: int) -> None:
    """Stop all threads of a process. Returns once they stand still: the signal is noticed by one of them first, and
    on a busy machine the others go on answering for a while. Raises TimeoutError."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + PATIENCE_S
    while not all(_stands(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() >= until:
            raise TimeoutError(f"process {pid} didn't stop within {PATIENCE_S:.0f} s")
        time.sleep(0.001)


def resume(pid: int) -> None:
    """Let it go on."""
    os.kill(pid, signal.SIGCONT)


def _stands(task: Path) -> bool:
    """Is the thread stopped, or has it ended?"""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
