"""What the file tier's threads have to tell: results and changes, taken by the process's loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lmdb

from forebay.tiers.base import JobResult, TierChange
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.manifest import BROKEN

CHANGES_MAX = 1 << 14


class Outbox:
    """Results and changes in the order in which they became true. `failure` ends the tier (`TierFailed`)."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results: deque[JobResult] = deque()
        self._changes: deque[TierChange] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._open = True
        self.failure: Exception | None = None

    def set_waker(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever something is there to be taken."""
        self._wake = wake

    def wake(self) -> None:
        """Something else has changed: an answer that was `retry` may be known."""
        self._wake()

    def finish(self, result: JobResult) -> None:
        """A job is finished."""
        self._results.append(result)
        self._wake()

    def change(self, change: TierChange) -> None:
        """A chunk has come or gone. Never blocks: whoever makes many calls `wait_for_room` before."""
        self._changes.append(change)
        self._wake()

    def manifest_error(self, error: lmdb.Error) -> None:
        """The manifest said no: for good if it is broken, and then the tier can't go on."""
        complain("manifest", "the manifest: %s", error)
        if isinstance(error, BROKEN):
            self.failure = self.failure or error
            self._wake()

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Whoever asks for a removal must not be told that it is done when it isn't: the manifest's error goes on."""
        try:
            yield
        except lmdb.Error as error:
            self.manifest_error(error)
            raise

    def wait_for_room(self) -> None:
        """Block until the loop has caught up with the changes. Not for the loop's own thread."""
        with self._changed:
            while self._open and len(self._changes) >= CHANGES_MAX:
                self._changed.wait()

    @property
    def has_room(self) -> bool:
        """Has the loop caught up with the changes?"""
        return len(self._changes) < CHANGES_MAX

    def take_results(self) -> list[JobResult]:
        """All results since the last call."""
        return _drain(self._results)

    def take_changes(self) -> list[TierChange]:
        """All changes since the last call."""
        taken = _drain(self._changes)
        with self._changed:
            self._changed.notify_all()
        return taken

    @property
    def waiting(self) -> int:
        """How many changes wait to be taken."""
        return len(self._changes)

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._open = False
            self._changed.notify_all()


def _drain(queue: deque) -> list:  # type: ignore[type-arg]
    taken = []
    while queue:
        taken.append(queue.popleft())
    return taken
