"""Long work in small steps: generators that their owner advances between other things. Pure.

A generator yields what its last step was worth: the number of chunks that it let go of (at most `STEP_CHUNKS`), or
`REMOVAL` for one that it took out. So a client that held a hundred thousand pins, or a clear of a million chunks,
costs nobody else more than the time of one slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

STEP_CHUNKS = 32
"""What one step may take at most: fewer calls a chunk than one by one."""

REMOVAL = 4
"""Taking a chunk out takes as long as letting go of so many."""


class Chores:
    """What is under way, each in turn. `wake` is called when there is something to do where nothing was."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._queue: deque[Iterator[int]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, steps: Iterator[int]) -> None:
        """Take work in; none of it is done here."""
        self._queue.append(steps)
        if len(self._queue) == 1:
            self.wake()

    def run(self, worth: int) -> bool:
        """Do about so much (less than a step more); True if there is more. The next slice begins with another
        chore."""
        while self._queue:
            chore = self._queue.popleft()
            for done in chore:
                worth -= done
                if worth <= 0:
                    self._queue.append(chore)
                    return True
        return False

    def finish(self) -> None:
        """Do all of it."""
        while self.run(1 << 20):
            pass
