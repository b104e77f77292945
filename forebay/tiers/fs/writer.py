"""Storing: from a slot of the pool to a file."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import lmdb

from forebay.errors import CorruptChunk
from forebay.kvstore.layout import ALIGNMENT, round_up
from forebay.tiers.base import ChunkId, JobResult, StoreJob
from forebay.tiers.chunks import Slot, checked_slot
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.device import AlignedBuffer, TempFile, reason_of
from forebay.tiers.fs.finder import HeaderCache
from forebay.tiers.fs.inspect import Front
from forebay.tiers.fs.neighbours import Neighbours
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.fs.shelf import Shelf

log = logging.getLogger("forebay.tier.fs")

EVICT_ON_FULL = 4
"""A disk that is fuller than our quota thinks: so many times the chunk's size is freed before the one retry."""


def room_for(length: int) -> int:
    """Bytes to reserve for a file: whole blocks, and one for what the file system notes about it."""
    return round_up(length, ALIGNMENT) + ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Contents:
    """A file to be written; `sealed` as in `Front`."""

    block: bytes
    payload: memoryview
    aligned: bool
    sealed: int

    @property
    def length(self) -> int:
        return len(self.block) + len(self.payload)


class Writer:
    """Runs store jobs on the write threads. Of two jobs for one chunk, the second waits for the first's end."""

    def __init__(self, shelf: Shelf, neighbours: Neighbours, outbox: Outbox, cache: HeaderCache) -> None:
        self._shelf = shelf
        self._neighbours = neighbours
        self._outbox = outbox
        self._cache = cache
        self._local = threading.local()
        self._lock = threading.Lock()
        self._followers: dict[ChunkId, list[tuple[StoreJob, memoryview]]] = {}
        self.counts: Counter[str] = Counter()

    def run(self, job: StoreJob, memory: memoryview) -> None:
        """Store one job's slot and report it, whatever happens."""
        self._outbox.wait_for_room()
        with self._lock:
            if job.chunk in self._followers:
                self._followers[job.chunk].append((job, memory))
                return
            self._followers[job.chunk] = []
        reason = "io"
        try:
            reason = self._store(job, memory)
        except lmdb.Error as error:
            self._outbox.manifest_error(error)
            reason = "full" if isinstance(error, lmdb.MapFullError | lmdb.DiskError) else "io"
        except Exception:
            log.exception("storing %s failed", job.chunk.key.hex())
        finally:
            with self._lock:
                followers = self._followers.pop(job.chunk)
            self.counts[f"stores_{reason}" if reason else "stores_ok"] += 1
            self._outbox.finish(JobResult(job.id, not reason, reason, length=0 if reason else job.length))
        for follower in followers:
            self.run(*follower)

    def _store(self, job: StoreJob, memory: memoryview) -> str:
        """Returns why it failed, empty if it didn't."""
        try:
            slot = checked_slot(memory, job)
        except CorruptChunk as error:
            complain("slot", "a slot is not stored: %s", error)
            return "corrupt"
        record = self._shelf.manifest.get(job.chunk)
        if record is not None and not record.unreadable and not self._taken_away(job.chunk):
            self._shelf.touch([job.chunk])
            self.counts["stores_known"] += 1
        elif self._neighbours.on_disk(job.chunk):
            self.counts["stores_elsewhere"] += 1
        else:
            reason = self._write(job, slot)
            if reason:
                return reason
        if job.replaces:
            self._shelf.remove([ChunkId(job.chunk.group, job.replaces)], "replaced")
        return ""

    def _taken_away(self, chunk: ChunkId) -> bool:
        """Has another store removed the file of a chunk that our manifest still has?"""
        return bool(self._neighbours.mirrors) and self._shelf.vanished(chunk)

    def _write(self, job: StoreJob, slot: Slot) -> str:
        file = self._contents(job, slot)
        size = room_for(file.length)
        if size > self._shelf.ledger.limit:
            return "quota" if self._shelf.ledger.limit else "full"  # others have yet to make room for us
        if self._shelf.manifest.count() >= self._shelf.manifest.chunks_max:
            self._shelf.evict(0, count=1)
        if not self._shelf.make_room(size):
            return "full"
        kept = False
        try:
            self._shelf.manifest.begin_write(job.chunk, size)
            reason = self._with_retry(lambda: self._attempt(job, slot, file, size), size)
            kept = not reason
            return reason
        finally:
            if not kept:
                self._shelf.ledger.release(size)
                self._shelf.manifest.end_write(job.chunk)

    def _with_retry(self, attempt: Callable[[], int], size: int) -> str:
        for last in (False, True):
            try:
                self.counts["stored_bytes"] += attempt()
                return ""
            except OSError as error:
                full = reason_of(error) == "full"
                if full and not last and self._shelf.evict(EVICT_ON_FULL * size):
                    self.counts["disk_full_retries"] += 1
                    continue
                complain("store", "a store failed: %s", error)
                return "full" if full else "io"
        raise AssertionError("the second attempt returns")

    def _buffer(self, name: str) -> AlignedBuffer:
        """Private memory of this thread."""
        buffer: AlignedBuffer | None = getattr(self._local, name, None)
        if buffer is None:
            buffer = AlignedBuffer()
            setattr(self._local, name, buffer)
        return buffer

    def _contents(self, job: StoreJob, slot: Slot) -> _Contents:
        """What the file will have: the slot as it lies in the pool, or what the codec makes of it."""
        codec = self._shelf.device.codec
        if not codec.active:
            return _Contents(slot.block, slot.payload, job.offset % ALIGNMENT == 0, 0)
        room = codec.stored_bytes_max(len(slot.block), len(slot.payload))
        stored = codec.encode(slot.block, slot.payload, self._buffer("encoded").view(room))
        return _Contents(b"", stored, True, len(stored))

    def _attempt(self, job: StoreJob, slot: Slot, file: _Contents, reserved: int) -> int:
        device = self._shelf.device
        path = device.paths.chunk(job.chunk)
        temp = device.write(path, file.block, file.payload, self._buffer("written"), aligned=file.aligned)
        try:
            front = Front(slot.header, slot.block, temp.disk, temp.inode, file.sealed)
            self._shelf.publish(job.chunk, temp, front, reserved, cold=job.cold)
        except BaseException:
            _discard(device.discard, temp)
            raise
        self._cache.put(job.chunk, slot.header)
        return file.length


def _discard(discard: Callable[[TempFile], None], temp: TempFile) -> None:
    try:
        discard(temp)
    except OSError as error:
        complain("discard", "can't remove a file that was not published: %s", error)
