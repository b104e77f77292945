"""The one thread that computes: it loads, warms up, and then runs the engine.

Why one. OpenMP keeps a team of threads for every thread that ever ran a parallel region. A second team, even
an idle one, makes more threads than cores; from then on the runtime puts threads to sleep at every barrier
instead of letting them spin, and a forward pass has hundreds of barriers. Measured on two cores: a step of 16
tokens takes 62 ms where another thread has loaded the model, and 50 ms where the same one has.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")


class ComputeThread:
    """Runs what it is given, one after the other. A daemon: a process that has to end doesn't wait for it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], R]) -> R:
        """Run `work` there and wait for its result, or raise what it raises. Signals still get through."""
        return self.start(work).result()

    def start(self, work: Callable[[], R]) -> Future[R]:
        """Run `work` there, some time."""
        future: Future[R] = Future()
        self._work.put((work, future))
        return future

    def finish(self, timeout_s: float) -> None:
        """No more work comes; wait for what runs, but not longer than this."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # it belongs to whoever asked
                future.set_exception(error)
