"""May the manifest be trusted? A small file beside it tells how the last process left it.

Not after another boot (commits don't reach the disk, so a power cut may leave anything), not for another
directory, and not when it has killed its process several times in a row.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

CRASHES_MAX = 3
_VERSION = 4
_MARKER_BYTES = 512


class _Marker(msgspec.Struct, frozen=True):
    directory: str
    boot: str
    clean: bool
    crashes: int
    version: int = _VERSION


def directory_of(path: Path) -> str:
    """The id of the directory that the manifest in this state directory belongs to; empty if there is none."""
    try:
        return msgspec.json.decode((path / "marker.json").read_bytes(), type=_Marker).directory
    except (FileNotFoundError, msgspec.DecodeError):
        return ""


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass
class State:
    """The state directory of a file tier; `directory` is the random id of the chunks' directory."""

    path: Path
    directory: str
    crashes: int = 0

    @property
    def manifest(self) -> Path:
        return self.path / "manifest"

    def open(self, *, rebuild: bool) -> str | None:
        """Note that a process is using the manifest. Returns why it was thrown away, None if it is kept."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = "asked for" if rebuild else self._distrust()
        if why is not None:
            self.discard()
        self.manifest.mkdir(mode=0o700, exist_ok=True)
        self._write(clean=False)
        return why

    def _distrust(self) -> str | None:
        try:
            marker = msgspec.json.decode(self._file.read_bytes(), type=_Marker)
        except FileNotFoundError:
            return "there is none"
        except msgspec.DecodeError:
            return "its marker can't be read"
        self.crashes = 0 if marker.clean else marker.crashes + 1
        if marker.version != _VERSION:
            return "it has another version"
        if marker.directory != self.directory:
            return "it belongs to another directory"
        if not marker.clean and marker.boot != _boot_id():
            return "the machine went down while it was in use"
        if self.crashes >= CRASHES_MAX:
            self.crashes = 0
            return f"its process died {CRASHES_MAX} times in a row"
        return None

    def discard(self) -> None:
        """Remove the manifest, and what is known of other stores' chunks."""
        shutil.rmtree(self.manifest, ignore_errors=True)
        shutil.rmtree(self.path / "others", ignore_errors=True)

    def healthy(self) -> None:
        """The process has run well for a while."""
        if self.crashes:
            self.crashes = 0
            self._write(clean=False)

    def distrust(self) -> None:
        """The manifest is broken: the next process shall build it anew."""
        self.crashes = CRASHES_MAX
        self._write(clean=False)

    def close(self) -> None:
        """The manifest has been flushed and closed."""
        self._write(clean=True)

    @property
    def _file(self) -> Path:
        return self.path / "marker.json"

    def _write(self, *, clean: bool) -> None:
        # In place and of one size: a disk that has filled up since takes it all the same. Torn, it is no JSON.
        data = msgspec.json.encode(_Marker(self.directory, _boot_id(), clean, self.crashes)).ljust(_MARKER_BYTES)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)
