"""System calls that fail on demand: every call that touches a folder is counted, and one of them goes wrong.

    with Calls((folder,)) as calls: ...                         counts
    with Calls((folder,), Fault("link", 2, "EIO")) as calls: ... the third `link` fails

What a call touches is told by its path, or by a descriptor that was opened by such a path. LMDB's own calls are made
in C and are not seen here; its transactions are counted in their place (`Manifest`).
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lmdb

from forebay.tiers.fs.manifest import Manifest

Kind = Literal["EIO", "ENOSPC", "hang", "short", "wrong", "reset"]
KINDS: tuple[Kind, ...] = ("EIO", "ENOSPC", "hang", "short", "wrong", "reset")
BY_PATH = (
    "open", "link", "rename", "replace", "unlink", "mkdir", "makedirs", "stat", "lstat", "scandir", "listdir", "rmdir",
    "statvfs",
)  # fmt: skip
BY_DESCRIPTOR = (
    "pread", "preadv", "pwrite", "pwritev", "ftruncate", "fdatasync", "fsync", "fstat", "posix_fallocate",
)  # fmt: skip
OF_MANIFEST = (
    "get", "count", "totals", "begin_write", "end_write", "unfinished", "commit", "touch", "drop", "leave",
    "leave_coldest", "leave_scope", "list_leaving", "bury",
)  # fmt: skip
READS, WRITES = ("pread", "preadv"), ("pwrite", "pwritev")
HANG_S_MAX = 20.0


@dataclass(frozen=True)
class Fault:
    """What happens at which call: the one of this name with this number among them, counted from 0.

    Threads take turns as they like, so a number among all calls would name another one in the next run.
    """

    name: str
    number: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.name}:{self.number}:{self.kind}"


@dataclass
class Calls:
    """See the module's text. `names` are the calls by name; `hit` tells whether the fault was met."""

    folders: tuple[Path, ...]
    fault: Fault | None = None
    on_reset: Callable[[], None] = lambda: None
    names: Counter[str] = field(default_factory=Counter)
    hit: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._tracked: set[int] = set()
        self._undo: list[tuple[object, str, Any]] = []
        self._roots = tuple(str(folder) for folder in self.folders)
        self._let_go = threading.Event()
        self._active = True

    def __enter__(self) -> Calls:
        for name in BY_PATH:
            self._wrap(os, name, self._is_ours)
        for name in BY_DESCRIPTOR:
            self._wrap(os, name, lambda arguments: arguments[0] in self._tracked)
        self._wrap(io, "open", self._is_ours)
        self._wrap(mmap, "mmap", lambda arguments: arguments[0] in self._tracked)
        for name in OF_MANIFEST:
            self._wrap(Manifest, name, lambda arguments: str(arguments[0].path).startswith(self._roots))
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
        for owner, name, real in reversed(self._undo):
            setattr(owner, name, real)

    def release(self) -> None:
        """Let go of a call that hangs; it ends with an error."""
        self._let_go.set()

    def stop(self) -> None:
        """From now on nothing is counted and nothing fails."""
        self._active = False
        self.release()

    def _is_ours(self, arguments: tuple[Any, ...]) -> bool:
        return any(
            isinstance(argument, (str, os.PathLike)) and os.fspath(argument).startswith(self._roots)
            for argument in arguments[:2]
        )

    def _wrap(self, owner: Any, name: str, ours: Callable[[tuple[Any, ...]], bool]) -> None:
        real = getattr(owner, name)
        self._undo.append((owner, name, real))

        def call(*arguments: Any, **named: Any) -> Any:
            if not self._active or not ours(arguments):
                return real(*arguments, **named)
            kind = self._count(name)
            result = real(*arguments, **named) if kind is None else self._fail(kind, name, real, arguments, named)
            if name == "open" and isinstance(result, int):
                self._tracked.add(result)
            return result

        setattr(owner, name, call)

    def _count(self, name: str) -> Kind | None:
        with self._lock:
            number = self.names[name]
            self.names[name] += 1
            if self.fault is None or (name, number) != (self.fault.name, self.fault.number):
                return None
            self.hit = True
            return self.fault.kind

    def _fail(
        self, kind: Kind, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        if kind == "reset":
            self.on_reset()
            return real(*arguments, **named)
        if kind == "hang" and threading.current_thread() is not threading.main_thread():
            self._let_go.wait(HANG_S_MAX)
            raise self._error(name, "EIO")
        if kind in ("short", "wrong") and name in READS + WRITES:
            return self._spoil(kind, name, real, arguments)
        return self._raise(name, kind)

    def _raise(self, name: str, kind: Kind) -> Any:
        raise self._error(name, kind)

    @staticmethod
    def _error(name: str, kind: Kind) -> Exception:
        if name in OF_MANIFEST:
            return lmdb.MapFullError("injected") if kind == "ENOSPC" else lmdb.DiskError("injected")
        number = errno.ENOSPC if kind == "ENOSPC" else errno.EIO
        return OSError(number, os.strerror(number))

    @staticmethod
    def _spoil(kind: Kind, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """A read or write that is cut short, or one whose bytes come out otherwise than they are."""
        descriptor, what, at = arguments
        if name == "pread":
            data = real(descriptor, what, at)
            return data[: len(data) // 2] if kind == "short" else _flipped(data)
        if name == "pwrite":
            return real(descriptor, what[: len(what) // 2] if kind == "short" else _flipped(what), at)
        parts = [memoryview(part) for part in what]
        if kind == "short":
            return real(descriptor, [parts[0][: max(1, len(parts[0]) // 8192 * 4096)]], at)
        if name == "preadv":
            got = real(descriptor, parts, at)
            largest = max(parts, key=len)
            largest[len(largest) // 2] ^= 0x10
            return got
        largest = max(range(len(parts)), key=lambda index: len(parts[index]))
        copy = mmap.mmap(-1, len(parts[largest]))  # O_DIRECT wants a page's boundary
        copy[:] = _flipped(bytes(parts[largest]))
        return real(descriptor, [*parts[:largest], memoryview(copy), *parts[largest + 1 :]], at)


def _flipped(data: bytes) -> bytes:
    if not data:
        return data
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x10]) + data[len(data) // 2 + 1 :]
