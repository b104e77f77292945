"""One thread that removes from the pool what was taken out of sight, and finds out what left by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from forebay.tiers.base import ChunkId, TierChange
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.mooncake.complaints import complain
from forebay.tiers.mooncake.finder import Finder
from forebay.tiers.mooncake.holdings import Holdings, Leaving
from forebay.tiers.mooncake.remote import Remote, is_absent, is_rpc_failure

log = logging.getLogger("forebay.tier.mooncake")

BATCH = 512
SWEEP_S = 5.0
SWEEP_CHUNKS = 4096
RETRY_S = 1.0


class Removals:
    """Removals by `leave`, by eviction, and the sweep."""

    def __init__(
        self,
        remote: Remote,
        holdings: Holdings,
        finder: Finder,
        outbox: Outbox,
        each_sweep: Callable[[], None],
        sweep_s: float,
    ) -> None:
        """`each_sweep` is called beside every sweep, on the same thread."""
        self._remote = remote
        self._holdings = holdings
        self._finder = finder
        self._outbox = outbox
        self._each_sweep = each_sweep
        self._sweep_s = sweep_s
        self._kicked = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="mooncake-removals", daemon=True)
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def leave(self, chunks: Sequence[ChunkId], reason: str) -> None:
        """Take chunks out of sight at once; they are removed from the pool soon. Never blocks."""
        if lost := self._holdings.leave(chunks, reason):
            self.counts["removals_dropped"] += lost
        self._finder.forget(chunks)
        self._kicked.set()

    def remove(self, some: Sequence[Leaving]) -> bool:
        """Remove leaving chunks now, and tell of it. Blocks. False if the master didn't answer for all."""
        if not some:
            return True
        codes = self._remote.remove([left.chunk for left in some])
        done = True
        for left, code in zip(some, codes, strict=True):
            if is_rpc_failure(code):
                done = False
                continue
            if code != 0 and not is_absent(code):
                self.counts["remove_errors"] += 1
                complain("remove", "a chunk can't be removed from the pool (code %d)", code)
            self._left(left.chunk)
        return done

    def _left(self, chunk: ChunkId) -> None:
        with self._holdings.telling:
            left = self._holdings.gone(chunk)
            if left is not None and left.held:
                self.counts["evicted"] += left.reason == "evicted"
                self._outbox.change(TierChange(chunk, False, left.reason))

    def _work(self) -> None:
        next_sweep = time.monotonic() + self._sweep_s
        while not self._closing:
            self._kicked.wait(max(0.0, next_sweep - time.monotonic()))
            self._kicked.clear()
            try:
                if not self._empty():
                    next_sweep = min(next_sweep, time.monotonic() + RETRY_S)
                if time.monotonic() >= next_sweep:
                    next_sweep = time.monotonic() + self._sweep_s
                    self._sweep()
                    self._each_sweep()
            except Exception:
                self.counts["task_crashes"] += 1
                log.exception("removing from the pool failed")

    def _empty(self) -> bool:
        """Remove all that wait; False if the master doesn't answer or some are still being stored."""
        while not self._closing and (some := self._holdings.list_leaving(BATCH)):
            self._outbox.wait_for_room()
            if not self.remove(some):
                return False
        return not self._holdings.leaving

    def _sweep(self) -> None:
        """Ask the master for some of what is held: it may have evicted it, or forgotten everything."""
        for chunk in self._holdings.excess():
            self.vanished(chunk, "uncounted")
        chunks = self._holdings.some(SWEEP_CHUNKS)
        if not chunks:
            return
        for chunk, code in zip(chunks, self._remote.exist(chunks), strict=True):
            if code == 0:
                self.vanished(chunk, "vanished")

    def vanished(self, chunk: ChunkId, counted_as: str) -> None:
        """A chunk isn't in the pool any more, without our doing."""
        self._finder.forget([chunk])
        with self._holdings.telling:
            if self._holdings.vanished(chunk):
                self.counts[counted_as] += 1
                self._outbox.change(TierChange(chunk, False, "cleared" if counted_as == "cleared" else "evicted"))

    def close(self, timeout_s: float) -> bool:
        """Remove what waits, if the master answers, and end. False if the thread didn't end in time."""
        until = time.monotonic() + timeout_s
        while self._holdings.leaving and self._thread.is_alive() and time.monotonic() < until - timeout_s / 2:
            self._kicked.set()
            time.sleep(0.01)
        self._closing = True
        self._kicked.set()
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()
