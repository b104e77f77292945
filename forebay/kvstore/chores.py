"""Long work in small steps: generators that their owner advances between other things. Pure.

A step is about as much work as one chunk causes. So a client that held a hundred thousand pins, or a clear
of a million chunks, costs nobody else more than the time of one slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator


class Chores:
    """What is under way, each in turn. `wake` is called when there is something to do where nothing was."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._queue: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, steps: Iterator[None]) -> None:
        """Take work in; none of it is done here."""
        self._queue.append(steps)
        if len(self._queue) == 1:
            self.wake()

    def run(self, steps: int) -> bool:
        """Do at most so many steps; True if there is more. The next slice begins with another chore."""
        while self._queue:
            chore = self._queue.popleft()
            for _ in chore:
                steps -= 1
                if steps <= 0:
                    self._queue.append(chore)
                    return True
        return False

    def finish(self) -> None:
        """Do all of it."""
        while self.run(1 << 20):
            pass
