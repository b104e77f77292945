"""One lock a chunk, for as long as somebody holds or wants it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from forebay.tiers.base import ChunkId


class ChunkLocks:
    """Whoever changes the object of a chunk holds its lock; requests may take long, so others aren't held up."""

    def __init__(self) -> None:
        self._held: set[ChunkId] = set()
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, chunk: ChunkId) -> Iterator[None]:
        """Wait for the chunk's lock and hold it."""
        with self.hold_all([chunk]):
            yield

    @contextmanager
    def hold_all(self, chunks: Sequence[ChunkId]) -> Iterator[None]:
        """Wait until nobody holds any of these locks, and take them all at once: nobody waits with some in hand."""
        wanted = set(chunks)
        with self._changed:
            while wanted & self._held:
                self._changed.wait()
            self._held |= wanted
        try:
            yield
        finally:
            self._release(chunks)

    @contextmanager
    def hold_free(self, chunks: Sequence[ChunkId]) -> Iterator[list[ChunkId]]:
        """Hold the locks of those that nobody holds now; gives them."""
        with self._changed:
            taken = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._held]
            self._held.update(taken)
        try:
            yield taken
        finally:
            self._release(taken)

    def _release(self, chunks: Sequence[ChunkId]) -> None:
        with self._changed:
            self._held.difference_update(chunks)
            self._changed.notify_all()
