"""One load from its submission to its report, which comes from whoever is first: the bytes, or the deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable

from forebay.tiers.base import JobResult, LoadJob

_NOTHING = memoryview(b"")


class Load:
    """A load job. Its slot is written only between `claim` and `finish`, and `give_up` fails from then on.

    So a transfer that comes in after the deadline, or after the library has given it up, finds a slot that
    belongs to somebody else untouched.
    """

    def __init__(self, job: LoadJob, memory: memoryview, due: float, report: Callable[[JobResult], None]) -> None:
        """`memory` is the slot, `due` its deadline on the clock."""
        self.job, self.memory, self.due = job, memory, due
        self._report = report
        self._lock = threading.Lock()
        self._claimed = False
        self.open = True
        self.then: Callable[[], None] = lambda: None
        """Called once it has ended."""

    def claim(self) -> bool:
        """The bytes are there: may the slot be written? If so, `finish` must follow."""
        with self._lock:
            if not self.open or self._claimed:
                return False
            self._claimed = True
            return True

    def give_up(self, reason: str) -> bool:
        """End it without its bytes. False if it has ended, or is being written."""
        with self._lock:
            if self._claimed or not self.open:
                return False
            self._end()
        self._report(JobResult(self.job.id, False, reason))
        self.then()
        return True

    def finish(self, result: JobResult) -> None:
        """Report a claimed load."""
        with self._lock:
            assert self._claimed and self.open, "it wasn't claimed"
            self._end()
        self._report(result)
        self.then()

    def _end(self) -> None:
        self.open = False
        self.memory = _NOTHING  # nobody shall keep the pool mapped
