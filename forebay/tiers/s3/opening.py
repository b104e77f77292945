"""Opening what the tier remembers, in a state directory or, without one, in files that nobody else can see."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import lmdb

from forebay.errors import AlreadyRunning, NoSpace, NotWritable
from forebay.tiers.fs.manifest import BROKEN, Manifest
from forebay.tiers.fs.state import State
from forebay.tiers.s3.cards import HEADER_KEPT, Cards
from forebay.tiers.s3.options import S3Options

_BYTES_PER_RECORD = 1024
_SPARE_BYTES = 1 << 20


@dataclass
class Memory:
    """What is remembered of own chunks. `state` and `lock` are there if there is a state directory; `fresh` is why
    nothing was remembered, empty if something was."""

    manifest: Manifest
    cards: Cards
    state: State | None
    lock: int | None
    fresh: str
    data: int
    """A descriptor of the manifest's file, which may have no name any more."""

    @property
    def bytes(self) -> int:
        """What the manifest takes on disk, without the cards."""
        return os.fstat(self.data).st_blocks * 512

    def close(self, *, well: bool) -> None:
        """Flush and close. Not `well`: what is on disk may be broken, the next process shall start afresh."""
        try:
            if self.state is not None and not well:
                self.state.distrust()
            self.cards.close()
            self.manifest.close()
            if self.state is not None and well:
                self.state.close()
        finally:
            os.close(self.data)
            if self.lock is not None:
                os.close(self.lock)


def open_memory(options: S3Options, *, headers: bool) -> Memory:
    """`headers`: may chunks' headers be kept? Raises AlreadyRunning, NotWritable, NoSpace."""
    kept = HEADER_KEPT if headers else 0
    try:
        if options.state_dir is None:
            return _open_hidden(options.own_chunks_max, kept)
        return _open_state(Path(options.state_dir), options, kept)
    except lmdb.DiskError as error:
        raise NoSpace(f"no space for the manifest of {options.where}: {error}") from error
    except OSError as error:
        where = options.state_dir or tempfile.gettempdir()
        raise NotWritable(f"can't write the manifest of {options.where} in {where}: {error.strerror}") from error


def _open_hidden(chunks_max: int, kept: int) -> Memory:
    folder = Path(tempfile.mkdtemp(prefix="forebay-s3-"))
    try:
        manifest, cards = _open_in(folder, chunks_max, kept)
        return Memory(manifest, cards, None, None, "there is no state_dir", _data(folder))
    finally:
        shutil.rmtree(folder)  # the open files live on until they are closed, however that comes


def _open_state(path: Path, options: S3Options, kept: int) -> Memory:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunning(f"another store uses the state directory {path}: give this one its own") from error
        state = State(path, hashlib.sha256(options.identity.encode()).hexdigest()[:32])
        fresh = state.open(rebuild=False) or ""
        try:
            manifest, cards = _open_in(state.manifest, options.own_chunks_max, kept)
        except BROKEN as error:
            state.discard()
            state.manifest.mkdir(mode=0o700)
            manifest, cards = _open_in(state.manifest, options.own_chunks_max, kept)
            fresh = f"it can't be read: {error}"
        return Memory(manifest, cards, state, lock, fresh, _data(state.manifest))
    except BaseException:
        os.close(lock)
        raise


def _data(folder: Path) -> int:
    return os.open(folder / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)


def _open_in(folder: Path, chunks_max: int, kept: int) -> tuple[Manifest, Cards]:
    manifest = Manifest(folder, chunks_max * _BYTES_PER_RECORD + _SPARE_BYTES)
    try:
        (folder / "cards").mkdir(mode=0o700, exist_ok=True)
        return manifest, Cards(folder / "cards", chunks_max, header_bytes_max=kept)
    except BaseException:
        manifest.close()
        raise
