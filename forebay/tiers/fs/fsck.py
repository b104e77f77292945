"""Checking and listing a file tier's directory from its files alone, whether a store uses it or not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from forebay.errors import CorruptChunk, NotWritable
from forebay.kvstore.header import ChunkHeader
from forebay.tiers.base import ChunkId
from forebay.tiers.codec.codec import Codec, check_sealed
from forebay.tiers.codec.errors import CannotDecode
from forebay.tiers.fs.device import Device
from forebay.tiers.fs.inspect import check_payload, front_of
from forebay.tiers.fs.manifest import Manifest
from forebay.tiers.fs.paths import Paths, all_seats, chunk_of_name, seat_id
from forebay.tiers.fs.presence import is_locked
from forebay.tiers.fs.state import directory_of

PROBLEMS_MAX = 10_000
PROGRESS_FILES = 64

Progress = Callable[[int, int], None]
"""Called now and then with the files and bytes that have been checked."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that would never be served. `repaired`: it has been moved to the quarantine."""

    path: str
    why: str
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """A chunk's header, its file and what that takes on disk. The payload isn't verified."""

    header: ChunkHeader
    path: str
    bytes: int


@dataclass
class FsckReport:
    """What a check found. `problems` lists at most the first `PROBLEMS_MAX` of `problem_count`.

    `leftovers` (unfinished files), `unindexed` (files that the manifest doesn't know) and `vanished` (records
    without a file) are no damage: a store settles them by itself. `sealed` counts, by the id of their key, chunks
    whose key isn't here; they are what was stored, and nothing more can be said of them. `manifest` is "ok", "absent",
    or why it can't be read, and then `unindexed` and `vanished` aren't known.
    """

    files: int = 0
    bytes: int = 0
    chunks: int = 0
    problem_count: int = 0
    problems: list[Problem] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    unindexed: int = 0
    vanished: int = 0
    quarantined: int = 0
    in_use: bool = False
    manifest: str = "absent"
    sealed: dict[str, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Is every file what it says it is?"""
        return self.problem_count == 0

    def note(self, problem: Problem) -> None:
        """Add a problem."""
        self.problem_count += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)


def check_directory(
    directory: Path, repair: bool, progress: Progress | None = None, *, state_dir: Path | None = None,
    codec: Codec | None = None,
) -> FsckReport:  # fmt: skip
    """Read and verify every file, through `codec` where they are compressed or encrypted. With `repair`, bad ones move
    to the quarantine, and leftovers are removed where no store sits. Raises NotWritable if there is no such directory
    or it can't be read."""
    paths = Paths(directory)
    seats = all_seats(directory)
    if not any(seat.chunks.is_dir() or seat.estate.is_dir() for seat in seats):
        raise NotWritable(f"{directory} is no file tier's directory: it has no folder {paths.chunks.name}")
    report = FsckReport()
    try:
        for seat in seats:
            _check_seat(seat, report, repair, progress, state_dir, codec or Codec())
    except PermissionError as error:
        raise NotWritable(f"{error.filename} can't be read: run this as the user that the store runs as") from error
    if progress is not None:
        progress(report.files, report.bytes)
    return report


def _check_seat(
    paths: Paths, report: FsckReport, repair: bool, progress: Progress | None, state_dir: Path | None, codec: Codec
) -> None:
    in_use = _in_use(paths)
    report.in_use |= in_use
    device = Device(paths, "off", fsync=False)
    device.codec = codec
    good: set[ChunkId] = set()
    for path in _files(paths):
        _check_file(device, path, report, good, repair)
        if progress is not None and report.files % PROGRESS_FILES == 0:
            progress(report.files, report.bytes)
    _check_leftovers(paths, report, repair and not in_use)
    report.quarantined += sum(1 for _ in paths.quarantine.iterdir()) if paths.quarantine.is_dir() else 0
    _compare(paths, state_dir, good, report)


def _check_file(device: Device, path: str, report: FsckReport, good: set[ChunkId], repair: bool) -> None:
    report.files += 1
    try:
        _check_place(device.paths, path)
        front = check_payload(device, path)
    except FileNotFoundError:
        return  # a running store has removed it
    except CannotDecode:
        _check_unreadable(device, path, report, good, repair)
        return
    except (CorruptChunk, OSError) as error:
        repaired = repair and _set_aside(device.paths, path)
        report.note(Problem(path, str(error), repaired))
        return
    report.chunks += 1
    report.bytes += front.disk
    good.add(ChunkId(front.header.group, front.header.key))


def _check_unreadable(device: Device, path: str, report: FsckReport, good: set[ChunkId], repair: bool) -> None:
    """Without its key a chunk can only be checked for being what was stored, not for what it says."""
    try:
        with open(path, "rb") as file:
            envelope = check_sealed(file.read())
        if chunk_of_name(os.path.basename(path)) != envelope.chunk:
            raise CorruptChunk("the envelope is another chunk's than the name says")
    except FileNotFoundError:
        return
    except (CorruptChunk, OSError) as error:
        report.note(Problem(path, str(error), repair and _set_aside(device.paths, path)))
        return
    report.sealed[envelope.key_id.hex()] = report.sealed.get(envelope.key_id.hex(), 0) + 1
    good.add(envelope.chunk)


def _check_place(paths: Paths, path: str) -> None:
    chunk = chunk_of_name(os.path.basename(path))
    if chunk is None:
        raise CorruptChunk("the name is no chunk's")
    if path != paths.chunk(chunk):
        raise CorruptChunk("the file is in the wrong folder")


def _set_aside(paths: Paths, path: str) -> bool:
    paths.quarantine.mkdir(mode=0o700, exist_ok=True)
    target = paths.quarantine / f"{os.path.basename(path)}.fsck"
    serial = 0
    while os.path.lexists(target):
        serial += 1
        target = paths.quarantine / f"{os.path.basename(path)}.fsck{serial}"
    try:
        os.rename(path, target)
    except OSError:
        return False
    return True


def _check_leftovers(paths: Paths, report: FsckReport, repair: bool) -> None:
    if not paths.tmp.is_dir():
        return
    leftovers = sorted(str(path) for path in paths.tmp.iterdir())
    report.leftovers += leftovers
    if repair:
        for leftover in leftovers:
            os.unlink(leftover)


def _in_use(paths: Paths) -> bool:
    """Does a process hold the seat? Where locks don't tell, one that left its beat behind may be alive elsewhere: what
    it has not finished is for the other stores to clean up, who watch it for long enough."""
    with contextlib.suppress(OSError):
        return is_locked(paths.lock) or paths.beat.exists()
    return False


def _compare(paths: Paths, state_dir: Path | None, good: set[ChunkId], report: FsckReport) -> None:
    state = paths.root / ".state"
    if state_dir is not None and directory_of(state_dir) == seat_id(paths):
        state = state_dir
    folder = state / "manifest"
    data = folder / "data.mdb"
    if not data.is_file():
        return
    try:
        manifest = Manifest(folder, max(data.stat().st_size, 1 << 20), readonly=True)
        try:
            known = {chunk for chunk, _ in manifest.all()}
        finally:
            manifest.close()
    except (lmdb.Error, OSError) as error:
        report.manifest = f"unreadable: {error}"
        return
    report.manifest = "ok"
    report.unindexed += len(good - known)
    report.vanished += sum(1 for chunk in known - good if not os.path.lexists(paths.chunk(chunk)))


def _files(paths: Paths) -> Iterator[str]:
    for folder, folders, names in os.walk(paths.chunks):
        folders.sort()
        for name in sorted(names):
            yield f"{folder}/{name}"


def list_directory(directory: Path) -> Iterator[Listed]:
    """Every chunk in a directory, from the headers of its files. Files that aren't well are left out."""
    device = Device(Paths(directory), "off", fsync=False)
    for seat in all_seats(directory):
        for path in _files(seat):
            try:
                front = front_of(device, path)
            except (CorruptChunk, CannotDecode, OSError):
                continue
            yield Listed(front.header, path, front.disk)
