"""A bad disk below the file tier. Kind `forebay.testing.faults.files:FaultyFs`: options `disk_rates`, `disk_seed`,
`disk_log` beside the file tier's own.

What a disk does on its own (a bit that flips, a file that is cut) is done to the files, under their names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping, Sequence

from forebay.testing.faults.dice import Dice, rates_of
from forebay.testing.faults.memory import split
from forebay.tiers.fs.device import Device, TempFile
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.tier import FsTier

FAULTS = {
    "read_error": "a read fails",
    "write_error": "a write fails",
    "name_error": "a written file can't be named",
    "remove_error": "a file can't be removed",
    "short_read": "a read ends before the end",
    "short_write": "a write ends before the end and says nothing",
    "flip": "a bit of a named file changes",
    "cut": "a named file loses its end",
    "gone": "a named file is lost",
    "full": "for some time, no write finds room",
    "slow": "an operation takes up to 100 ms",
    "hang": "an operation never returns",
}
SLOW_S = 0.1


class FaultyDevice(Device):
    """A device with faults. Set `dice` before it is used."""

    dice: Dice = Dice(0, {})

    def _trouble(self, name: str) -> None:
        if self.dice.strikes("slow"):
            time.sleep(self.dice.part() * SLOW_S)
        if self.dice.strikes("hang"):
            while True:
                time.sleep(3600)
        if self.dice.strikes(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write_all(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        if self.dice.lasts("full"):
            super().write_all(descriptor, [parts[0]], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._trouble("write_error")
        if self.dice.strikes("short_write"):
            super().write_all(descriptor, list(parts)[:1], offset)
            return
        super().write_all(descriptor, parts, offset)

    def read_all(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        self._trouble("read_error")
        if self.dice.strikes("short_read"):
            return super().read_all(descriptor, list(parts)[:1], offset)
        return super().read_all(descriptor, parts, offset)

    def publish(self, temp: TempFile, path: str) -> None:
        self._trouble("name_error")
        super().publish(temp, path)
        with contextlib.suppress(FileNotFoundError):  # it has left already
            self._decay(path)

    def _decay(self, path: str) -> None:
        size = os.stat(path).st_size
        if self.dice.strikes("flip"):
            self._flip(path, size)
        if self.dice.strikes("cut"):
            os.truncate(path, self.dice.between(0, size - 1))
        if self.dice.strikes("gone"):
            super().remove(path)

    def _flip(self, path: str, size: int) -> None:
        with open(path, "r+b", buffering=0) as file:
            at = self.dice.between(0, size - 1)
            byte = bytearray(os.pread(file.fileno(), 1, at))
            self.dice.flip(byte)
            os.pwrite(file.fileno(), byte, at)

    def remove(self, path: str) -> None:
        self._trouble("remove_error")
        super().remove(path)


class FaultyFs(FsTier):
    """A file tier on a bad disk."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        ours, inner = split(options)
        dice = Dice(int(ours.get("disk_seed", "0")), rates_of(ours.get("disk_rates", ""), FAULTS),
                    ours.get("disk_log", ""))  # fmt: skip
        quiet = Dice(0, {})

        def device(paths: Paths, found: FsOptions) -> Device:
            self._bad = FaultyDevice(paths, found.odirect, found.fsync == "file")
            self._bad.dice = quiet
            return self._bad

        super().__init__(name, inner, device=device)
        self._bad.dice = dice  # it starts on a good day

    def close(self) -> None:
        self._bad.dice = Dice(0, {})
        super().close()
