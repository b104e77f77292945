"""The file tier: its parts put together behind the tier interface.

    submit_store -> write threads: Writer -> Device (file) -> Shelf (name, manifest, account)
    submit_load  -> read threads:  Reader -> Device -> verify
    lookup       -> Finder: manifest, cached headers
    background   -> Keeper: unlink, recency, reconcile
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import lmdb

from forebay.errors import NoSpace
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
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.device import Device, disk_bytes
from forebay.tiers.fs.finder import Finder, HeaderCache
from forebay.tiers.fs.keeper import Keeper
from forebay.tiers.fs.ledger import Ledger
from forebay.tiers.fs.manifest import BROKEN, Manifest
from forebay.tiers.fs.namespaces import NamespaceFiles
from forebay.tiers.fs.neighbours import Neighbours
from forebay.tiers.fs.opening import check_formats, directory_id, explained
from forebay.tiers.fs.options import FsOptions, fs_options
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.pool import Task, WorkPool
from forebay.tiers.fs.probe import probe
from forebay.tiers.fs.quarantine import Quarantine
from forebay.tiers.fs.reader import Reader
from forebay.tiers.fs.reconcile import announce, finish_interrupted, reconcile, remove_leftovers
from forebay.tiers.fs.seating import headroom, lock_state, take_seat
from forebay.tiers.fs.shelf import Shelf
from forebay.tiers.fs.state import State
from forebay.tiers.fs.writer import Writer

log = logging.getLogger("forebay.tier.fs")

REBUILD_FIRST_S = 2.0
"""So long a start waits for the walk when there is no manifest; what is left goes on beside normal work."""
CLOSE_S = 10.0
WALK_LOOK_S = 0.01


class FsTier(SecondaryTier):
    """Chunks as files in one directory. See the module's text, and `FsOptions` for the settings."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, object],
        *,
        device: Callable[[Paths, FsOptions], Device] | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_pool: Callable[[str, int, int], WorkPool] = WorkPool,
        new_keeper: Callable[..., Keeper] = Keeper,
    ) -> None:
        """Open the directory. Raises ConfigError, AlreadyRunning, NotWritable, NoSpace, OtherVersion.

        `new_pool` and `new_keeper` make what works on threads of its own.
        """
        self.name = name
        self.options = found = fs_options(name, options)
        self._codec = open_codec(name, found.compress, found.encrypt_key_file)
        self._clock = clock
        self._new_pool, self._new_keeper = new_pool, new_keeper
        self._extents: dict[int, memoryview] = {}
        self._outbox = Outbox()
        self._state_lock = lock_state(Path(found.state_dir)) if found.state_dir else -1
        try:
            self._seat = take_seat(found)
        except BaseException:
            self._unlock_state()
            raise
        self._lock, self._paths = self._seat.lock, self._seat.paths
        self._state_path = Path(found.state_dir) if found.state_dir else self._paths.root / ".state"
        try:
            try:
                self._open_parts(device)
            except BROKEN as error:
                # The files are the truth: what is known of them can be found out again.
                complain("manifest", "the manifest in %s is broken and is built anew: %s", self._state_path, error)
                self._state.distrust()
                self._open_parts(device)
        except BaseException:
            os.close(self._lock)
            self._unlock_state()
            raise

    def _unlock_state(self) -> None:
        if self._state_lock >= 0:
            os.close(self._state_lock)

    def _open_parts(self, device: Callable[[Paths, FsOptions], Device] | None) -> None:
        options = self.options
        self._state = State(self._state_path, directory_id(self._lock, self._paths))
        check_formats(self._lock, self._paths)
        seat = self._seat
        ledger = Ledger(seat.quota, headroom=0 if seat.shared else headroom(seat.quota))
        manifest, self._rebuilt = self._open_manifest(ledger)
        quarantine = Quarantine(self._paths.quarantine, ledger, options.quarantine_files, options.quarantine_cap)
        dev = device(self._paths, options) if device else Device(self._paths, options.odirect, options.fsync == "file")
        dev.codec = self._codec
        self._shelf = shelf = Shelf(dev, manifest, ledger, quarantine, self._outbox)
        self._namespaces = NamespaceFiles(self._paths.namespaces, ledger)
        self._cache = HeaderCache()
        self._neighbours = Neighbours(
            seat, shelf, self._outbox, self._cache, self._state_path, directory=options.path,
            quota=options.quota_bytes, map_bytes=options.map_bytes, dead_after_s=options.dead_after_s,
            takeover_s=options.takeover_s, kick=self._kick,
        )  # fmt: skip
        try:
            with explained(self._paths.root):
                self._leftovers = remove_leftovers(shelf)
                quarantine.recount()
                self._namespaces.open()
                ledger.move(other=disk_bytes(os.fstat(self._lock)))
                finish_interrupted(shelf)
                probe(shelf, options.odirect, small=seat.shared)
                self._start_keeper()
                self._write_holder()
                self._neighbours.forget_old()
                self._neighbours.look()
        except BaseException:
            self._neighbours.stop()
            self._neighbours.close()
            manifest.close()
            raise
        self._readers = self._new_pool("fs-read", options.read_threads, options.read_queue_bytes)
        self._writers = self._new_pool("fs-write", options.write_threads, options.write_queue_bytes)
        self._reader = Reader(shelf, self._neighbours, self._outbox, self._clock)
        self._writer = Writer(shelf, self._neighbours, self._outbox, self._cache)
        self._finder = Finder(shelf, self._cache, self._neighbours, self._submit_read, self._outbox.wake)
        self._keeper.start()

    def _kick(self) -> None:
        self._keeper.kick()

    def _write_holder(self) -> None:
        """Who comes back with this state directory knows that it was itself who sat here."""
        if self.options.state_dir:
            (self._state_path / "holder").write_text(self._seat.claims.token)

    def _open_manifest(self, ledger: Ledger) -> tuple[Manifest, str]:
        """The manifest, its bytes entered into the ledger; and why it had to be thrown away, if so."""
        rebuild = self.options.recover == "rebuild"
        with explained(self._state_path):
            why = self._state.open(rebuild=rebuild) or ""
            try:
                return self._counted_manifest(ledger), why
            except lmdb.DiskError as error:
                raise NoSpace(f"no space for the manifest in {self._state_path}: {error}") from error
            except BROKEN as error:
                self._state.discard()
                self._state.manifest.mkdir(mode=0o700)
                return self._counted_manifest(ledger), f"it can't be read: {error}"

    def _counted_manifest(self, ledger: Ledger) -> Manifest:
        manifest = Manifest(self._state.manifest, self.options.map_bytes)
        stored, leaving = manifest.totals()
        ledger.move(stored=stored, leaving=leaving)
        return manifest

    def _start_keeper(self) -> None:
        """Without a manifest nothing is reserved until the walk has counted what is on the disk."""
        shelf = self._shelf
        walk = chain(announce(shelf), reconcile(shelf))
        self._keeper = self._new_keeper(
            shelf, self._outbox, self._state, walk, self._neighbours.look, fast=bool(self._rebuilt)
        )
        until = time.monotonic() + REBUILD_FIRST_S
        while time.monotonic() < until and self._keeper.trim():
            pass
        if self._rebuilt:
            shelf.ledger.open = False
            while not self._keeper.reconciled and time.monotonic() < until:
                self._keeper.step()
            if found := shelf.manifest.count():
                log.info("%s: manifest built anew (%s), %d chunks so far", self._paths.root, self._rebuilt, found)

    # --- the interface ---------------------------------------------------------------------------------

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._outbox.set_waker(wake)
        wake()  # opening may have left changes

    def attach_extent(self, extent: int, memory: memoryview) -> None:
        self._extents[extent] = memory

    def note_namespace(self, namespace: bytes, encoded: bytes) -> None:
        self._namespaces.note(namespace, encoded)

    def lookup(self, queries: Sequence[Query]) -> list[LookupResult]:
        try:
            return self._finder.lookup(queries)
        except lmdb.Error as error:
            self._outbox.manifest_error(error)
            return [LookupResult("away")] * len(queries)

    def submit_store(self, job: StoreJob) -> None:
        memory = self._extents[job.extent][job.offset : job.offset + job.length]
        task = Task(lambda: self._writer.run(job, memory), lambda: self._drop(job.id), job.length)
        if not self._writers.submit(task):
            self._drop(job.id)

    def submit_load(self, job: LoadJob) -> None:
        memory = self._extents[job.extent][job.payload_offset : job.payload_offset + job.capacity]
        due = self._clock() + job.deadline_s
        self._shelf.pin(job.chunk)
        task = Task(lambda: self._reader.run(job, memory, due), lambda: self._drop_load(job), job.capacity)
        if not self._readers.submit(task):
            self._drop_load(job)

    def _submit_read(self, run: Callable[[], None], size: int) -> bool:
        return self._readers.submit(Task(run, self._outbox.wake, size))

    def _drop(self, job_id: int) -> None:
        self._shelf.counts["jobs_dropped"] += 1
        self._outbox.finish(JobResult(job_id, False, "dropped"))

    def _drop_load(self, job: LoadJob) -> None:
        self._shelf.unpin(job.chunk)
        self._drop(job.id)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = self._outbox.take_results()
        if not results and self._outbox.failure is not None:
            if not isinstance(self._outbox.failure, lmdb.Error):
                raise TierFailed(str(self._outbox.failure))
            self._state.distrust()
            raise TierFailed(f"the manifest in {self._state_path} is broken: {self._outbox.failure}")
        return results

    def take_changes(self) -> Iterable[TierChange]:
        return self._outbox.take_changes()

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        with self._outbox.noting_errors():
            self._shelf.remove(chunks, reason)
            self._neighbours.forget(chunks, reason)
        self._keeper.kick()

    def clear(self, namespace: bytes) -> int:
        return self.clear_scope(ClearScope(namespace))

    def clear_scope(self, scope: ClearScope) -> int:
        cleared = 0
        for count in self.clear_steps(scope):
            cleared += count or 0
            if count is None:
                time.sleep(WALK_LOOK_S)
        return cleared

    def clear_steps(self, scope: ClearScope) -> Iterator[int | None]:
        with self._outbox.noting_errors():
            for count in chain(self._shelf.remove_scope(scope), self._neighbours.clear_scope(scope)):
                self._keeper.kick()
                yield count
            if self._shelf.ledger.open:
                return
            # The manifest is being built anew: files that it doesn't name yet may be meant.
            while not self._shelf.ledger.open:
                yield None
            for count in self._shelf.remove_scope(scope):
                self._keeper.kick()
                yield count

    def statistics(self) -> TierStats:
        shelf, ledger = self._shelf, self._shelf.ledger
        counts = shelf.counts + shelf.device.counts + self._reader.counts + self._writer.counts + self._finder.counts
        gauges = {
            "bytes": ledger.used, "bytes_quota": ledger.quota, "chunks": shelf.manifest.count(),
            "queue_bytes": self._readers.bytes + self._writers.bytes,
            "read_queue_bytes": self._readers.bytes, "write_queue_bytes": self._writers.bytes,
            "bytes_stored": ledger.stored, "bytes_leaving": ledger.leaving, "bytes_reserved": ledger.reserved,
            "quarantine_bytes": ledger.quarantine, "quarantine_files": len(shelf.quarantine),
            "chunks_max": shelf.manifest.chunks_max, "manifest_bytes": shelf.manifest.size(),
            "header_cache_bytes": self._cache.bytes, "asking": self._finder.asking,
            "changes_waiting": self._outbox.waiting,
            "namespaces": len(self._namespaces), "task_crashes": self._readers.crashes + self._writers.crashes,
            "walked": self._keeper.walked, "reconciled": int(self._keeper.reconciled),
            "odirect": int(shelf.device.direct), "leftovers_removed": self._leftovers,
        }  # fmt: skip
        others = self._neighbours.figures()
        values = {key: float(value) for key, value in (*others.items(), *counts.items(), *gauges.items())}
        info = {"kind": "fs", "directory": str(self._paths.root), "state_dir": str(self._state_path)}
        return TierStats(values, info)

    def close(self) -> None:
        self._outbox.close()
        self._keeper.close()
        self._neighbours.stop()
        ended = self._writers.close(CLOSE_S) and self._readers.close(CLOSE_S)
        try:
            if self._outbox.failure is None and ended:
                with suppress(lmdb.Error), self._outbox.noting_errors():
                    self._shelf.flush_touches()
            if ended:
                with suppress(lmdb.Error), self._outbox.noting_errors():
                    self._neighbours.close()
                    self._shelf.manifest.close()
                    if self._outbox.failure is None:
                        self._state.close()
        finally:
            if ended:
                self._extents.clear()
                os.close(self._lock)
                self._unlock_state()
