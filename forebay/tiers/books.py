"""What tiers that keep chunks of their own have in common: uses of chunks, who reads them, and how they leave sight.

A chunk that is leaving is out of sight at once. Its bytes go later, and count until then.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from forebay.tiers.base import ChunkId, ClearScope
from forebay.tiers.fs.ledger import Ledger
from forebay.tiers.fs.manifest import Leaving, Manifest


class Books:
    """Manifest and byte account, kept in step. Methods may be called from any thread; none waits for where the chunks
    are. Noted uses are at most as many as there are chunks."""

    def __init__(self, manifest: Manifest, ledger: Ledger) -> None:
        self.manifest = manifest
        self.ledger = ledger
        self.counts: Counter[str] = Counter()
        self._pins: Counter[ChunkId] = Counter()
        self._touches: dict[ChunkId, bool] = {}
        self._uses = threading.Lock()
        self._changing = threading.Lock()
        """Held while a chunk comes into the manifest, or leaves it, and its bytes are counted: or else somebody who
        sees it already would move bytes that no account has yet."""

    def touch(self, chunks: Sequence[ChunkId], *, loaded: bool = False) -> None:
        """Note uses, in this order; written to the manifest later. A cold chunk that is `loaded` isn't cold any
        more."""
        with self._uses:
            for chunk in chunks:
                self._touches[chunk] = self._touches.pop(chunk, False) or loaded

    def flush_touches(self) -> None:
        """Write noted uses to the manifest."""
        with self._uses:
            touches, self._touches = self._touches, {}
        if touches:
            self.manifest.touch(touches.items())

    def pin(self, chunk: ChunkId) -> None:
        """Someone is about to read this chunk: it isn't evicted meanwhile."""
        with self._uses:
            self._pins[chunk] += 1

    def unpin(self, chunk: ChunkId) -> None:
        """The opposite of one `pin`."""
        with self._uses:
            self._pins[chunk] -= 1
            if self._pins[chunk] <= 0:
                del self._pins[chunk]

    def _pinned(self, chunk: ChunkId) -> bool:
        return chunk in self._pins

    def remove(self, chunks: Sequence[ChunkId], reason: str) -> int:
        """Take chunks out of sight; how many were there."""
        return len(self._leave(chunks, reason))

    def remove_scope(self, scope: ClearScope) -> Iterator[int]:
        """Take what a scope covers out of sight; how many chunks with each step."""
        steps = self.manifest.leave_scope(scope, "cleared")
        while True:
            with self._changing:
                gone = next(steps, None)
                if gone is None:
                    return
                self._now_leaving(gone)
            yield len(gone)

    def _leave(self, chunks: Sequence[ChunkId], reason: str) -> list[Leaving]:
        with self._changing:
            return self._now_leaving(self.manifest.leave(chunks, reason))

    def _leave_coldest(self, size: int, count: int, reason: str) -> list[Leaving]:
        """The coldest that nobody is about to read, until `size` bytes and `count` chunks are reached."""
        with self._changing:
            return self._now_leaving(self.manifest.leave_coldest(size, count, self._pinned, reason))

    def _now_leaving(self, gone: list[Leaving]) -> list[Leaving]:
        size = sum(left.disk for left in gone)
        self.ledger.move(stored=-size, leaving=size)
        return gone
