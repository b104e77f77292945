"""Another store's seat in the same directory, as it is known from here: a manifest of its chunks that we keep.

Its journal says what is new; every name is compared once at the start, and whenever the journal has gone on without us.
What a mirror says may be out of date for a moment: then a load finds no file, and is a miss.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forebay.errors import CorruptChunk
from forebay.tiers.base import ChunkId, ClearScope, TierChange
from forebay.tiers.chunks import header_block
from forebay.tiers.codec.errors import CannotDecode
from forebay.tiers.fs import journal
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.device import Device
from forebay.tiers.fs.finder import HeaderCache
from forebay.tiers.fs.inspect import front_of
from forebay.tiers.fs.manifest import Manifest, Record
from forebay.tiers.fs.paths import FOLDERS, Paths, chunk_of_name, folder_name
from forebay.tiers.fs.requests import Mailbox, Request
from forebay.tiers.fs.shelf import record_of

STEP = 64
"""Files between two looks at the clock."""

Tell = Callable[["Mirror", TierChange], None]


class Mirror:
    """One other seat. `tell` is called with what came and went, `used` with what its store has loaded from other
    seats, `cache` gets the headers. Methods may be called from
    any thread and block on the disk, except `record`, `children` and `leave_*`, which only block on the manifest."""

    def __init__(
        self, number: int, paths: Paths, folder: Path, map_bytes: int, *,
        device: Device, cache: HeaderCache, token: str, tell: Tell, used: Callable[[ChunkId], None],
    ) -> None:  # fmt: skip
        self.number = number
        self.paths = paths
        self.mailbox = Mailbox(paths.requests, token)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.manifest = Manifest(folder, map_bytes)
        self._device = device
        self._cache = cache
        self._tell, self._used = tell, used
        self._lock = threading.RLock()
        self._place: journal.Place | None = None
        self._scan: Iterator[int] | None = self.scan()
        self._told: set[ChunkId] | None = set()
        self.retired = False
        self.counts: Counter[str] = Counter()

    @property
    def complete(self) -> bool:
        """Have all names been compared?"""
        return self._scan is None

    # --- asking ----------------------------------------------------------------------------------------

    def record(self, chunk: ChunkId) -> Record | None:
        """What is known of a chunk here; None if nothing is."""
        return None if self.retired else self.manifest.get(chunk)

    def children(self, group: int, parent: bytes, unit: bytes, limit: int) -> list[ChunkId]:
        """As `View.children`."""
        if self.retired:
            return []
        with self.manifest.reading() as view:
            return view.children(group, parent, unit, limit)

    # --- learning --------------------------------------------------------------------------------------

    def adopt(self, chunk: ChunkId) -> bool:
        """Know a chunk whose file may be there; False if it isn't, isn't well, or is asked to be cleared."""
        with self._lock:
            with self.manifest.reading() as view:
                known, leaving = view.get(chunk) is not None, view.leaving(chunk) is not None
            told = self._told is None or chunk in self._told
            if leaving or self.retired or (known and told):
                return known
            if not known and self.manifest.count() >= self.manifest.chunks_max:
                self.counts["neighbour_passed_over"] += 1
                return False
            try:
                front = front_of(self._device, self.paths.chunk(chunk))
            except (CorruptChunk, CannotDecode, OSError):
                return known  # whoever sits there finds out what is wrong; a load from here is a miss
            if self.mailbox.covers(front.header):
                return known
            if not known:
                record = record_of(front, cold=False)
                self.manifest.commit(chunk, record, found=True)
                self.counts["neighbour_found"] += 1
            self._cache.put(chunk, front.header)
            if self._told is not None:
                self._told.add(chunk)
            self._tell(self, TierChange(chunk, True, "", header_block(front.block)))
            return True

    def vanished(self, chunk: ChunkId) -> None:
        """Forget a chunk, if its file isn't there."""
        with self._lock:
            if os.path.lexists(self.paths.chunk(chunk)) or self.manifest.drop(chunk) is None:
                return
            self.counts["neighbour_vanished"] += 1
            self._tell(self, TierChange(chunk, False, "evicted"))

    def follow(self) -> None:
        """Read the journal on. Without one, or with a place that is gone, all names are to be compared."""
        if self._place is None:
            end = journal.end_of(self.paths.journal)
            if end is not None:  # what came before this is found by comparing, what comes after it is read
                self._place, self._scan = end, self.scan()
            return
        news = journal.read_on(self.paths.journal, self._place)
        for note in news.notes:
            if note.what == journal.CAME:
                self.adopt(note.chunk)
            elif note.what == journal.LEFT:
                self.vanished(note.chunk)
            elif note.what == journal.USED:
                self._used(note.chunk)
        self._place = news.place
        if news.lost:
            self.counts["neighbour_rescans"] += 1
            self._scan = self.scan()

    def step(self) -> bool:
        """Compare some more names; False if all have been."""
        if self._scan is not None and next(self._scan, None) is None:
            self._scan = None
            self._told = None
        return self._scan is not None

    def scan(self) -> Iterator[int]:
        """Compare all names with what is known. Yields after each step how many files it has looked at."""
        for folder in range(FOLDERS):
            with self.manifest.reading() as view:
                known = view.in_folder(folder)
            try:
                names = os.listdir(f"{self.paths.chunks}/{folder_name(folder)}")
            except (FileNotFoundError, NotADirectoryError):
                names = []
            present = [chunk for name in names if (chunk := chunk_of_name(name)) is not None]
            for at in range(0, len(present), STEP):
                for chunk in present[at : at + STEP]:
                    self.adopt(chunk)
                yield len(present[at : at + STEP])
            for chunk in set(known) - set(present):
                self.vanished(chunk)
        yield 0

    def retire(self) -> Iterator[int]:
        """The seat is no more: tell so of everything, in steps."""
        self.retired = True
        for count, (chunk, _) in enumerate(self.manifest.all(), 1):
            self._tell(self, TierChange(chunk, False, "evicted"))
            if count % STEP == 0:
                yield count

    def revive(self) -> None:
        """The seat is there again."""
        self._place, self._scan, self._told, self.retired = None, self.scan(), set(), False

    # --- removing --------------------------------------------------------------------------------------

    def leave(self, chunks: Sequence[ChunkId], reason: str) -> int:
        """Take chunks out of sight; `reap` removes their files."""
        return len(self.manifest.leave(chunks, reason))

    def leave_scope(self, scope: ClearScope) -> Iterator[int]:
        """Ask the seat to clear a scope, and take what is known of it out of sight; how many chunks with each step."""
        with self._lock:  # from now on nothing of it is taken up
            self.mailbox.leave(Request(scope=scope, reason="cleared"))
        for gone in self.manifest.leave_scope(scope, "cleared"):
            yield len(gone)

    def reap(self) -> bool:
        """Remove some files of chunks that are out of sight; False if there are none."""
        some = self.manifest.list_leaving(STEP)
        removed = []
        for left in some:
            with self._lock:
                try:
                    self._device.remove(self.paths.chunk(left.chunk))
                except OSError as error:
                    complain("unlink", "can't remove %s: %s", self.paths.chunk(left.chunk), error.strerror)
                    continue
                self.manifest.bury(left.chunk)
            removed.append(left.chunk)
            self._tell(self, TierChange(left.chunk, False, left.reason))
        if removed:
            self.mailbox.leave_gone(removed, some[0].reason)
        return bool(removed)

    def unreadable(self, chunk: ChunkId, error: CannotDecode) -> None:
        """A file there can't be decoded here: a miss, and its owner's own affair."""
        with self._lock:
            complain("unreadable", "%s can't be read here: %s", self.paths.chunk(chunk), error)
            if self.manifest.drop(chunk) is not None:
                self._tell(self, TierChange(chunk, False, "evicted"))

    def damaged(self, chunk: ChunkId, inode: int, error: CorruptChunk) -> None:
        """A file there did not verify: move it aside in its own seat, if it is still the one that was read."""
        path = self.paths.chunk(chunk)
        with self._lock:
            try:
                if os.lstat(path).st_ino != inode:
                    return
                complain("corrupt", "%s is moved aside: %s", path, error)
                os.rename(path, f"{self.paths.quarantine}/{os.path.basename(path)}.seat{self.number}")
            except FileNotFoundError:
                pass
            self.counts["corrupt"] += 1
            if self.manifest.drop(chunk) is not None:
                self._tell(self, TierChange(chunk, False, "corrupt"))
        self.mailbox.leave_gone([chunk], "corrupt")

    def close(self) -> None:
        """Let go of the manifest. Nothing else may be under way."""
        self.manifest.close()
