"""Storing: from slots of the pool in shared memory into the pool of hosts, in place, each as one piece.

Header and payload lie together in a slot, so its own fields (state and generation), which no checksum covers, go along;
whoever loads the chunk resets them. Leaving them out would take a copy, or a second transfer a chunk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.errors import CorruptChunk
from forebay.tiers.base import ChunkId, JobResult, StoreJob, TierChange
from forebay.tiers.chunks import Slot, checked_slot, header_block
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.mooncake.complaints import complain
from forebay.tiers.mooncake.finder import Finder
from forebay.tiers.mooncake.holdings import Holdings
from forebay.tiers.mooncake.remote import NO_ROOM, Remote, span_of
from forebay.tiers.mooncake.removals import Removals
from forebay.tiers.mooncake.watch import Watch
from forebay.tiers.timers import Timers

log = logging.getLogger("forebay.tier.mooncake")

POOL_FULL_WAIT_S = 0.1
"""A full pool evicts in the background; after so long a store is tried once more."""
ROOM_TRIES, ROOM_WAIT_S = 16, 0.02
IO = -1
"""Stands for a call that raised."""


@dataclass(frozen=True, slots=True)
class StoreWork:
    """A job and its slot's memory."""

    job: StoreJob
    memory: memoryview


@dataclass(frozen=True, slots=True)
class _Ready:
    """A slot that was checked and has room in the quota."""

    work: StoreWork
    slot: Slot


class Writer:
    """Runs batches of store jobs. Of two jobs for one chunk, the second shares the first one's end.

    A job is reported when its call has returned and not before: until then the library reads the slot.
    """

    def __init__(
        self,
        remote: Remote,
        holdings: Holdings,
        removals: Removals,
        finder: Finder,
        outbox: Outbox,
        timers: Timers,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._remote, self._holdings, self._removals = remote, holdings, removals
        self._finder, self._outbox, self._sleep = finder, outbox, sleep
        self.watch = Watch(timers, clock)
        self._lock = threading.Lock()
        self._evicting = threading.Lock()
        self._followers: dict[ChunkId, list[StoreWork]] = {}
        self.counts: Counter[str] = Counter()

    def run(self, batch: Sequence[StoreWork], _: int) -> None:
        """Store a batch and report each job once, whatever happens."""
        self._outbox.wait_for_room()
        claimed = [work for work in batch if self._claim(work)]
        reasons = {work.job.id: "io" for work in claimed}
        try:
            self._store(claimed, reasons)
        except Exception:
            self.counts["task_crashes"] += 1
            log.exception("storing a batch failed")
        finally:
            for work in claimed:
                self._report(work, reasons[work.job.id])

    def _claim(self, work: StoreWork) -> bool:
        """False if another store of this chunk is under way, whose end will be this one's."""
        with self._lock:
            if work.job.chunk in self._followers:
                self._followers[work.job.chunk].append(work)
                return False
            self._followers[work.job.chunk] = []
            return True

    def _report(self, work: StoreWork, reason: str) -> None:
        with self._lock:
            followers = self._followers.pop(work.job.chunk)
        for each in (work, *followers):
            self.counts[f"stores_{reason}" if reason else "stores_ok"] += 1
            self._outbox.finish(JobResult(each.job.id, not reason, reason, length=0 if reason else each.job.length))

    def _store(self, claimed: Sequence[StoreWork], reasons: dict[int, str]) -> None:
        """Fills in why each failed, empty if it didn't."""
        ready: list[_Ready] = []
        for work in claimed:
            try:
                slot = checked_slot(work.memory, work.job)
            except CorruptChunk as error:
                complain("slot", "a slot is not stored: %s", error)
                reasons[work.job.id] = "corrupt"
                continue
            reason = self._make_room(work.job, wait=not ready)
            if reason == "full" and ready:
                # What this batch has reserved can't be evicted before it is stored.
                self._put(ready, reasons)
                ready = []
                reason = self._make_room(work.job, wait=True)
            reasons[work.job.id] = reason
            if not reason:
                ready.append(_Ready(work, slot))
        if ready:
            self._put(ready, reasons)

    def _make_room(self, job: StoreJob, *, wait: bool) -> str:
        """Reserve room in the quota. Returns why there is none, empty if there is. `wait` a little for what other
        threads are storing: then it can be evicted."""
        if self._holdings.quota and job.length > self._holdings.quota:
            return "quota"
        for _ in range(ROOM_TRIES):
            if (left := self._holdings.find_leaving(job.chunk)) is not None and not self._removals.remove([left]):
                return "io"
            if self._holdings.begin(job.chunk, job.length):
                return ""
            with self._evicting:
                coldest = self._holdings.leave_coldest(job.length)
                if not coldest and not self._holdings.is_leaving(job.chunk):
                    if not wait:
                        return "full"
                    self._sleep(ROOM_WAIT_S)
                self._finder.forget([left.chunk for left in coldest])
                if not self._removals.remove(coldest):
                    return "io"
        return "full"

    def _put(self, ready: Sequence[_Ready], reasons: dict[int, str]) -> None:
        codes = [IO] * len(ready)
        try:
            codes = self._put_once(ready)
            if NO_ROOM in codes:
                self._sleep(POOL_FULL_WAIT_S)
                self.counts["pool_full_retries"] += 1
                again = [at for at, code in enumerate(codes) if code == NO_ROOM]
                for at, code in zip(again, self._put_once([ready[at] for at in again]), strict=True):
                    codes[at] = code
        finally:
            for one, code in zip(ready, codes, strict=True):
                reasons[one.work.job.id] = self._ended(one, code)

    def _put_once(self, ready: Sequence[_Ready]) -> list[int]:
        with self.watch.call():
            return self._remote.put(
                [one.work.job.chunk for one in ready], [span_of(one.work.memory) for one in ready]
            )

    def _ended(self, one: _Ready, code: int) -> str:
        """Enter one chunk's end into the account; returns why it failed, empty if it didn't."""
        job = one.work.job
        with self._holdings.telling:
            if self._holdings.end(job.chunk, stored=code == 0, cold=job.cold):
                self._outbox.change(TierChange(job.chunk, True, "", header_block(one.slot.block)))
        self._finder.forget([job.chunk])
        if code == 0:
            self.counts["stored_bytes"] += job.length
            if job.replaces:
                self._removals.leave([ChunkId(job.chunk.group, job.replaces)], "replaced")
            return ""
        if code == NO_ROOM:
            return "full"
        complain("store", "a store failed (code %d)", code)
        return "io"
