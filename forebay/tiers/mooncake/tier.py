"""The Mooncake tier: its parts put together behind the tier interface.

    submit_store -> write threads: Writer -> Remote (pool of hosts), from the slot in place
    submit_load  -> read threads:  Reader -> Remote -> an area of our own -> slot, verified; Timers end what is late
    lookup       -> Finder: asks the master on a thread of its own
    background   -> Removals: forgets, evictions, and finds out what the pool has evicted

Calls into the library block, so none is made on the process's loop, but for a clear of everything, which is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from forebay.errors import TierUnavailable
from forebay.tiers.base import (
    ChunkId,
    ClearScope,
    JobResult,
    LoadJob,
    LookupResult,
    Query,
    SecondaryTier,
    StoreJob,
    TierChange,
    TierStats,
)
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.mooncake.figures import pool_figures
from forebay.tiers.mooncake.finder import Finder
from forebay.tiers.mooncake.holdings import Holdings
from forebay.tiers.mooncake.loads import Load
from forebay.tiers.mooncake.options import MooncakeOptions, mooncake_options
from forebay.tiers.mooncake.reader import Reader
from forebay.tiers.mooncake.remote import Remote
from forebay.tiers.mooncake.removals import SWEEP_S, Removals
from forebay.tiers.mooncake.suspects import Suspects
from forebay.tiers.mooncake.work import BatchPool
from forebay.tiers.mooncake.writer import StoreWork, Writer
from forebay.tiers.timers import Timers

log = logging.getLogger("forebay.tier.mooncake")

BATCH_BYTES, BATCH_JOBS = 16 << 20, 64
"""Of one call. The library refuses thousands of transfers at once, and a hung call holds its jobs."""
CLEAR_S = 5.0
CLOSE_S = 2.5
"""For each of four parts, and the library takes two: less in all than a daemon waits for its tiers."""


class MooncakeTier(SecondaryTier):
    """Chunks in a pool of many hosts' memory. See the module's text, and `MooncakeOptions` for the settings."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, object],
        *,
        remote: Callable[[str, MooncakeOptions], Remote] = Remote,
        clock: Callable[[], float] = time.monotonic,
        sweep_s: float = SWEEP_S,
    ) -> None:
        """Join the pool. Raises ConfigError, TierUnavailable. `remote` makes the pool's client; every `sweep_s` it is
        asked what has left it."""
        self.name = name
        self.options = found = mooncake_options(name, options)
        self._clock = clock
        self._extents: dict[int, memoryview] = {}
        self._pool: dict[str, float] = {}
        self._outbox = Outbox()
        self._remote = remote(name, found)
        self._holdings = Holdings(found.quota_bytes)
        self._suspects = Suspects(clock)
        self._timers = Timers("mooncake", clock)
        self._finder = Finder(self._remote, self._holdings, self._suspects, self._outbox.wake, clock)
        self._removals = Removals(self._remote, self._holdings, self._finder, self._outbox, self._ask_pool, sweep_s)
        self._writer = Writer(
            self._remote, self._holdings, self._removals, self._finder, self._outbox, self._timers, clock
        )
        self._reader = Reader(
            self._remote, self._holdings, self._removals, self._finder, self._suspects, self._timers, clock
        )
        self._writers = BatchPool(
            "mooncake-write", found.write_threads, found.write_queue_bytes, BATCH_BYTES, BATCH_JOBS,
            self._writer.run, lambda work: self._drop(work.job.id),
        )  # fmt: skip
        self._readers = BatchPool(
            "mooncake-read", found.read_threads, found.read_queue_bytes, BATCH_BYTES, BATCH_JOBS,
            self._reader.run, lambda load: self._reader.fail(load, "dropped"),
        )  # fmt: skip
        for watch, threads in ((self._reader.watch, self._readers), (self._writer.watch, self._writers)):
            watch.hangs, watch.hangs_no_more = threads.hangs, threads.hangs_no_more
        self._loads: dict[int, Load] = {}
        self._dropped = 0
        self._removals.start()

    def _ask_pool(self) -> None:
        if self.options.master_metrics:
            self._pool = pool_figures(self.options.master_metrics)

    # --- the interface ---------------------------------------------------------------------------------

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._outbox.set_waker(wake)

    def attach_extent(self, extent: int, memory: memoryview) -> None:
        if not self._remote.register(memory):
            log.error("tier %s: extent %d can't be registered; stores from it may fail", self.name, extent)
        self._extents[extent] = memory

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        return self._finder.lookup(queries)

    def submit_store(self, job: StoreJob) -> None:
        memory = self._extents[job.extent][job.offset : job.offset + job.length]
        if not self._writers.submit(StoreWork(job, memory), job.length):
            self._drop(job.id)

    def _drop(self, job_id: int) -> None:
        self._dropped += 1
        self._outbox.finish(JobResult(job_id, False, "dropped"))

    def submit_load(self, job: LoadJob) -> None:
        memory = self._extents[job.extent][job.payload_offset : job.payload_offset + job.capacity]
        load = Load(job, memory, self._clock() + job.deadline_s, self._outbox.finish)
        self._loads[job.id] = load
        timer = self._timers.add(load.due, lambda: self._reader.fail(load, "late"))

        def ended() -> None:
            self._timers.cancel(timer)
            self._loads.pop(job.id, None)

        load.then = ended
        if not load.open:  # it was late at once
            ended()
        if not self._readers.submit(load, job.capacity):
            self._reader.fail(load, "dropped")

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return self._outbox.take_results()

    def take_changes(self) -> Iterable[TierChange]:
        return self._outbox.take_changes()

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        self._removals.leave(chunks, reason)

    def clear(self, namespace: bytes) -> int:
        """Everything with our prefix, whoever stored it. A namespace can't be told from keys: then nothing, and 0."""
        return 0 if namespace else self._clear_all()

    def clear_scope(self, scope: ClearScope) -> int | None:
        if scope.namespace or scope.tenant is not None or scope.parent:
            return None
        return self._clear_all()

    def _clear_all(self) -> int:
        """Waits for the master. Raises TierUnavailable if it doesn't answer."""
        answers: list[int] = []
        thread = threading.Thread(
            target=lambda: answers.append(self._remote.remove_all()), name="mooncake-clear", daemon=True
        )
        thread.start()
        thread.join(CLEAR_S)
        self._finder.forget_all()
        if not answers or answers[0] < 0:
            raise TierUnavailable(f"tier {self.name!r}: the pool wasn't cleared ({answers or 'no answer'}); try again")
        for chunk in self._holdings.all():
            self._removals.vanished(chunk, "cleared")
        return answers[0]

    def statistics(self) -> TierStats:
        holdings, parts = self._holdings, (
            self._reader, self._writer, self._finder, self._removals, self._reader.watch, self._writer.watch,
        )  # fmt: skip
        values: dict[str, float] = {}
        for part in parts:
            for key, count in part.counts.items():
                values[key] = values.get(key, 0.0) + count
        values |= {
            "bytes": holdings.bytes, "bytes_quota": holdings.quota or self.options.segment_bytes,
            "chunks": len(holdings), "chunks_leaving": holdings.leaving,
            "queue_bytes": self._readers.bytes + self._writers.bytes,
            "read_queue_bytes": self._readers.bytes, "write_queue_bytes": self._writers.bytes,
            "jobs_dropped": self._dropped, "segment_bytes": self.options.segment_bytes,
            "threads_hanging": self._readers.hanging + self._writers.hanging, "hosts_suspected": len(self._suspects),
            "lookups_waiting": self._finder.waiting, "lookups_known": len(self._finder),
            "loads_open": len(self._loads), "timers": len(self._timers), "changes_waiting": self._outbox.waiting,
            "area_bytes": self._reader.areas.bytes,
            "batch_crashes": self._readers.crashes + self._writers.crashes, **self._pool,
        }  # fmt: skip
        info = {"kind": "mooncake", "master": self.options.master, "protocol": self.options.protocol}
        return TierStats({key: float(value) for key, value in values.items()}, info)

    def close(self) -> None:
        self._outbox.close()
        parts = (self._writers, self._readers, self._removals, self._finder)
        hanging = [part for part in parts if not part.close(CLOSE_S)]  # each is closed, whatever the others do
        self._timers.close()
        for load in list(self._loads.values()):
            self._reader.fail(load, "dropped")  # its call hangs, and its slot isn't in the call's hands
        if hanging:
            log.error("tier %s: a call into Mooncake hangs; its memory is left to the process's end", self.name)
            return
        self._remote.close()
        self._reader.areas.close()
        self._extents.clear()
