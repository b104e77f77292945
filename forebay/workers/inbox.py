"""What others tell the engine's thread: a queue that wakes it at once."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

M = TypeVar("M")


class Inbox(Generic[M]):
    """Many writers, one reader. Its writers keep it bounded: the server refuses requests while it is long, and
    the transfer thread has as many answers as it was asked for."""

    def __init__(self) -> None:
        self._messages: deque[M] = deque()
        self._arrived = threading.Condition()

    def put(self, message: M) -> None:
        """Never blocks for long."""
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()

    def take_all(self, patience_s: float | None) -> list[M]:
        """All that is there; if nothing is, wait up to `patience_s` (None: for good) for something."""
        with self._arrived:
            if not self._messages and patience_s != 0:
                self._arrived.wait(patience_s)
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def __len__(self) -> int:
        return len(self._messages)
