"""The directory for what was made from checkpoints: conversions, fingerprints, the assembled demo model.

Whatever is in it under its final name is whole: it was made beside it and renamed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.errors import NoSpace, NotWritable, ResourceError

_TEMPORARY = ".part-"


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/forebay/models`, by default `~/.cache/forebay/models`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "forebay" / "models"


@contextmanager
def exclusive(cache_dir: Path) -> Iterator[None]:
    """Only one process makes things in `cache_dir` at a time; others block here and then find them made.

    What a process that died left unfinished is removed. Raises NotWritable or NoSpace.
    """
    with _disk_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in cache_dir.glob(f"{_TEMPORARY}*"):
                _remove(leftover)
            yield


@contextmanager
def new_directory(cache_dir: Path, final: Path) -> Iterator[Path]:
    """A temporary directory that becomes `final` if the body ends well. Call it under `exclusive`."""
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=cache_dir))
    try:
        yield temporary
        for path in temporary.iterdir():
            _flush(path)
        _flush(temporary)
        os.rename(temporary, final)
        _flush(cache_dir)
    finally:
        _remove(temporary)


@contextmanager
def new_file(cache_dir: Path, final: Path) -> Iterator[Path]:
    """A path to write to, which becomes `final` if the body ends well. Call it under `exclusive`."""
    temporary = cache_dir / f"{_TEMPORARY}{final.name}"
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, final)
        _flush(cache_dir)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    # After a power cut the final name must not stand for half a file.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoSpace(
                f"no space left in {cache_dir} for a converted model; free some, or choose another cache directory"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise NotWritable(
                f"the cache directory {cache_dir} can't be written ({error.strerror}); choose another one"
            ) from error
        raise ResourceError(f"{cache_dir}: {error}") from error
