"""Ending with one's parent: what a supervisor starts must not outlive it, even if it is killed with SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_VARIABLE = "FOREBAY_PARENT"
"""Set by a supervisor for the processes that it starts: its process id."""

_PR_SET_PDEATHSIG = 1


def follow_parent(number: int = signal.SIGTERM) -> None:
    """If a supervisor started this process, ask the kernel for a signal at its death, and end now if it is dead.

    SIGTERM, not SIGKILL, for who has something to do then: a store still removes its pool, a worker still stores its
    tails. The kernel means the parent's *thread*, so a supervisor starts processes on its main thread.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent.isdigit():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        raise SystemExit(0)
