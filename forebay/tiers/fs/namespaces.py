"""The encoded namespaces that chunks in this directory belong to, one small file each."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from forebay.kvstore.identity import KEY_BYTES
from forebay.kvstore.layout import ALIGNMENT
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.device import disk_bytes
from forebay.tiers.fs.ledger import Ledger

NAMESPACES_MAX = 1024
ENCODED_MAX = 64 << 10


class NamespaceFiles:
    """The folder `namespaces/`. Chunks don't need it: their headers carry the namespace's id."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._folder = folder
        self._ledger = ledger
        self._lock = threading.Lock()
        self._known: set[str] = set()

    def __len__(self) -> int:
        return len(self._known)

    def open(self) -> None:
        """Count what is there."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                self._known.add(entry.name)
                self._ledger.move(other=disk_bytes(entry.stat(follow_symlinks=False)))

    def note(self, namespace: bytes, encoded: bytes) -> bool:
        """Keep a namespace; False if there is no room for it."""
        name = namespace.hex()
        with self._lock:
            if name in self._known:
                return True
            if len(self._known) >= NAMESPACES_MAX or len(encoded) > ENCODED_MAX or len(namespace) != KEY_BYTES:
                return False
            room = len(encoded) + 2 * ALIGNMENT
            if self._ledger.reserve(room):
                return False
            size = 0
            try:
                path = self._folder / name
                fresh = self._folder / f"{name}.new"
                fresh.write_bytes(encoded)
                os.replace(fresh, path)
                size = disk_bytes(path.stat())
            except OSError as error:
                complain("namespace", "a namespace can't be noted: %s", error)
                return False
            finally:
                self._ledger.move(reserved=-room, other=size)
            self._known.add(name)
            return True
