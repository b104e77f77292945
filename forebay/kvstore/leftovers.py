"""Pools of stores that were killed and never started again: nobody's, but their memory is still taken.

A pool outlives its store on purpose, so that the next one on the same socket goes on with it. If none ever comes, it
stays until somebody removes it. Whether a store lives is told by the flock on its pool's lock file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forebay.kvstore import formats
from forebay.kvstore.extents import try_lock


@dataclass(frozen=True)
class FoundPool:
    """A pool of this user. `held`: its store lives. `formats` is what its lock file says of it."""

    path: Path
    bytes: int
    held: bool
    used_at: float
    formats: str


def pools(pool_dir: Path) -> Iterator[FoundPool]:
    """All pools of this user in a directory. Reads nothing but names, sizes and lock files."""
    for path in sorted(pool_dir.glob(f"forebay-{os.getuid()}-*")):
        with suppress(FileNotFoundError):  # its store is just removing it
            found = _look(path)
            if found is not None:
                yield found


def _look(path: Path) -> FoundPool | None:
    status = path.lstat()
    if not path.is_dir() or path.is_symlink() or status.st_uid != os.getuid():
        return None
    descriptor = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        held = not try_lock(descriptor)
        line = formats.read_line(descriptor)
    finally:
        os.close(descriptor)
    files = [file.stat() for file in path.glob("extent-*")]
    size = sum(file.st_blocks * 512 for file in files)
    return FoundPool(path, size, held, max((file.st_mtime for file in files), default=status.st_mtime), line)


def remove(pool: FoundPool) -> bool:
    """Remove a pool, if its store still doesn't live; False if it does, or has removed it itself.

    The pool's lock is held meanwhile, so a store that starts on it just now is refused rather than robbed.
    """
    try:
        descriptor = os.open(pool.path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        if not try_lock(descriptor):
            return False
        shutil.rmtree(pool.path)
        return True
    finally:
        os.close(descriptor)


def unheld(pool_dir: Path, but: Path) -> list[FoundPool]:
    """Pools that no store holds, other than `but`."""
    return [pool for pool in pools(pool_dir) if not pool.held and pool.path != but]
