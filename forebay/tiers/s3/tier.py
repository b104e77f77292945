"""The object store tier: its parts put together behind the tier interface.

    submit_store -> write threads: Writer -> Bucket (object, segment) -> Holdings (manifest, cards, account)
    submit_load  -> read threads:  Reader -> Bucket -> verify; Timers give up what takes too long
    lookup       -> Finder: manifest, sightings; fronts are asked for on lookup threads
    background   -> Keeper: deletes, sweeps of clears, others' segments, trials of a shut circuit
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import lmdb

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
from forebay.tiers.codec.codec import open_codec
from forebay.tiers.errors import TierFailed
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.fs.pool import Task, WorkPool
from forebay.tiers.s3.breaker import Breaker
from forebay.tiers.s3.bucket import Bucket
from forebay.tiers.s3.budget import RetryBudget
from forebay.tiers.s3.check import check_bucket, open_engine
from forebay.tiers.s3.clears import Clears
from forebay.tiers.s3.client import make_client
from forebay.tiers.s3.doomed import Doomed
from forebay.tiers.s3.finder import FRONT_BYTES, PROBES_MAX, Finder
from forebay.tiers.s3.holdings import Holdings
from forebay.tiers.s3.keeper import Keeper
from forebay.tiers.s3.learner import Learner
from forebay.tiers.s3.names import Names
from forebay.tiers.s3.opening import open_memory
from forebay.tiers.s3.options import S3Options, s3_options
from forebay.tiers.s3.reader import Reader
from forebay.tiers.s3.requests import Requests
from forebay.tiers.s3.sightings import Sightings
from forebay.tiers.s3.sweep import Sweeper
from forebay.tiers.s3.writer import Packing, Writer
from forebay.tiers.timers import Timers

log = logging.getLogger("forebay.tier.s3")

CLOSE_S = 10.0
DOOMED_MAX = 1 << 16


class S3Tier(SecondaryTier):
    """Chunks as objects below a prefix of one bucket. See the module's text, and `S3Options` for the settings."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, object],
        *,
        client: Callable[[str, S3Options], Any] = make_client,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Try the bucket and open what is remembered. Blocks.

        Raises ConfigError (options, credentials, rights), TierUnavailable (nobody answers), AlreadyRunning,
        NotWritable, NoSpace (the state directory).
        """
        self.name = name
        self.options = found = s3_options(name, options)
        self._clock = clock
        self._extents: dict[int, memoryview] = {}
        self._outbox = Outbox()
        self._names = Names(found.prefix)
        self._breaker = Breaker(found.failures_max, found.open_s, clock)
        budget = RetryBudget(found.retry_budget)
        self._requests = Requests(found.where, self._breaker, budget, found.attempts, clock)
        self._codec = open_codec(name, found.compress, found.encrypt_key_file)
        self._client = client(name, found)
        self._bucket = Bucket(self._client, found.bucket, self._requests, found.timeout_s)
        trial = check_bucket(name, self._bucket, self._names, found.where)
        self._engine = open_engine(name, found, self._bucket, self._names) if found.engine == "nixl" else None
        self._memory = open_memory(found, headers=not self._codec.sealing)
        try:
            self._make_parts(trial)
        except BaseException:
            self._memory.close(well=False)
            raise

    def _make_parts(self, trial: str) -> None:
        options, names, clock, codec = self.options, self._names, self._clock, self._codec
        self._holdings = holdings = Holdings(
            self._bucket, names, self._memory, self._outbox, options.quota_bytes, options.own_chunks_max
        )
        self._doomed = doomed = Doomed(DOOMED_MAX)
        for left in holdings.left_begun():
            doomed.add(left)
        self._clears = clears = Clears()
        self._sightings = seen = Sightings(options.remembered, options.found_s, options.missing_s, clock)
        writer = secrets.token_hex(8)
        learner = Learner(holdings, names, seen, clears, options.refresh_s, writer, clock)
        self._learner = learner
        self._sweeper = Sweeper(holdings, codec, names, seen, clears, doomed)
        self._deadlines = Timers("s3", clock)
        self._reader = Reader(holdings, codec, names, seen, clears, doomed, self._outbox, self._deadlines, clock)
        packing = Packing(options.pack_below_bytes, options.segment_bytes, options.pack_wait_s)
        self._writer = Writer(
            holdings, codec, names, seen, clears, doomed, self._outbox, packing, options.write_queue_bytes, writer
        )
        self._finder = Finder(holdings, codec, names, seen, clears, doomed, self._submit_front, self._outbox.wake)
        self._readers = WorkPool("s3-read", options.read_threads, options.read_queue_bytes)
        self._writers = WorkPool("s3-write", options.write_threads, options.write_queue_bytes)
        self._lookers = WorkPool("s3-look", options.lookup_threads, PROBES_MAX * FRONT_BYTES)
        self._keeper = Keeper(
            holdings, names, seen, doomed, learner, self._sweeper, self._outbox, self._memory.state, trial
        )
        self._keeper.start()

    # --- the interface ---------------------------------------------------------------------------------

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._outbox.set_waker(wake)
        wake()  # opening may have left changes

    def attach_extent(self, extent: int, memory: memoryview) -> None:
        self._extents[extent] = memory

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        try:
            return self._finder.lookup(queries)
        except lmdb.Error as error:
            self._outbox.manifest_error(error)
            return [LookupResult("away")] * len(queries)

    def _submit_front(self, run: Callable[[], None], size: int) -> bool:
        return self._lookers.submit(Task(run, self._outbox.wake, size))

    def submit_store(self, job: StoreJob) -> None:
        if self._breaker.shut:
            self._writer.counts["stores_shut"] += 1
            self._outbox.finish(JobResult(job.id, False, "io"))
            return
        memory = self._extents[job.extent][job.offset : job.offset + job.length]
        task = Task(lambda: self._writer.run(job, memory), lambda: self._writer.drop(job), job.length)
        if not self._writer.take(job):
            self._writer.counts["stores_dropped"] += 1
            self._outbox.finish(JobResult(job.id, False, "dropped"))
        elif not self._writers.submit(task):
            self._writer.drop(job)

    def submit_load(self, job: LoadJob) -> None:
        if self._breaker.shut:
            self._reader.counts["loads_shut"] += 1
            self._outbox.finish(JobResult(job.id, False, "io"))
            return
        memory = self._extents[job.extent][job.payload_offset : job.payload_offset + job.capacity]
        load = self._reader.begin(job, memory)
        task = Task(lambda: self._reader.run(load), lambda: self._reader.drop(load), job.capacity)
        if not self._readers.submit(task):
            self._reader.drop(load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = self._outbox.take_results()
        if not results and self._outbox.failure is not None:
            if self._memory.state is not None:
                self._memory.state.distrust()
            raise TierFailed(f"the manifest of {self.options.where} is broken: {self._outbox.failure}")
        return results

    def take_changes(self) -> Iterable[TierChange]:
        return self._outbox.take_changes()

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        with self._outbox.noting_errors():
            others = [] if reason == "replaced" else [c for c in chunks if not self._holdings.owns(c)]
            self._holdings.remove(chunks, reason)
        for chunk in others:
            self._forget_others(chunk)
        self._keeper.kick()

    def _forget_others(self, chunk: ChunkId) -> None:
        """A chunk that another daemon has stored, or nobody: its object goes, and until then it isn't seen."""
        known, seen = self._sightings.get(chunk)
        if seen is not None and seen.segment:
            self._sightings.segment_gone(seen.segment)
            self._doomed.add(f"{self._names.segments}{seen.segment}")
        self._sightings.missing(chunk)
        if seen is not None or not known:
            self._doomed.add(self._names.chunk(chunk))

    def clear(self, namespace: bytes) -> int:
        return self.clear_scope(ClearScope(namespace))

    def clear_scope(self, scope: ClearScope) -> int:
        cleared = 0
        for count in self.clear_steps(scope):
            if count is None:
                break  # what is left is out of sight, and goes in the background
            cleared += count
        return cleared

    def clear_steps(self, scope: ClearScope) -> Iterator[int | None]:
        clear = self._clears.add(scope)
        self._sightings.forget_if(lambda seen: clear.covers(seen.namespace, seen.tenant, seen.start, seen.modified))
        with self._outbox.noting_errors():
            for count in self._holdings.remove_scope(scope):
                self._keeper.kick()
                yield count
        # A process that ends before its objects are gone knows nothing of them any more: the next one is asked again.
        while self._clears.is_open(clear) or self._holdings.clearing():
            yield None

    def statistics(self) -> TierStats:
        holdings, ledger = self._holdings, self._holdings.ledger
        counts = (
            holdings.counts + self._reader.counts + self._writer.counts + self._finder.counts + self._learner.counts
            + self._sweeper.counts + self._keeper.counts
        )  # fmt: skip
        gauges = {
            "bytes": ledger.used, "bytes_quota": self.options.quota_bytes, "chunks": holdings.manifest.count(),
            "queue_bytes": self._readers.bytes + self._writer.bytes,
            "read_queue_bytes": self._readers.bytes, "write_queue_bytes": self._writer.bytes,
            "packing_bytes": self._writer.packing_bytes, "lookup_queue_bytes": self._lookers.bytes,
            "bytes_stored": ledger.stored, "bytes_leaving": ledger.leaving, "bytes_reserved": ledger.reserved,
            "chunks_max": holdings.chunks_max, "manifest_bytes": self._memory.bytes,
            "remembered": len(self._sightings), "remembered_max": self.options.remembered,
            "remembered_pushed_out": self._sightings.pushed_out, "segments_known": self._sightings.segments,
            "segments_read": len(self._learner),
            "fronts_open": self._finder.asking, "deadlines": len(self._deadlines), "doomed": len(self._doomed),
            "doomed_lost": self._doomed.lost, "clears_open": len(self._clears), "clears_merged": self._clears.merged,
            "changes_waiting": self._outbox.waiting, "announced": int(self._keeper.announced),
            "task_crashes": self._readers.crashes + self._writers.crashes + self._lookers.crashes,
            "conditional_put": int(self._bucket.conditional), "batch_delete": int(self._bucket.batch_delete),
        }  # fmt: skip
        values = {key: float(value) for key, value in (*counts.items(), *gauges.items())}
        info = {
            "kind": "s3", "where": self.options.where, "endpoint": self.options.endpoint_url or "aws",
            "state_dir": self.options.state_dir or "none", "breaker": self._breaker.state.name.lower(),
        }  # fmt: skip
        info["engine"] = "boto3" if self._engine is None else "nixl"
        engine = self._engine.figures() if self._engine is not None else {}
        return TierStats({**values, **self._requests.values(), **engine}, info)

    def close(self) -> None:
        self._outbox.close()
        self._requests.closing = True
        self._writer.hurry()
        until = time.monotonic() + CLOSE_S  # for all of them: the daemon's patience isn't much longer
        self._keeper.close()
        pools = (self._writers, self._readers, self._lookers)
        ended = [pool.close(max(0.0, until - time.monotonic())) for pool in pools]
        self._deadlines.close()
        self._client.close()
        if not all(ended):
            return  # a thread still waits for its socket; the manifest stays open, and as it is, for it
        well = self._outbox.failure is None
        with suppress(lmdb.Error):
            if well:
                self._holdings.flush_touches()
            self._memory.close(well=well)
        self._extents.clear()
