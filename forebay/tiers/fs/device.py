"""Reading and writing chunk files: one call an operation, O_DIRECT where it works.

A file is written under no name (O_TMPFILE) or a private one in `tmp/`, and appears under its own in one step,
so whatever has a chunk's name is whole, unless the machine lost power or the disk lies. What that leaves is
found by checksums.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.errors import CorruptChunk
from forebay.kvstore.layout import ALIGNMENT, round_down, round_up
from forebay.tiers.codec.codec import Codec
from forebay.tiers.fs.paths import Paths

DIRECT_BYTES_MIN = 64 << 10
"""Below this the page cache is faster and holds little."""
IOV_BYTES_MAX = 1 << 30
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def reason_of(error: OSError) -> str:
    """A job's failure reason for what the system said."""
    if error.errno in _FULL:
        return "full"
    # A file that another machine removes from under an open descriptor is a stale handle on a network mount.
    return "missing" if error.errno in (errno.ENOENT, errno.ESTALE) else "io"


def disk_bytes(status: os.stat_result) -> int:
    """What a file really takes."""
    return status.st_blocks * 512


class AlignedBuffer:
    """Private memory at a page boundary, which O_DIRECT wants. It grows and is used by one thread."""

    def __init__(self, size: int = 4 * ALIGNMENT) -> None:
        self._map = mmap.mmap(-1, size)

    def view(self, size: int) -> memoryview:
        """The first `size` bytes; valid until the next call."""
        if size > len(self._map):
            self._map = mmap.mmap(-1, round_up(size, ALIGNMENT))
        return memoryview(self._map)[:size]


@dataclass(slots=True)
class TempFile:
    """A written file that nobody sees yet. `name` is its path in `tmp/`, or empty if it has none."""

    descriptor: int
    name: str
    disk: int = 0
    inode: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """What the manifest says of a chunk and its file: `sealed` is what a codec's file has, 0 for a plain one."""

    header: int
    length: int
    sealed: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a read brought: the header block, and how many bytes of payload lie in the destination."""

    block: bytes
    payload_length: int


class Device:
    """The files of one directory; `codec` is how chunks lie in them, as far as they aren't plain. Methods block and may
    be called from any thread; `OSError`s pass through.

    Tests inject a subclass whose operations fail.
    """

    def __init__(self, paths: Paths, odirect: Literal["auto", "on", "off"], fsync: bool) -> None:
        self.paths = paths
        self.codec = Codec()
        self.direct = odirect != "off"
        self._direct_min = 1 if odirect == "on" else DIRECT_BYTES_MIN
        self._fsync = fsync
        self._synced: set[str] = set()  # folders; there are a few hundred at most
        self.nameless = True
        self.fenced = False
        """With other stores around, a missing `chunks` folder says that ours has been taken over."""
        self._serial = itertools.count()
        self.counts: Counter[str] = Counter()

    # --- writing ---------------------------------------------------------------------------------------

    def write(
        self, path: str, block: bytes, payload: memoryview, buffer: AlignedBuffer, *, aligned: bool
    ) -> TempFile:
        """A file of header block and payload that nobody sees yet; the caller publishes it as `path`, or
        discards it.

        `aligned`: `payload` begins at a page boundary. Nothing is left behind when this raises.
        """
        length = len(block) + len(payload)
        direct = self.direct and aligned and length >= self._direct_min
        temp = self._create(os.path.dirname(path), os.O_DIRECT if direct else 0)
        try:
            if direct:
                self._write_direct(temp.descriptor, block, payload, buffer)
            else:
                self.write_all(temp.descriptor, [memoryview(block), payload], 0)
            if self._fsync:
                os.fdatasync(temp.descriptor)
            status = os.fstat(temp.descriptor)
            if status.st_size != length:
                raise OSError(errno.EIO, f"file has {status.st_size} bytes after writing {length}")
            temp.disk, temp.inode = disk_bytes(status), status.st_ino
        except BaseException:
            self.discard(temp)
            raise
        return temp

    def _create(self, folder: str, flags: int) -> TempFile:
        flags |= os.O_WRONLY | os.O_CLOEXEC
        try:
            return self._create_as(folder, flags)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            return self._create(folder, self._without_direct(flags))

    def _create_as(self, folder: str, flags: int) -> TempFile:
        if self.nameless:
            # In the folder of the final name: file systems put a file where its folder is, and finding room
            # for all of them near one folder takes ext4 twice as long.
            try:
                return TempFile(os.open(folder, os.O_TMPFILE | flags, 0o600), "")
            except FileNotFoundError:
                self._make_folder(folder)
                return TempFile(os.open(folder, os.O_TMPFILE | flags, 0o600), "")
            except OSError as error:
                if error.errno not in _NO_NAMELESS:
                    raise
                self.nameless = False
        name = str(self.paths.tmp / f"{os.getpid()}-{next(self._serial)}")
        return TempFile(os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags, 0o600), name)

    def _without_direct(self, flags: int) -> int:
        """The file system doesn't open files this way at all: don't try again."""
        self.direct = False
        self.counts["odirect_refused"] += 1
        return flags & ~os.O_DIRECT

    def _write_direct(self, descriptor: int, block: bytes, payload: memoryview, buffer: AlignedBuffer) -> None:
        whole = round_down(len(payload), ALIGNMENT)
        rest = len(payload) - whole
        private = buffer.view(len(block) + (ALIGNMENT if rest else 0))
        private[: len(block)] = block
        parts = [private[: len(block)], payload[:whole]]
        if rest:
            # The last page goes through private memory, zeros behind the payload: what another chunk left
            # in the slot doesn't belong in this one's file.
            tail = private[len(block) :]
            tail[:rest] = payload[whole:]
            tail[rest:] = bytes(ALIGNMENT - rest)
            parts.append(tail)
        try:
            self.write_all(descriptor, parts, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._leave_direct(descriptor)
            self.write_all(descriptor, parts, 0)
        if rest:
            os.ftruncate(descriptor, len(block) + len(payload))

    def _leave_direct(self, descriptor: int) -> None:
        self.counts["odirect_fallbacks"] += 1
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)

    def write_all(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        """Write all of `parts` from `offset` on."""
        left = [part for part in parts if len(part)]
        while left:
            done = os.pwritev(descriptor, left, offset)
            if done == 0:
                raise OSError(errno.EIO, "a write took nothing")
            offset += done
            left = _after(left, done)

    def publish(self, temp: TempFile, path: str) -> None:
        """Give a written file its name, in place of whatever has it, and close it. Raises OSError; then the
        file is still the caller's to discard."""
        try:
            self._name(temp, path)
        except FileNotFoundError:
            self._make_folder(os.path.dirname(path))
            self._name(temp, path)
        if self._fsync:
            try:
                self._sync_folder(os.path.dirname(path))
            except OSError:
                self.remove(path)  # the caller still has the file, and nobody else shall
                raise
        self._close(temp)

    def _sync_folder(self, folder: str) -> None:
        """Have the names in a folder on the disk; the first time its own name, too."""
        folders = [folder]
        if folder not in self._synced:
            folders += [os.path.dirname(folder), str(self.paths.chunks)]
        for synced in folders:
            descriptor = os.open(synced, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._synced.add(folder)

    def _make_folder(self, folder: str) -> None:
        if not self.fenced:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            return
        for made in (os.path.dirname(folder), folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(made, 0o700)

    def rename(self, source: str, path: str) -> None:
        """Give a file of another seat the name that it has here."""
        try:
            os.rename(source, path)
        except FileNotFoundError:
            self._make_folder(os.path.dirname(path))
            os.rename(source, path)

    def _name(self, temp: TempFile, path: str) -> None:
        if not temp.name:
            target = f"/proc/self/fd/{temp.descriptor}"
            try:
                # With a directory descriptor given, Python calls linkat, which alone follows /proc's link.
                os.link(target, path, src_dir_fd=temp.descriptor, follow_symlinks=True)
                return
            except FileExistsError:
                temp.name = str(self.paths.tmp / f"{os.getpid()}-{next(self._serial)}")
                os.link(target, temp.name, src_dir_fd=temp.descriptor, follow_symlinks=True)
        os.rename(temp.name, path)
        temp.name = ""

    def discard(self, temp: TempFile) -> None:
        """Close and remove a file that won't be published."""
        self._close(temp)
        if temp.name:
            os.unlink(temp.name)
            temp.name = ""

    def _close(self, temp: TempFile) -> None:
        if temp.descriptor >= 0:
            os.close(temp.descriptor)
            temp.descriptor = -1

    def remove(self, path: str) -> None:
        """Unlink a file; none there is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    # --- reading ---------------------------------------------------------------------------------------

    def open(self, path: str, *, direct: bool = False) -> int:
        """A descriptor to read from. Follows no symlink; what is no regular file raises CorruptChunk."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptChunk("a symbolic link is no chunk") from error
            if error.errno != errno.EINVAL or not direct:
                raise
            self._without_direct(flags)
            return self.open(path)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CorruptChunk("not a regular file")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def wants_direct(self, length: int, *, aligned: bool) -> bool:
        """Should a file of this length be read with O_DIRECT?"""
        return self.direct and aligned and length >= self._direct_min

    def read(
        self, descriptor: int, expected: Expected, payload: memoryview, buffer: AlignedBuffer, *, direct: bool
    ) -> Loaded:
        """Read a whole file: its header into private memory, its payload into the front of `payload`.

        Raises CorruptChunk if it is shorter or longer than expected. What `payload` has behind the chunk's bytes
        is left alone.
        """
        size = os.fstat(descriptor).st_size
        if size != expected.length:
            raise CorruptChunk(f"file of {size} bytes, expected {expected.length}")
        length = expected.length - expected.header
        whole = round_down(length, ALIGNMENT) if direct else length
        rest = length - whole
        private = buffer.view(expected.header + (ALIGNMENT if rest else 0))
        parts = [private[: expected.header], payload[:whole], private[expected.header :]]
        try:
            got = self.read_all(descriptor, parts, 0)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            self._leave_direct(descriptor)
            got = self.read_all(descriptor, parts, 0)
        if got != expected.length:
            raise CorruptChunk(f"read {got} of {expected.length} bytes")
        if rest:
            payload[whole:length] = private[expected.header : expected.header + rest]
        return Loaded(bytes(private[: expected.header]), length)

    def read_whole(self, descriptor: int, length: int, buffer: AlignedBuffer, *, direct: bool) -> memoryview:
        """A whole file in private memory, valid until the buffer's next use. Raises CorruptChunk if it isn't as long
        as expected."""
        size = os.fstat(descriptor).st_size
        if size != length:
            raise CorruptChunk(f"file of {size} bytes, expected {length}")
        memory = buffer.view(round_up(length, ALIGNMENT))
        try:
            got = self.read_all(descriptor, [memory], 0)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            self._leave_direct(descriptor)
            got = self.read_all(descriptor, [memory], 0)
        if got != length:
            raise CorruptChunk(f"read {got} of {length} bytes")
        return memory[:length]

    def read_all(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        """Fill `parts` from `offset` on, up to the file's end; returns how many bytes came."""
        left = [part for part in parts if len(part)]
        total = 0
        while left:
            got = os.preadv(descriptor, left, offset + total)
            total += got
            left = _after(left, got)
            if got == 0 or (left and total % ALIGNMENT):
                break  # the end: only the last read of a file stops off a page
        return total

    def read_front(self, descriptor: int, size: int) -> bytes:
        """The first `size` bytes of a file, fewer if it is shorter."""
        return os.pread(descriptor, size, 0)


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `parts` after `done` bytes."""
    for index, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[index + 1 :]]
        done -= len(part)
    return []
