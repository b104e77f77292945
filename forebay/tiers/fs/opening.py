"""Opening a directory: take it, make it usable, and say clearly why if that can't be done."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.errors import AlreadyRunning, CorruptChunk, ForeignChunk, NoSpace, NotWritable, OtherVersion
from forebay.kvstore import formats
from forebay.kvstore.header import HEADER_BYTES_MAX, decode_header
from forebay.kvstore.identity import chunk_key
from forebay.tiers.fs.paths import Paths

_FULL = (errno.ENOSPC, errno.EDQUOT)
_ID = re.compile(r"[0-9a-f]{32}")
_ID_BYTES = 32
REMEDY = "give this store a directory of its own (--fs DIR), start that version on it, or remove it: it is a cache"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the system's errors about `path` into ones that name the remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise NoSpace(
                f"no space for the file tier in {path} ({reason}): free some, or choose another directory"
            ) from error
        if error.errno == errno.ENOENT:
            raise NotWritable(f"{path} can't be made, its parent folder doesn't exist: create that first") from error
        raise NotWritable(
            f"the file tier can't write in {path} ({reason}): give this user the right to, or choose another directory"
        ) from error


def make_folders(paths: Paths) -> None:
    """Create what is missing of the directory's own folders; not its parents. Raises NotWritable, NoSpace."""
    with explained(paths.root):
        for folder in (paths.root, paths.chunks, paths.tmp, paths.quarantine, paths.namespaces):
            folder.mkdir(mode=0o700, exist_ok=True)


def open_lock(paths: Paths) -> int:
    """The open lock file, not locked yet. Raises NotWritable, NoSpace."""
    with explained(paths.root):
        return os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def lock_directory(paths: Paths) -> int:
    """An open descriptor that keeps every other process from sitting at this seat.

    Raises AlreadyRunning. The kernel lets go when the process ends, however it ends.
    """
    descriptor = open_lock(paths)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AlreadyRunning(
            f"another store uses {paths.root} already: stop it, or give this one a directory of its own (--fs DIR)"
        ) from error
    return descriptor


def directory_id(lock: int, paths: Paths) -> str:
    """The random name of this directory's contents, kept in its lock file: a manifest belongs to one."""
    with explained(paths.root):
        found = os.pread(lock, _ID_BYTES, 0).decode("ascii", "replace")
        if _ID.fullmatch(found):
            return found
        fresh = secrets.token_hex(16)
        os.ftruncate(lock, 0)
        os.pwrite(lock, fresh.encode(), 0)
        return fresh


def check_formats(lock: int, paths: Paths) -> None:
    """Note in the lock file, behind the id, which formats are used here. Raises OtherVersion if it says others, or if
    it says nothing and the first chunk that is found is in another one."""
    with explained(paths.root):
        found = formats.read_line(lock, _ID_BYTES)
        if not found:
            found = _look_at_one(paths) or ""
        if found not in ("", formats.format_line("files")):
            raise OtherVersion(formats.refusal(f"the directory {paths.root}", found, "files", REMEDY))
        os.pwrite(lock, b"\n", _ID_BYTES)
        formats.write_line(lock, "files", _ID_BYTES + 1)


def _look_at_one(paths: Paths) -> str | None:
    """What shows that a chunk here is another version's; None if nothing does."""
    file = next((f"{folder}/{name}" for folder, _, names in os.walk(paths.chunks) for name in names), None)
    if file is None:
        return None
    try:
        with open(file, "rb") as chunk:
            header = decode_header(chunk.read(HEADER_BYTES_MAX))
    except ForeignChunk as error:
        return f"{os.path.basename(file)}: {error}"
    except CorruptChunk:
        return None  # that is found and moved aside later
    if chunk_key(header.parent, header.tokens, header.extra) != header.key:
        return f"{os.path.basename(file)}: its name was made from its tokens in another way"
    return None
