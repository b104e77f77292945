"""The encoded namespaces that chunks in this directory belong to, one small file each, for people and listings.

Chunks don't need them. So there is a cap, and beyond it the one that was noted longest ago is forgotten.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

from forebay.kvstore.identity import KEY_BYTES
from forebay.kvstore.layout import ALIGNMENT
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.device import disk_bytes
from forebay.tiers.fs.ledger import Ledger

NAMESPACES_MAX = 1024
ENCODED_MAX = 64 << 10


class NamespaceFiles:
    """The folder `namespaces/`, and how many bytes each file takes, the longest ago noted first."""

    def __init__(self, folder: Path, ledger: Ledger, limit: int = NAMESPACES_MAX) -> None:
        self._folder = folder
        self._ledger = ledger
        self._limit = limit
        self._lock = threading.Lock()
        self._known: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def open(self) -> None:
        """Count what is there."""
        with os.scandir(self._folder) as entries:
            found = sorted((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name, entry) for entry in entries)
        for _, name, entry in found:
            self._known[name] = disk_bytes(entry.stat(follow_symlinks=False))
            self._ledger.move(other=self._known[name])
        while len(self._known) > self._limit:
            self._forget_oldest()

    def note(self, namespace: bytes, encoded: bytes) -> bool:
        """Keep a namespace; False if there is no room for it."""
        name = namespace.hex()
        with self._lock:
            if name in self._known:
                self._seen(name)
                return True
            if len(encoded) > ENCODED_MAX or len(namespace) != KEY_BYTES:
                return False
            while len(self._known) >= self._limit:
                self._forget_oldest()
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
            self._known[name] = size
            return True

    def _seen(self, name: str) -> None:
        """It is in use: the last one to be forgotten, after a restart too."""
        self._known.move_to_end(name)
        try:
            os.utime(self._folder / name)
        except OSError as error:
            complain("namespace", "a namespace can't be noted: %s", error)

    def _forget_oldest(self) -> None:
        name, size = self._known.popitem(last=False)
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            complain("namespace", "a namespace can't be forgotten: %s", error)
            return  # what is still there still counts
        self._ledger.move(other=-size)
