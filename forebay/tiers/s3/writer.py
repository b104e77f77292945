"""Storing: a chunk to an object of its own, or several small ones to a segment."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import lmdb

from forebay.errors import CorruptChunk
from forebay.tiers.base import ChunkId, JobResult, StoreJob
from forebay.tiers.chunks import Slot, checked_slot
from forebay.tiers.codec.codec import Codec
from forebay.tiers.codec.errors import CannotDecode
from forebay.tiers.fs.manifest import Record
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.s3.cards import Written
from forebay.tiers.s3.clears import Clears
from forebay.tiers.s3.complaints import complain
from forebay.tiers.s3.doomed import Doomed
from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.finder import see_front
from forebay.tiers.s3.holdings import Holdings, card_of, record_of
from forebay.tiers.s3.names import Names, SegmentName, segment_name
from forebay.tiers.s3.segment import INDEX_BYTES_MAX, Piece, Segment, build
from forebay.tiers.s3.sightings import Sightings

log = logging.getLogger("forebay.tier.s3")

ENTRIES_MAX = INDEX_BYTES_MAX // 512


@dataclass(frozen=True, slots=True)
class Packing:
    """What is packed: chunks below `below` bytes, up to `segment` bytes together, for `wait_s`."""

    below: int
    segment: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class _Ready:
    """A job whose slot has been checked."""

    job: StoreJob
    slot: Slot


@dataclass
class _Batch:
    """Small chunks of one namespace and tenant that wait for more."""

    full: threading.Condition
    ready: list[_Ready] = field(default_factory=list)
    size: int = 0
    open: bool = True


class Writer:
    """Runs store jobs on the write threads. Of two jobs for one chunk, the second waits for the first's end.

    The first small chunk's thread waits for others and writes them all; the threads of the others are free at once.
    """

    def __init__(
        self, holdings: Holdings, codec: Codec, names: Names, sightings: Sightings, clears: Clears, doomed: Doomed,
        outbox: Outbox, packing: Packing, bytes_max: int, writer: str, time_ns: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self._holdings = holdings
        self._bucket = holdings.bucket
        self._codec = codec
        self._names = names
        self._sightings = sightings
        self._clears = clears
        self._doomed = doomed
        self._outbox = outbox
        self._packing = packing
        self._bytes_max = bytes_max
        self._writer = writer
        self._time_ns = time_ns
        self._last_ns = 0
        self._lock = threading.Lock()
        self._batches: dict[tuple[bytes, str], _Batch] = {}
        self._followers: dict[ChunkId, list[tuple[StoreJob, memoryview]]] = {}
        self._closing = False
        self.bytes = 0
        """What has been taken on and isn't finished: queued, waiting for others, on its way."""
        self.counts: Counter[str] = Counter()

    @property
    def packing_bytes(self) -> int:
        """Bytes of chunks that wait for others."""
        with self._lock:
            return sum(batch.size for batch in self._batches.values())

    def take(self, job: StoreJob) -> bool:
        """Take a job on; False if there is no room for it, but one always fits. Never blocks."""
        with self._lock:
            if self._closing or (self.bytes and self.bytes + job.length > self._bytes_max):
                return False
            self.bytes += job.length
            return True

    def drop(self, job: StoreJob) -> None:
        """A job that was taken on won't be run."""
        self._done(job, "dropped")

    def hurry(self) -> None:
        """Wait for nothing any more."""
        with self._lock:
            self._closing = True
            for batch in self._batches.values():
                batch.full.notify_all()

    def run(self, job: StoreJob, memory: memoryview) -> None:
        """Store one job's slot, or leave it to the thread that waits for more of them. It is reported either way."""
        self._outbox.wait_for_room()
        with self._lock:
            if job.chunk in self._followers:
                self._followers[job.chunk].append((job, memory))
                return
            self._followers[job.chunk] = []
        try:
            ready = self._ready(job, memory)
            if ready is None:
                return
            batch = self._join(ready) if job.length < self._packing.below else [ready]
            if batch:
                self._store_all(batch)
        except Exception:
            log.exception("storing %s failed", job.chunk.key.hex())
            self._done(job, "io")

    def _ready(self, job: StoreJob, memory: memoryview) -> _Ready | None:
        """The checked job; None if it is finished: it can't be stored, or is already."""
        try:
            slot = checked_slot(memory, job)
            if self._holdings.manifest.get(job.chunk) is None:
                return _Ready(job, slot)
            self._holdings.touch([job.chunk])
            self.counts["stores_known"] += 1
            self._done(job, "")
        except CorruptChunk as error:
            complain("s3 slot", "a slot is not stored: %s", error)
            self._done(job, "corrupt")
        except lmdb.Error as error:
            self._done(job, self._manifest_error(error))
        return None

    def _manifest_error(self, error: lmdb.Error) -> str:
        self._outbox.manifest_error(error)
        return "full" if isinstance(error, lmdb.MapFullError | lmdb.DiskError) else "io"

    def _join(self, ready: _Ready) -> list[_Ready]:
        """Add a small chunk to the batch of its kind. Whoever opened the batch gets all of it, others nothing."""
        kind = (ready.slot.header.namespace, ready.slot.header.tenant)
        with self._lock:
            batch = self._batches.get(kind)
            if batch is not None:
                self._add(kind, batch, ready)
                return []
            batch = self._batches[kind] = _Batch(threading.Condition(self._lock))
            self._add(kind, batch, ready)
            until = time.monotonic() + self._packing.wait_s
            while batch.open and not self._closing and (left := until - time.monotonic()) > 0:
                batch.full.wait(left)
            if self._batches.get(kind) is batch:
                del self._batches[kind]
            return batch.ready

    def _add(self, kind: tuple[bytes, str], batch: _Batch, ready: _Ready) -> None:
        batch.ready.append(ready)
        batch.size += ready.job.length
        if batch.size >= self._packing.segment or len(batch.ready) >= ENTRIES_MAX:
            batch.open = False
            del self._batches[kind]  # the next one opens a new batch
            batch.full.notify_all()

    # --- objects ---------------------------------------------------------------------------------------

    def _store_all(self, batch: Sequence[_Ready]) -> None:
        """Store a batch and report every job of it."""
        reason = "io"
        try:
            reason = self._store_one(batch[0]) if len(batch) == 1 else self._store_segment(batch)
        except lmdb.Error as error:
            reason = self._manifest_error(error)
        except RequestFailed as failure:
            reason = "full" if failure.kind is Kind.OTHER and "QuotaExceeded" in str(failure) else "io"
        except Exception:
            log.exception("storing %d chunks failed", len(batch))
        finally:
            for ready in batch:
                self._done(ready.job, reason)

    def _done(self, job: StoreJob, reason: str) -> None:
        """Report a job, and go on with those that waited for it."""
        if not reason and job.replaces:
            try:
                self._holdings.remove([ChunkId(job.chunk.group, job.replaces)], "replaced")
            except lmdb.Error as error:
                self._outbox.manifest_error(error)
        with self._lock:
            followers = self._followers.pop(job.chunk, []) if reason != "dropped" else []
            self.bytes -= job.length
        self.counts[f"stores_{reason}" if reason else "stores_ok"] += 1
        self._outbox.finish(JobResult(job.id, not reason, reason, length=0 if reason else job.length))
        for follower in followers:
            self.run(*follower)

    def _store_one(self, ready: _Ready) -> str:
        job, name = ready.job, self._names.chunk(ready.job.chunk)
        body = b"".join(self._stored(ready.slot))
        size = len(body)
        if self._holdings.quota and size > self._holdings.quota:
            return "quota"
        with self._holdings.locks.hold(job.chunk):
            if not self._holdings.purge(job.chunk) or not self._holdings.make_room(size):
                return "full"
            if self._put(name, body, size, fresh=True):
                self._commit_one(ready, name, size)
                return ""
            return self._there_already(ready, name, body)

    def _stored(self, slot: Slot) -> Sequence[bytes | memoryview]:
        """The bytes to store for a slot, in pieces."""
        return (self._codec.encode(slot.block, slot.payload),) if self._codec.active else (slot.block, slot.payload)

    def _commit_one(self, ready: _Ready, name: str, size: int) -> None:
        card = card_of(ready.slot.block, size, size)
        record = record_of(ready.slot.header, ready.slot.block, size, cold=ready.job.cold)
        self._commit(name, [Written(ready.job.chunk, card)], [record], size)

    def _there_already(self, ready: _Ready, name: str, body: bytes) -> str:
        """Somebody else's object has this name: the same bytes, unless it is damaged or has to go."""
        try:
            seen = see_front(self._bucket, self._codec, name, ready.job.chunk)
            h, there = seen.header, seen.sighting
            cleared = self._clears.hide(there.namespace, there.tenant, there.start, there.modified)
            if h == ready.slot.header and not cleared and name not in self._doomed:
                self._sightings.found(ready.job.chunk, seen.sighting)
                self.counts["stores_known"] += 1
                return ""
        except (CorruptChunk, CannotDecode) as error:  # also one under a key that is gone: it is of use to nobody here
            complain("s3 over", "%s is written over: %s", name, error)
        if not self._holdings.make_room(len(body)):
            return "full"
        self._put(name, body, len(body), fresh=False)
        self._commit_one(ready, name, len(body))
        self.counts["stores_written_over"] += 1
        return ""

    def _put(self, name: str, body: bytes, reserved: int, *, fresh: bool) -> bool:
        """Put an object that has been made room for. False if there was one already; nothing is reserved then."""
        note = self._note(name)
        keep_note = False
        try:
            self._holdings.cards.begin(note)
            self._bucket.put(name, body, fresh=fresh)
            reserved, keep_note = 0, True  # until it is in the books
            return True
        except RequestFailed as failure:
            if failure.kind is Kind.EXISTS:
                return False
            keep_note = failure.maybe_done
            if keep_note:
                self._doomed.add(name)
            raise
        finally:
            self._holdings.ledger.release(reserved)
            if not keep_note:
                self._holdings.cards.end(note)

    def _note(self, name: str) -> str:
        return name.removeprefix(f"{self._names.prefix}/")

    def _commit(self, name: str, written: Sequence[Written], records: Sequence[Record], size: int) -> None:
        """Enter an object that has been put into the books. If they can't take it, it has to go again."""
        try:
            self._holdings.commit(written, records, size, self._note(name))
        except lmdb.Error:
            self._holdings.ledger.release(size)
            self._doomed.add(name)
            raise
        self._doomed.gone(name)

    def _store_segment(self, batch: Sequence[_Ready]) -> str:
        segment = build([Piece(r.slot.header, r.job.length, self._stored(r.slot)) for r in batch])
        size = len(segment.body)
        if self._holdings.quota and size > self._holdings.quota:
            return "quota"
        header = batch[0].slot.header
        name = str(self._next_name(header.namespace, header.tenant))
        with self._holdings.locks.hold_all([ready.job.chunk for ready in batch]):
            if not all(self._holdings.purge(ready.job.chunk) for ready in batch):
                return "full"
            if not self._holdings.make_room(size):
                return "full"
            self._holdings.writing.add(name)
            try:
                self._put_segment(batch, segment, name, size)
            finally:
                self._holdings.writing.discard(name)
        self.counts["segments_written"] += 1
        self.counts["chunks_packed"] += len(batch)
        return ""

    def _put_segment(self, batch: Sequence[_Ready], segment: Segment, name: str, size: int) -> None:
        object_name = f"{self._names.segments}{name}"
        self._put(object_name, segment.body, size, fresh=False)
        written, records = [], []
        for number, (ready, entry) in enumerate(zip(batch, segment.entries, strict=True)):
            disk = entry.length + (segment.index_bytes if number == 0 else 0)
            card = card_of(ready.slot.block, entry.length, disk, name, entry.offset)
            written.append(Written(entry.chunk, card))
            records.append(record_of(ready.slot.header, ready.slot.block, disk, cold=ready.job.cold))
        self._commit(object_name, written, records, size)

    def _next_name(self, namespace: bytes, tenant: str) -> SegmentName:
        with self._lock:
            self._last_ns = max(self._time_ns(), self._last_ns + 1)
            return segment_name(self._last_ns, self._writer, namespace, tenant)
