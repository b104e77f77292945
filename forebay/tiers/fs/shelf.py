"""Files, manifest and byte account of one directory, kept in step.

Every change to one chunk's file happens under that chunk's stripe lock, together with its entry in the
manifest. Across a crash the order of the two steps is what counts:

    store    note "writing", name the file, commit      a file without a record is found by its note
    remove   commit "leaving", unlink, bury             a leaving chunk is out of sight and is unlinked at start
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace

from forebay.errors import CorruptChunk, ForeignChunk
from forebay.kvstore.header import ChunkHeader
from forebay.tiers.base import ChunkId, TierChange
from forebay.tiers.books import Books
from forebay.tiers.chunks import header_block
from forebay.tiers.codec.errors import CannotDecode, UnsealedChunk
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.device import Device, TempFile, disk_bytes
from forebay.tiers.fs.inspect import Front, front_of
from forebay.tiers.fs.ledger import Ledger
from forebay.tiers.fs.manifest import UNKNOWN, Leaving, Manifest, Record, first_unit, tenant_digest
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.fs.quarantine import Quarantine

STRIPES = 64


def record_of(front: Front, *, cold: bool) -> Record:
    """The manifest's record of the chunk in this file."""
    header, block_length, disk = front.header, len(front.block), front.disk
    return Record(
        parent=header.parent, namespace=header.namespace, start=header.start,
        unit=first_unit(header.parent, header.tokens, header.extra), tokens=header.token_count,
        header=block_length, length=block_length + header.payload_length, disk=disk, cold=cold,
        tenant=tenant_digest(header.tenant), sealed=front.sealed,
    )  # fmt: skip


def _unknown(disk: int) -> Record:
    """Of a file that can't be decoded, and whose chunk nobody knows."""
    return Record(
        parent=bytes(32), namespace=UNKNOWN, unit=bytes(8), start=0, tokens=0, header=0, length=0, disk=disk,
        cold=True, unreadable=True,
    )  # fmt: skip


class Shelf(Books):
    """See the module's text. Methods may be called from any thread, and block on the disk unless they say not."""

    def __init__(
        self, device: Device, manifest: Manifest, ledger: Ledger, quarantine: Quarantine, outbox: Outbox
    ) -> None:
        super().__init__(manifest, ledger)
        self.device = device
        self.quarantine = quarantine
        self._outbox = outbox
        self._stripes = [threading.Lock() for _ in range(STRIPES)]
        self._evicting = threading.Lock()
        # What this process has told of already, until everything older has been announced as well.
        self._announcing = True
        self._told: set[ChunkId] = set()
        self._foreign: dict[ChunkId, int] = {}  # other versions' files, which stay; as few as the disk holds
        self.tell: Callable[[TierChange], None] = outbox.change
        """Called with everything that comes or goes; other stores of the directory want to know it too."""
        self.well: Callable[[], bool] = lambda: True
        """May a file be named now? Not if others may take this process for dead."""

    def _stripe(self, chunk: ChunkId) -> threading.Lock:
        return self._stripes[chunk.key[-1] % STRIPES]

    # --- coming ----------------------------------------------------------------------------------------

    def make_room(self, size: int) -> bool:
        """Reserve `size` bytes, evicting until they fit. False if they can't."""
        while True:
            missing = self.ledger.reserve(size)
            if missing == 0:
                return True
            if not self.ledger.open:
                return False
            if not self.evict(missing):
                # Somebody else may have freed room while we found nothing.
                return self.ledger.reserve(size) == 0

    def publish(self, chunk: ChunkId, temp: TempFile, front: Front, reserved: int, *, cold: bool) -> None:
        """Name a written file and enter it; `reserved` bytes become what it really takes.

        Raises OSError, and then file and reservation are still the caller's.
        """
        record = record_of(front, cold=cold)
        with self._stripe(chunk):
            path = self.device.paths.chunk(chunk)
            if not self.well():
                raise OSError(errno.EIO, "this store stood still for too long, others may have taken its place")
            self.device.publish(temp, path)
            with self._changing:
                try:
                    replaced = self.manifest.commit(chunk, record)
                except BaseException:
                    self.device.remove(path)  # or nobody would count its bytes
                    raise
                self.ledger.move(
                    stored=record.disk - replaced.stored, leaving=-replaced.leaving, reserved=-reserved,
                    other=-self._foreign.pop(chunk, 0),
                )  # fmt: skip
            if self._announcing:
                self._told.add(chunk)
            self.tell(TierChange(chunk, True, "", header_block(front.block)))

    def adopt(self, chunk: ChunkId) -> bool:
        """Enter a file that is there without a record, if its header is right; else move it aside."""
        path = self.device.paths.chunk(chunk)
        with self._stripe(chunk):
            with self.manifest.reading() as view:
                if view.get(chunk) is not None or view.leaving(chunk) is not None:
                    return False
            try:
                front = front_of(self.device, path)
            except ForeignChunk as error:
                self._leave_alone(chunk, str(error))
                return False
            except CorruptChunk as error:
                self._move_aside(chunk, str(error), keep=not isinstance(error, UnsealedChunk))
                return False
            except CannotDecode as error:
                self._keep_unreadable(chunk, error)
                return False
            except OSError:
                self.manifest.end_write(chunk)
                return False
            self._enter(chunk, record_of(front, cold=False))
            if self._announcing:
                self._told.add(chunk)
            self.tell(TierChange(chunk, True, "", header_block(front.block)))
        self.counts["adopted"] += 1
        return True

    def _enter(self, chunk: ChunkId, record: Record) -> None:
        """Its file was found: it is in the manifest from now on."""
        with self._changing:
            replaced = self.manifest.commit(chunk, record, found=True)
            self.ledger.move(stored=record.disk - replaced.stored, leaving=-replaced.leaving)

    def _leave_alone(self, chunk: ChunkId, why: str) -> None:
        """A file that nobody here has written, of another version: it stays where it is, and counts."""
        path = self.device.paths.chunk(chunk)
        complain("version", "%s is left alone (%s): `forebay fsck --fs DIR --repair` moves it aside", path, why)
        self.manifest.end_write(chunk)
        self.counts["other_version"] += 1
        size = disk_bytes(os.lstat(path))
        self.ledger.move(other=size - self._foreign.pop(chunk, 0))
        self._foreign[chunk] = size

    def inherit(self, chunk: ChunkId, source: str, unwanted: Callable[[ChunkHeader], bool]) -> int | None:
        """Take over a file of a store that is gone, with the room that it takes there; returns that room.

        One that isn't well, is `unwanted` or is here already is removed. None: it can't be read here, and stays.
        """
        path = self.device.paths.chunk(chunk)
        with self._stripe(chunk):
            try:
                front = front_of(self.device, source)
            except (ForeignChunk, CannotDecode):
                return None
            except CorruptChunk as error:
                complain("corrupt", "%s is removed: %s", source, error)
                self.device.remove(source)
                return 0
            with self.manifest.reading() as view:
                here = view.get(chunk) is not None or view.leaving(chunk) is not None
            if here or unwanted(front.header):
                self.device.remove(source)
                return 0
            self.manifest.begin_write(chunk, front.disk)
            self.device.rename(source, path)
            # The room comes with the file: until the dead store's part is given up it is reserved over there.
            self.ledger.widen(front.disk)
            self._enter(chunk, record_of(front, cold=False))
            if self._announcing:
                self._told.add(chunk)
            self.tell(TierChange(chunk, True, "", header_block(front.block)))
        self.counts["inherited"] += 1
        return front.disk

    def unreadable(self, chunk: ChunkId, error: CannotDecode) -> None:
        """A chunk's file can't be decoded here: it is a miss from now on, and stays until its room is needed."""
        with self._stripe(chunk):
            self._keep_unreadable(chunk, error)

    def _keep_unreadable(self, chunk: ChunkId, error: CannotDecode) -> None:
        path = self.device.paths.chunk(chunk)
        try:
            disk = disk_bytes(os.lstat(path))
        except FileNotFoundError:
            return
        old = self.manifest.get(chunk)
        if old is not None and old.unreadable:
            return
        complain("unreadable", "%s can't be read here and is kept: %s", path, error)
        self.counts["unreadable"] += 1
        record = _unknown(disk) if old is None else replace(old, disk=disk, cold=True, unreadable=True)
        self._enter(chunk, record)
        if old is not None:
            self.tell(TierChange(chunk, False, "evicted"))

    def announce(self, chunk: ChunkId) -> None:
        """Tell of a chunk that an earlier process stored, if its file is still there and right."""
        path = self.device.paths.chunk(chunk)
        with self._stripe(chunk):
            record = self.manifest.get(chunk)
            if chunk in self._told or record is None:
                return
            try:
                front = front_of(self.device, path)
            except CannotDecode as error:
                self._keep_unreadable(chunk, error)
                return
            except (CorruptChunk, OSError):
                return  # the walk that follows, or a load, finds out what is wrong and acts on it
            if record.unreadable:  # its key is here again
                self._enter(chunk, record_of(front, cold=False))
            self._outbox.change(TierChange(chunk, True, "", header_block(front.block)))

    def all_announced(self) -> None:
        """Everything that an earlier process left has been told of."""
        self._announcing = False
        self._told.clear()

    # --- going -----------------------------------------------------------------------------------------

    def evict(self, size: int, count: int = 0, reason: str = "evicted") -> bool:
        """Remove the coldest chunks, `size` bytes or more. False if nothing could be removed."""
        with self._evicting:
            freed = self.reap(enough=size)
            if freed >= size and not count:
                return True
            self.flush_touches()
            gone = self._leave_coldest(size - freed, count, reason)
            self.counts["evicted"] += len(gone)
            freed += sum(self._unlink(left) for left in gone)
            return freed > 0

    def reap(self, *, enough: int | None = None, files: int | None = None) -> int:
        """Unlink the files of leaving chunks that nobody reads; returns the freed bytes.

        Stops at `enough` bytes, or when it has looked at about `files`.
        """
        freed, seen, last = 0, 0, None
        while self.ledger.leaving and (some := self.manifest.list_leaving(64, last)):
            freed += sum(self._unlink(left) for left in some)
            seen += len(some)
            last = some[-1].chunk
            if (enough is not None and freed >= enough) or (files is not None and seen >= files):
                break
        return freed

    def _unlink(self, left: Leaving) -> int:
        path = self.device.paths.chunk(left.chunk)
        with self._stripe(left.chunk):
            if self._pinned(left.chunk):
                return 0
            with self.manifest.reading() as view:
                if view.leaving(left.chunk) is None:
                    return 0  # stored again meanwhile, or somebody else was faster
            block = self._known_block(path)
            try:
                self.device.remove(path)
            except OSError as error:
                self.counts["unlink_errors"] += 1
                complain("unlink", "can't remove %s: %s", path, error.strerror)
                return 0
            with self._changing:
                self.manifest.bury(left.chunk)
                self.ledger.move(leaving=-left.disk)
            self.tell(TierChange(left.chunk, False, left.reason, block))
        return left.disk

    def _known_block(self, path: str) -> bytes:
        """The header block of a file that is about to go, for whoever wants to know what it was."""
        try:
            return header_block(front_of(self.device, path).block)
        except (CorruptChunk, CannotDecode, OSError):
            return b""

    def vanished(self, chunk: ChunkId) -> bool:
        """A stored chunk's file was not there: forget the chunk, if that is still so."""
        with self._stripe(chunk):
            if os.path.lexists(self.device.paths.chunk(chunk)):
                return False
            with self._changing:
                record = self.manifest.drop(chunk)
                if record is None:
                    return False
                self.ledger.move(stored=-record.disk)
            self.counts["vanished"] += 1
            self.tell(TierChange(chunk, False, "evicted"))
            return True

    def foreign(self, path: str) -> None:
        """Something in the chunks' folders is no chunk: move it aside, unless it is a folder."""
        if os.path.isdir(path) and not os.path.islink(path):
            return
        complain("foreign", "%s is moved aside: no chunk has such a name", path)
        self.counts["foreign"] += 1
        self.quarantine.take(path)

    def damaged(self, chunk: ChunkId, inode: int, error: CorruptChunk) -> None:
        """A chunk's file did not verify: move it aside. `inode` 0 or the file that was read. One that should be
        encrypted and isn't is removed."""
        with self._stripe(chunk):
            try:
                status = os.lstat(self.device.paths.chunk(chunk))
            except FileNotFoundError:
                return
            if inode in (0, status.st_ino):
                self._move_aside(chunk, str(error), keep=not isinstance(error, UnsealedChunk))

    def _move_aside(self, chunk: ChunkId, why: str, *, keep: bool) -> None:
        path = self.device.paths.chunk(chunk)
        block = self._known_block(path)
        complain("corrupt", "%s is moved aside: %s" if keep else "%s is removed: %s", path, why)
        with self._changing:
            record = self.manifest.drop(chunk)
        self.manifest.end_write(chunk)
        # Counted twice for a moment rather than not at all: a reservation may be made in between.
        if keep:
            self.quarantine.take(path)
        else:
            self.device.remove(path)
        self.counts["corrupt"] += 1
        if record is not None:
            self.ledger.move(stored=-record.disk)
            self.tell(TierChange(chunk, False, "corrupt", block))
