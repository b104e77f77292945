"""Fingerprints of LoRA adapters: what is in their files, whatever they are called and wherever they lie.

An engine reads an adapter once and may hold it for long; its files may be written anew meanwhile. So what was found for
an engine's adapter at first must be found each time: else nobody knows which of them computes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path

_DOMAIN = b"forebay/adapter/1\0"
_STEP = 16 << 20
FILES_MAX = 64
CACHED_MAX = 1024
CHANGED = b""
"""Instead of a fingerprint: there have been several."""

_SUFFIXES = (".safetensors", ".bin", ".pt", ".json")
Identity = tuple[tuple[str, int, int, int, int], ...]


class Adapters:
    """Fingerprints, each computed once for as long as the files stay what they are. Not thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[Identity, bytes] = OrderedDict()
        self._first: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of_engine(self, number: int, folder: Path) -> bytes:
        """The fingerprint of what the engine knows as its adapter `number`. Raises as `fingerprint`, and ValueError
        from then on that it isn't what it was at first."""
        found = self.fingerprint(folder)
        if self._first.setdefault(number, found) != found:
            self._first[number] = CHANGED
        self._first.move_to_end(number)
        while len(self._first) > CACHED_MAX:
            self._first.popitem(last=False)
        if self._first[number] == CHANGED:
            raise ValueError(f"{folder} isn't what it was when the engine read it: load it under another name")
        return found

    def fingerprint(self, folder: Path) -> bytes:
        """32 bytes for the adapter in `folder`. Blocks on the disk for what is new. Raises OSError or ValueError."""
        files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
        if not files or len(files) > FILES_MAX:
            raise ValueError(f"{folder} holds {len(files)} files of an adapter, expected 1 to {FILES_MAX}")
        identity = _identity(files)
        found = self._known.get(identity)
        if found is None:
            found = _read(files)
            if _identity(files) != identity:
                raise ValueError(f"{folder} is being written")
            self._known[identity] = found
            while len(self._known) > CACHED_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(identity)
        return found


def _identity(files: list[Path]) -> Identity:
    stats = [(path.name, path.stat()) for path in files]
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)


def _read(files: list[Path]) -> bytes:
    digest = hashlib.sha256(_DOMAIN)
    for path in files:
        with path.open("rb") as file:
            inner = hashlib.sha256()
            while part := file.read(_STEP):
                inner.update(part)
        digest.update(path.suffix.encode() + b"\0" + inner.digest())
    return digest.digest()
