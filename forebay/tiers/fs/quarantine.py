"""Files that didn't verify: moved aside for a person to look at, bounded in number and bytes."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from pathlib import Path

from forebay.tiers.fs.device import disk_bytes
from forebay.tiers.fs.ledger import Ledger

log = logging.getLogger("forebay.tier.fs")


class Quarantine:
    """The directory `quarantine/`. The oldest file leaves for the newest; the ledger counts all of them."""

    def __init__(self, directory: Path, ledger: Ledger, files_max: int, bytes_max: int) -> None:
        self._directory = directory
        self._ledger = ledger
        self._files_max = files_max
        self._bytes_max = self._bytes_at_most = bytes_max
        self._lock = threading.Lock()
        self._serial = 0
        self._files: OrderedDict[str, int] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    def recount(self) -> None:
        """Count what is there: at start, and now and then, since people may add and remove files."""
        with self._lock:
            found = []
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime, entry.path, disk_bytes(status)))
            before = self.bytes
            self._files = OrderedDict((path, size) for _, path, size in sorted(found))
            self.bytes = sum(self._files.values())
            self._ledger.move(quarantine=self.bytes - before)
            self._trim()

    def limit_bytes(self, bytes_max: int) -> None:
        """Keep at most so many bytes, and never more than at the start was said."""
        with self._lock:
            self._bytes_max = min(self._bytes_at_most, bytes_max)
            self._trim()

    def take(self, path: str) -> None:
        """Move a file here. One that is too large, or can't be moved, is removed."""
        with self._lock:
            self._serial += 1
            try:
                size = disk_bytes(os.lstat(path))
                if size > self._bytes_max or self._files_max == 0:
                    os.unlink(path)
                    return
                target = self._free_name(os.path.basename(path))
                os.rename(path, target)
            except FileNotFoundError:
                return
            except OSError as error:
                log.error("can't move %s aside: %s", path, error.strerror)
                return
            self._files[target] = size
            self.bytes += size
            self._ledger.move(quarantine=size)
            self._trim()

    def _free_name(self, name: str) -> str:
        while True:
            target = f"{self._directory}/{name}.{self._serial}"
            if not os.path.lexists(target):
                return target
            self._serial += 1

    def _trim(self) -> None:
        while len(self._files) > self._files_max or self.bytes > self._bytes_max:
            path, size = self._files.popitem(last=False)
            try:
                os.unlink(path)
            except OSError as error:
                log.warning("can't remove %s: %s", path, error.strerror)
            self.bytes -= size
            self._ledger.move(quarantine=-size)

