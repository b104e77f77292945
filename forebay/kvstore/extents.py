"""The pool's memory: files in a private directory on tmpfs, which outlive the daemon.

    DIR/forebay-<uid>-<name>/        mode 0700
      lock                           flock of the living daemon, and the formats that the rest is in
      extent-000000 ...              posix_fallocate'd before anyone gets them, else a full tmpfs kills writers
      clients/<id>                   one flock a client or tier process: held means that it may still write
      namespaces/<id>                canonical encodings, so that re-adopted chunks know what they are
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import xxhash

from forebay.errors import AlreadyRunning, NoSpace, NotWritable, OtherVersion
from forebay.kvstore import formats
from forebay.kvstore.entry import SlotRef
from forebay.kvstore.header import ChunkHeader, SlotState, decode_header, mark_slot
from forebay.kvstore.identity import encoded_namespace_id
from forebay.kvstore.slots import EXTENT_HEADER_BYTES

log = logging.getLogger(__name__)

_EXTENT = struct.Struct("<8sQQI")
_EXTENT_MAGIC = b"FBEXTNT1"
_COUNT = struct.Struct("<Q")
_RETIRED_AT = 64
REMEDY = (
    "start that version on this socket and stop it there, remove the pool with `forebay fsck --pools --repair`, "
    "or choose another --socket or --pool-dir"
)


def pool_path(pool_dir: Path, socket: Path) -> Path:
    """Where the pool of the store on this socket lives: the same after every restart."""
    name = hashlib.sha256(os.fsencode(socket.absolute())).hexdigest()[:12]
    return pool_dir / f"forebay-{os.getuid()}-{name}"


@dataclass
class PoolFiles:
    """The pool's directory and its mapped extents. Implements `PoolMemory` for the core."""

    path: Path
    extent_bytes: int
    maps: dict[int, mmap.mmap] = field(default_factory=dict)
    views: dict[int, memoryview] = field(default_factory=dict)
    descriptors: dict[int, int] = field(default_factory=dict)
    _lock: int = -1

    def open(self) -> None:
        """Create or take over the directory. Raises AlreadyRunning, NotWritable, OtherVersion."""
        try:
            for folder in (self.path, self.path / "clients", self.path / "namespaces"):
                folder.mkdir(mode=0o700, exist_ok=True)
            info = self.path.lstat()
            if info.st_uid != os.getuid() or not self.path.is_dir() or self.path.is_symlink():
                raise NotWritable(f"{self.path} belongs to somebody else; remove it or choose another --pool-dir")
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NotWritable(
                f"can't use {self.path} for the pool: {error.strerror}; choose another --pool-dir"
            ) from error
        if not try_lock(self._lock):
            os.close(self._lock)
            self._lock = -1
            raise AlreadyRunning(f"another store owns the pool {self.path}; stop it first, or use another --socket")
        self._check_formats()

    def _check_formats(self) -> None:
        found = formats.read_line(self._lock)
        if found not in ("", formats.format_line("pool")):
            self.refuse(found)
        for file in self.path.glob("extent-*"):
            with open(file, "rb") as extent:
                magic = extent.read(len(_EXTENT_MAGIC))
            if magic[:-1] == _EXTENT_MAGIC[:-1] and magic != _EXTENT_MAGIC:
                self.refuse(f"extents {magic.decode('ascii', 'replace')}")
        formats.write_line(self._lock, "pool")

    def refuse(self, found: str) -> NoReturn:
        """The pool is another version's: raises OtherVersion. `found` says what shows it."""
        raise OtherVersion(formats.refusal(f"the pool {self.path}", found, "pool", REMEDY))

    @property
    def locked(self) -> bool:
        """Is the directory ours?"""
        return self._lock >= 0

    def existing(self) -> list[int]:
        """Ids of extents that an earlier daemon left, of the right size; others are removed."""
        found = []
        for file in sorted(self.path.glob("extent-*")):
            if file.stat().st_size == self.extent_bytes and file.name[7:].isdigit():
                found.append(int(file.name[7:]))
            else:
                log.warning("%s is removed: extents have %d bytes now", file, self.extent_bytes)
                file.unlink()
        return found

    def create(self, extent: int) -> None:
        """A new extent, with all its memory granted. May block (1.4 GB/s). Raises NoSpace."""
        file = self._file(extent)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.extent_bytes)
        except OSError as error:
            os.close(descriptor)
            file.unlink()
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise NoSpace(
                    f"{self.path.parent} has no room for another {self.extent_bytes >> 20} MiB of pool; "
                    "lower --memory, enlarge that tmpfs, or choose another --pool-dir"
                ) from error
            raise
        self.descriptors[extent] = descriptor

    def map(self, extent: int) -> memoryview:
        """Map an extent that was created or left; returns its bytes."""
        if extent not in self.descriptors:
            self.descriptors[extent] = os.open(self._file(extent), os.O_RDWR | os.O_CLOEXEC)
        mapped = mmap.mmap(self.descriptors[extent], self.extent_bytes)
        mapped.madvise(mmap.MADV_DONTDUMP)
        self.maps[extent], self.views[extent] = mapped, memoryview(mapped)
        return self.views[extent]

    def discard(self, extent: int) -> None:
        """Remove an extent that nobody uses any more."""
        if extent in self.descriptors:
            os.close(self.descriptors.pop(extent))
        self._file(extent).unlink(missing_ok=True)

    def cut_of(self, extent: int) -> int:
        """Slot size that the extent's header records; 0 if it records none."""
        view = self.views[extent]
        magic, size, slot_bytes, digest = _EXTENT.unpack_from(view)
        if magic != _EXTENT_MAGIC or size != self.extent_bytes or digest != _digest(size, slot_bytes):
            return 0
        return int(slot_bytes) if EXTENT_HEADER_BYTES + slot_bytes <= size else 0

    def cut(self, extent: int, slot_bytes: int) -> None:
        """Record an extent's slot size, and that every slot of it is free."""
        view = self.views[extent]
        # Header void first: a crash between the two must not leave old marks under a new cut.
        view[: len(_EXTENT_MAGIC)] = bytes(len(_EXTENT_MAGIC))
        for offset in range(EXTENT_HEADER_BYTES, self.extent_bytes - slot_bytes + 1, slot_bytes):
            mark_slot(view[offset : offset + 64], SlotState.FREE, 0)
        _EXTENT.pack_into(
            view, 0, _EXTENT_MAGIC, self.extent_bytes, slot_bytes, _digest(self.extent_bytes, slot_bytes)
        )

    def write_header(self, slot: SlotRef, block: bytes) -> None:
        """Write a whole header block at the slot's front."""
        self.views[slot.extent][slot.offset : slot.offset + len(block)] = block

    def read_header(self, slot: SlotRef) -> ChunkHeader:
        """The header in this slot, verified. Raises CorruptChunk."""
        return decode_header(self.views[slot.extent][slot.offset :])

    def mark(self, slot: SlotRef, state: SlotState, generation: int) -> None:
        """Change state and generation of the slot."""
        view = self.views[slot.extent]
        if state is SlotState.RETIRED:  # counted first: what is gone after a crash was counted
            _COUNT.pack_into(view, _RETIRED_AT, _COUNT.unpack_from(view, _RETIRED_AT)[0] + 1)
        mark_slot(view[slot.offset : slot.offset + 64], state, generation)

    def retired(self) -> int:
        """How many chunks were ever taken out of this pool's extents, by this boot and earlier ones."""
        return sum(int(_COUNT.unpack_from(view, _RETIRED_AT)[0]) for view in self.views.values())

    def save_namespace(self, namespace_id: bytes, encoded: bytes) -> None:
        """Remember a namespace for re-adoption."""
        file = self.path / "namespaces" / namespace_id.hex()
        if not file.exists():
            partial = file.with_suffix(".part")
            partial.write_bytes(encoded)
            partial.rename(file)

    def forget_namespace(self, namespace_id: bytes) -> None:
        """Nothing of this namespace is in the pool any more."""
        (self.path / "namespaces" / namespace_id.hex()).unlink(missing_ok=True)

    def saved_namespaces(self) -> list[bytes]:
        """Encodings of all remembered namespaces, as they were written. Damaged ones are left out."""
        found = []
        for file in (self.path / "namespaces").iterdir():
            encoded = b"" if file.suffix else file.read_bytes()
            if encoded_namespace_id(encoded).hex() == file.name:
                found.append(encoded)
            elif not file.suffix:
                log.warning("%s is damaged: its chunks can't be read", file)
        return found

    def close(self, *, remove: bool) -> None:
        """Let go of everything; with `remove` leave nothing behind."""
        for view in self.views.values():
            view.release()
        for mapped in self.maps.values():
            mapped.close()
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        for table in (self.views, self.maps, self.descriptors):
            table.clear()
        if remove:
            self._remove()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove(self) -> None:
        for _ in range(2):  # a moment's error must not leave gigabytes of memory behind
            with suppress(OSError):
                shutil.rmtree(self.path)
        if os.path.lexists(self.path):  # says no where it can't be told, which is no reason to fail a stop
            log.error("%s can't be removed: do it by hand, or with `forebay fsck --pools --repair`", self.path)

    def _file(self, extent: int) -> Path:
        return self.path / f"extent-{extent:06d}"


def _digest(size: int, slot_bytes: int) -> int:
    return xxhash.xxh32_intdigest(struct.pack("<QQ", size, slot_bytes))


def try_lock(descriptor: int) -> bool:
    """Take an exclusive flock without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


@dataclass(frozen=True)
class ClientLocks:
    """One lock file a writer. The flock lives with the open file that the writer was handed: it ends when
    the last copy of that descriptor is closed, at the latest by the kernel when the process dies."""

    folder: Path

    def create(self, client: bytes) -> int:
        """A locked descriptor to hand to the client; the caller closes its own copy."""
        descriptor = os.open(self._file(client), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(descriptor):
            os.close(descriptor)
            raise AlreadyRunning(f"client {client.hex()} is connected already")
        return descriptor

    def alive(self, client: bytes) -> bool:
        """May the client's process still be writing? Unknown clients may not, nor may nobody: a slot whose commit
        was cut short by a crash names no writer any more."""
        if not client:
            return False
        try:
            descriptor = os.open(self._file(client), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:  # no descriptor to be had, say: ask again later, and free nothing until then
            log.warning("whether client %s lives can't be told now: %s", client.hex(), error.strerror)
            return True
        try:
            return not try_lock(descriptor)
        finally:
            os.close(descriptor)

    def join_party(self, party: bytes, client: bytes) -> None:
        """`client` may write into slots that are reserved in the party's name. Says so on disk, before it can."""
        members = [member for member in self._members(party) if member != client and self.alive(member)]
        file = self._file(party)
        new = file.with_suffix(".new")
        new.write_bytes(b"".join([*members, client]))
        new.replace(file)

    def writers_of(self, owner: bytes) -> list[bytes]:
        """The living processes that may write into a slot of this owner: a client, or the members of a party."""
        return [client for client in (owner, *self._members(owner)) if self.alive(client)]

    def _members(self, party: bytes) -> list[bytes]:
        """Empty for a client, whose file is only locked."""
        if not party:
            return []
        try:
            data = self._file(party).read_bytes()
        except FileNotFoundError:
            return []
        return [data[at : at + len(party)] for at in range(0, len(data), len(party))]

    def forget(self, client: bytes) -> None:
        """The client is gone and nothing waits for it."""
        try:
            self._file(client).unlink(missing_ok=True)
        except OSError as error:  # the next start removes it
            log.warning("the lock of client %s stays: %s", client.hex(), error.strerror)

    def known(self) -> list[bytes]:
        """Ids of all clients that have a lock file."""
        return [bytes.fromhex(file.name) for file in self.folder.iterdir() if len(file.name) == 32]

    def _file(self, client: bytes) -> Path:
        return self.folder / client.hex()
