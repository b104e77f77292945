"""Where things are by default: sockets in the user's runtime directory, caches in the user's cache directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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


def private(folder: Path) -> Path:
    """The folder, made with mode 0700 if it isn't there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
