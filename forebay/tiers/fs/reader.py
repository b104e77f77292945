"""Loading: from a file into a slot of the pool, all of it verified before it is reported."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable

import lmdb

from forebay.errors import CorruptChunk, ForeignChunk
from forebay.kvstore.header import ChunkHeader
from forebay.kvstore.layout import ALIGNMENT
from forebay.tiers.base import JobResult, LoadJob
from forebay.tiers.chunks import stored_header, verify_payload
from forebay.tiers.codec.errors import CannotDecode, UnsealedChunk
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.device import AlignedBuffer, Expected, Loaded, reason_of
from forebay.tiers.fs.inspect import read_front
from forebay.tiers.fs.manifest import Record
from forebay.tiers.fs.mirror import Mirror
from forebay.tiers.fs.neighbours import Neighbours
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.shelf import Shelf

log = logging.getLogger("forebay.tier.fs")

_STILL_READABLE = ("evicted", "replaced")
"""What leaves for these reasons was promised rightly and may be read until its file is gone."""


class Reader:
    """Runs load jobs on the read threads. The caller has pinned the chunk; it is unpinned here."""

    def __init__(
        self, shelf: Shelf, neighbours: Neighbours, outbox: Outbox, clock: Callable[[], float]
    ) -> None:
        self._shelf = shelf
        self._neighbours = neighbours
        self._outbox = outbox
        self._clock = clock
        self._local = threading.local()
        self.counts: Counter[str] = Counter()

    def run(self, job: LoadJob, memory: memoryview, due: float) -> None:
        """Load one job into `memory` and report it, whatever happens. `due` is its deadline on the clock."""
        result = JobResult(job.id, False, "io")
        try:
            result = self._load(job, memory) if self._clock() <= due else JobResult(job.id, False, "late")
            if result.ok and self._clock() > due:
                result = JobResult(job.id, False, "late")
        except lmdb.Error as error:
            self._outbox.manifest_error(error)
        except Exception:
            log.exception("loading %s failed", job.chunk.key.hex())
        finally:
            self._shelf.unpin(job.chunk)
            self.counts[f"loads_{result.reason}" if result.reason else "loads_ok"] += 1
            self._outbox.finish(result)

    def _load(self, job: LoadJob, memory: memoryview) -> JobResult:
        with self._shelf.manifest.reading() as view:
            record = view.get(job.chunk)
            leaving = view.leaving(job.chunk)
        if leaving is not None and leaving not in _STILL_READABLE:
            return JobResult(job.id, False, "missing")
        paths = self._shelf.device.paths
        if self._neighbours.mirrors and (record is None or record.unreadable):
            here = record is None and os.path.lexists(paths.chunk(job.chunk))
            place = None if here else self._neighbours.found(job.chunk)
            if place is not None:
                result = self._load_from(job, memory, place.mirror.paths, place.record, place.mirror)
                if result.ok:
                    self._neighbours.loaded(job.chunk)
                return result
        return self._load_from(job, memory, paths, record, self._shelf)

    def _load_from(
        self, job: LoadJob, memory: memoryview, paths: Paths, record: Record | None, owner: Shelf | Mirror
    ) -> JobResult:
        path = paths.chunk(job.chunk)
        inode = 0
        try:
            direct = self._wants_direct(job, record)
            descriptor = self._shelf.device.open(path, direct=direct)
            try:
                inode = os.fstat(descriptor).st_ino
                loaded = self._read(job, descriptor, record, memory, direct=direct)
            finally:
                os.close(descriptor)
            verify_payload(self._checked_header(job, loaded, record), memory[: loaded.payload_length])
        except CorruptChunk as error:
            if isinstance(error, ForeignChunk) and record is None:
                return JobResult(job.id, False, "missing")  # another version's, who may want it back
            owner.damaged(job.chunk, inode, error)
            return JobResult(job.id, False, "corrupt")
        except CannotDecode as error:
            owner.unreadable(job.chunk, error)
            return JobResult(job.id, False, "missing")
        except OSError as error:
            return self._failed(job, error, owner)
        self._shelf.touch([job.chunk], loaded=True)
        self.counts["loaded_bytes"] += len(loaded.block) + loaded.payload_length
        return JobResult(job.id, True, "", loaded.block, loaded.payload_length)

    def _wants_direct(self, job: LoadJob, record: Record | None) -> bool:
        # Without a record the header comes first, by a read that O_DIRECT wouldn't take as it is.
        if record is None or record.unreadable:
            return False
        if record.sealed:  # it goes through private memory, which is aligned
            return self._shelf.device.wants_direct(record.sealed, aligned=True)
        aligned = job.payload_offset % ALIGNMENT == 0 and record.header % ALIGNMENT == 0
        return self._shelf.device.wants_direct(record.length, aligned=aligned)

    def _read(
        self, job: LoadJob, descriptor: int, record: Record | None, memory: memoryview, *, direct: bool
    ) -> Loaded:
        device = self._shelf.device
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = AlignedBuffer()
        usable = record is not None and not record.unreadable
        known = (
            Expected(record.header, record.length, record.sealed) if record and usable
            else read_front(device, descriptor).expected
        )  # fmt: skip
        if known.length - known.header > job.capacity:
            raise CorruptChunk(f"payload of {known.length - known.header} bytes, the slot takes {job.capacity}")
        if known.sealed:
            stored = device.read_whole(descriptor, known.sealed, buffer, direct=direct)
            front = device.codec.decode(stored, memory)
            return Loaded(front.block, front.header.payload_length)
        if device.codec.sealing:
            raise UnsealedChunk("the chunk isn't encrypted, and this tier takes only what is")
        return device.read(descriptor, known, memory, buffer, direct=direct)

    def _checked_header(self, job: LoadJob, loaded: Loaded, record: Record | None) -> ChunkHeader:
        header = stored_header(loaded.block)
        if (header.group, header.key) != (job.chunk.group, job.chunk.key):
            raise CorruptChunk("the file holds another chunk than its name says")
        if record is not None and not record.unreadable and (header.parent, header.namespace, header.token_count) != (
            record.parent, record.namespace, record.tokens
        ):  # fmt: skip
            raise CorruptChunk("the header says other things than the manifest")
        return header

    def _failed(self, job: LoadJob, error: OSError, owner: Shelf | Mirror) -> JobResult:
        reason = reason_of(error)
        if reason == "missing":
            owner.vanished(job.chunk)
            return JobResult(job.id, False, "missing")
        complain("load", "a load failed: %s", error)
        return JobResult(job.id, False, "io")
