"""Where things are by default: sockets in the user's runtime directory, caches in the user's cache directory."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from forebay.config import Setting, unix_socket
from forebay.errors import NotWritable


def runtime_dir() -> Path:
    """For sockets: $XDG_RUNTIME_DIR/forebay, else a private directory of this user among temporary files."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "forebay" if base else Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}"


def cache_dir() -> Path:
    """For models and KV files: $XDG_CACHE_HOME/forebay or ~/.cache/forebay."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forebay"


def default_socket() -> Path:
    """The store's socket if nobody says otherwise."""
    return runtime_dir() / "store.sock"


SOCKET = Setting(
    "socket", unix_socket, default_socket(), "the store's unix socket", shown="store.sock in the runtime directory"
)
"""Of commands that ask a store."""


def private(folder: Path) -> Path:
    """The folder, made with mode 0700 if it isn't there. Raises NotWritable if it is another user's.

    Among temporary files anybody could have made it before us.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise NotWritable(f"can't make {folder}: {error.strerror}; set XDG_RUNTIME_DIR") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NotWritable(f"{folder} isn't a directory that only this user can change; set XDG_RUNTIME_DIR")
    return folder
