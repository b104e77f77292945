"""What comes into a seat and leaves it, appended to small files for the other stores of the directory.

    journal/<epoch>-<number>    entries of 34 bytes: what, the group, the key

"+" came, "-" left, "u" has been loaded from another seat: its owner shall not take it for unused.

Entries are hints and nothing more: whoever reads one looks at the file it names. Two files are kept, the older one
goes when the newer is full. A reader who finds its place gone compares all names once (`Mirror.scan`) and reads on.
With one store there is no journal.
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from forebay.kvstore.identity import KEY_BYTES
from forebay.tiers.base import ChunkId

CAME, LEFT, USED = b"+", b"-", b"u"
ENTRY_BYTES = 2 + KEY_BYTES
FILE_ENTRIES_MAX = 900
"""About 30 KiB a file. A reader looks four times a second: 3,600 chunks a second before it has to compare names."""
BUFFER_MAX = 1 << 14


@dataclass(frozen=True, slots=True)
class Place:
    """Up to where a journal has been read."""

    epoch: str
    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class Note:
    """One entry; `what` is one of CAME, LEFT, USED."""

    chunk: ChunkId
    what: bytes


@dataclass(frozen=True, slots=True)
class News:
    """What a reader finds. `lost`: its place was gone, so there is more than `notes` tell."""

    notes: list[Note]
    place: Place | None
    lost: bool


class Journal:
    """The writing end. `note` may be called from any thread, the others by one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._overflowed = False
        self._epoch = ""
        self._number = self._entries = 0

    @property
    def waiting(self) -> int:
        """Entries that aren't written yet."""
        return len(self._waiting)

    def open(self) -> None:
        """Begin anew: readers compare names once. OSError passes through."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for name in os.listdir(self._folder):
            os.unlink(self._folder / name)
        with self._lock:
            self._epoch, self._number, self._entries = secrets.token_hex(8), 0, 0
            self._waiting.clear()
            self._overflowed = False
        self._path.touch(mode=0o600)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._epoch}-{self._number:09d}"

    def note(self, chunk: ChunkId, what: bytes) -> None:
        """Tell of a chunk. Doesn't block; forgotten while nobody reads."""
        if not self._epoch:
            return
        entry = what + bytes([chunk.group]) + chunk.key
        with self._lock:
            if len(self._waiting) >= BUFFER_MAX:
                self._overflowed = True
            else:
                self._waiting.append(entry)

    def flush(self) -> None:
        """Write what waits. OSError passes through, and then it is written the next time."""
        if self._overflowed:
            self.open()
            return
        with self._lock:
            waiting = self._waiting[: FILE_ENTRIES_MAX]
        if not waiting:
            return
        if self._entries + len(waiting) > FILE_ENTRIES_MAX:
            self._number, self._entries = self._number + 1, 0
            (self._folder / f"{self._epoch}-{self._number - 2:09d}").unlink(missing_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # At its place rather than at the end: what an earlier attempt wrote in part is written over.
            os.pwrite(descriptor, b"".join(waiting), self._entries * ENTRY_BYTES)
        finally:
            os.close(descriptor)
        self._entries += len(waiting)
        with self._lock:
            del self._waiting[: len(waiting)]


def end_of(folder: Path) -> Place | None:
    """Where a journal ends now; None if there is none yet."""
    places = _places(folder)
    return places[-1] if places else None


def read_on(folder: Path, place: Place) -> News:
    """Everything behind `place`."""
    found = [other for other in _places(folder) if other.epoch == place.epoch and other.number >= place.number]
    if not found or found[0].number != place.number:
        return News([], end_of(folder), lost=True)
    notes: list[Note] = []
    for index, file in enumerate(found):
        if index and file.number != found[index - 1].number + 1:
            return News(notes, end_of(folder), lost=True)
        begin = place.offset if index == 0 else 0
        try:
            data = (folder / f"{file.epoch}-{file.number:09d}").read_bytes()
        except FileNotFoundError:
            return News(notes, end_of(folder), lost=True)
        whole = len(data) - len(data) % ENTRY_BYTES
        notes += [_note(data[at : at + ENTRY_BYTES]) for at in range(begin, whole, ENTRY_BYTES)]
        place = Place(file.epoch, file.number, max(whole, begin))
    return News(notes, place, lost=False)


def _note(entry: bytes) -> Note:
    return Note(ChunkId(entry[1], entry[2:]), entry[:1])


def _places(folder: Path) -> list[Place]:
    """The journal's files with their sizes, in order."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                epoch, _, number = entry.name.partition("-")
                if number.isdigit():
                    found.append(Place(epoch, int(number), entry.stat().st_size // ENTRY_BYTES * ENTRY_BYTES))
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda place: place.number)
