"""Does the engine's thread get on? Looked at from beside it, so that a step may take as long as it takes.

What counts as progress, since the last look: another turn was begun (a turn takes messages, plans, and carries one
step out), or processor time was used. So a long step isn't a stall, and a thread that waits for a lock, a disk or
another rank that has stopped is one. A thread with nothing to do isn't either: it rests, and its inbox is empty.

What this can't see is a loop that uses processor time and leads nowhere; `step_s` and a far longer limit are for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from forebay.errors import ForebayError

CPU_GRAIN_S = 0.001
"""Less processor time than this between two looks is no work."""
STOOD_STILL_S = 1.0
"""Who looks this late stood still itself (the process was stopped, or the machine overloaded): that says nothing."""


class Pulse:
    """Marked by the engine's thread, looked at by another one. `clock` and `cpu` are seconds; None for `cpu` takes the
    processor time of the thread that calls `begin`."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] | None = None
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._turns = 0
        self._resting = True
        self._seen: tuple[int, int] = (-1, -1)
        self._looked: float | None = None
        self._since = 0.0

    def begin(self) -> None:
        """The calling thread is the one that is looked at from now on."""
        if self._cpu is None:
            try:
                number = time.pthread_getcpuclockid(threading.get_ident())
            except OSError as error:  # no such clock: turns alone tell, and long steps would look like stalls
                raise ForebayError(f"this system tells no thread's processor time: {error.strerror}") from error
            self._cpu = lambda: time.clock_gettime(number)

    def rest(self) -> None:
        """All is done; news is waited for."""
        self._resting = True

    def turn(self) -> None:
        """Another turn begins."""
        self._turns += 1
        self._resting = False

    def stalled_s(self, waiting: int) -> float:
        """How long there has been work and no progress; `waiting` messages lie in the inbox. Call it regularly."""
        now = self._clock()
        late = self._looked is not None and now - self._looked > STOOD_STILL_S
        self._looked = now
        seen = (self._turns, self._processor_time())
        if late or seen != self._seen or (self._resting and not waiting):
            self._seen, self._since = seen, now
        return now - self._since

    def _processor_time(self) -> int:
        """In grains. A thread that has ended uses none."""
        try:
            return 0 if self._cpu is None else int(self._cpu() / CPU_GRAIN_S)
        except OSError:
            return 0
