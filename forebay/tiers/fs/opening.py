"""Opening a directory: take it, make it usable, and say clearly why if that can't be done."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.errors import AlreadyRunning, NoSpace, NotWritable
from forebay.tiers.fs.paths import Paths

_FULL = (errno.ENOSPC, errno.EDQUOT)


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


def lock_directory(paths: Paths) -> int:
    """An open descriptor that keeps every other process from serving this directory.

    Raises AlreadyRunning. The kernel lets go when the process ends, however it ends.
    """
    with explained(paths.root):
        descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
        found = os.pread(lock, 64, 0).decode("ascii", "replace")
        if len(found) == 32:
            return found
        fresh = secrets.token_hex(16)
        os.ftruncate(lock, 0)
        os.pwrite(lock, fresh.encode(), 0)
        return fresh
