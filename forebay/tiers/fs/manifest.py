"""What the directory holds, in LMDB: an index that can be thrown away, since the files are the truth.

    chunks    key+group          -> Record
    children  parent+group       -> first unit's key (its front) + key          (several a parent)
    order     class, stamp       -> key+group      class 0 is cold; the first entry is evicted first
    leaving   key+group          -> bytes, reason  removed from sight, file still to be unlinked
    writing   key+group          -> bytes          a file that may exist without a Record after a crash
    totals    ""                 -> bytes on disk of chunks and of leaving

Commits don't reach the disk (`sync=False`): a killed process loses nothing, and after a power cut the
manifest isn't trusted (see `state`). LMDB takes one writer at a time; every write here is a short transaction.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from forebay.kvstore.identity import KEY_BYTES, chain
from forebay.tiers.base import ChunkId, ClearScope
from forebay.tiers.chunks import UNIT_BYTES

_RECORD = struct.Struct("<32s32s8s8sQIIQQQQB")
_NAMESPACE = slice(32, 64)
_TENANT = slice(72, 80)
_START_AT = 80
_DISK_AT = _START_AT + 8 + 4 + 4 + 8
_TAIL = struct.Struct("<QB")
_ORDER = struct.Struct(">BQ")
_COLD, _UNREADABLE = 1, 2
_U64 = struct.Struct("<Q")
UNIT_DIGEST_BYTES = 8
_FIRST_STAMP = 1 << 40
_TOTALS = struct.Struct("<qq")
_TOTALS_KEY = b"totals"
_BYTES_PER_CHUNK = 1024
BROKEN = (
    lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError,
    lmdb.PanicError, lmdb.BadTxnError, lmdb.BadDbiError, lmdb.BadValsizeError, lmdb.IncompatibleError,
)  # fmt: skip
"""What can't be helped but by building the manifest anew. Anything else (a full disk, say) may pass."""

UNKNOWN = bytes(32)
"""Namespace of a chunk that can't be decoded here and that nobody has told of."""
PAGE_CHUNKS = 256
"""Chunks that a clear takes out of sight in one step: some 10 ms."""


@dataclass(frozen=True, slots=True)
class Record:
    """One stored chunk. `unit` is `first_unit` of its tokens, `header` and `length` are the chunk's, `disk` is
    what its file takes; `stamp` orders by use and is the manifest's to give. `tenant` is `tenant_digest` of whose it
    is. `sealed`: the file is a codec's and has so many bytes; 0 for a plain one, which has `length`. `unreadable`: it
    can't be decoded here (another key), so it is kept, counted and evicted, but never found."""

    parent: bytes
    namespace: bytes
    unit: bytes
    start: int
    tokens: int
    header: int
    length: int
    disk: int
    stamp: int = 0
    cold: bool = False
    tenant: bytes = bytes(8)
    sealed: int = 0
    unreadable: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """A chunk that is out of sight and waits for its file to be unlinked."""

    chunk: ChunkId
    reason: str
    disk: int


@dataclass(slots=True)
class _Change:
    """What a transaction has added to the totals so far."""

    stored: int = 0
    leaving: int = 0


@dataclass(frozen=True, slots=True)
class Replaced:
    """Bytes that a commit took off the accounts because the same name had them."""

    stored: int
    leaving: int


def first_unit(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
    """What children of one parent are told apart by: the front of the chain's key after their first unit."""
    return chain(parent, tokens[:UNIT_BYTES], extra)[0][:UNIT_DIGEST_BYTES]


def tenant_digest(tenant: str) -> bytes:
    """What a record has of a tenant's name."""
    return hashlib.sha256(tenant.encode()).digest()[:8]


def _data(value: bytes | memoryview | None) -> bytes:
    """What a transaction without `buffers` returned for something that is there."""
    if not isinstance(value, bytes):
        raise lmdb.CorruptedError("one table names an entry that another one doesn't have")
    return value


def _fields(layout: struct.Struct, data: bytes | memoryview, at: int = 0) -> tuple[Any, ...]:
    """What is packed in an entry. Raises lmdb.CorruptedError for one that can't be ours."""
    try:
        return layout.unpack_from(data, at)
    except struct.error as error:
        raise lmdb.CorruptedError(f"an entry is no entry: {error}") from error


def _pack(chunk: ChunkId) -> bytes:
    return chunk.key + chunk.group.to_bytes(1, "little")


def _unpack(data: bytes) -> ChunkId:
    if len(data) != KEY_BYTES + 1:
        raise lmdb.CorruptedError(f"a name has {len(data)} bytes")
    return ChunkId(data[KEY_BYTES], data[:KEY_BYTES])


def _reason(data: bytes) -> str:
    return data[_U64.size :].decode(errors="replace")


def _decode(data: bytes) -> Record:
    parent, namespace, unit, tenant, start, tokens, header, length, disk, sealed, stamp, flags = _fields(_RECORD, data)
    return Record(
        parent, namespace, unit, start, tokens, header, length, disk, stamp, bool(flags & _COLD), tenant, sealed,
        bool(flags & _UNREADABLE),
    )  # fmt: skip


def _encode(record: Record) -> bytes:
    return _RECORD.pack(
        record.parent, record.namespace, record.unit, record.tenant, record.start, record.tokens, record.header,
        record.length, record.disk, record.sealed, record.stamp,
        (_COLD if record.cold else 0) | (_UNREADABLE if record.unreadable else 0),
    )  # fmt: skip


class View:
    """Reads of one moment."""

    def __init__(self, txn: lmdb.Transaction, manifest: Manifest) -> None:
        self._txn = txn
        self._m = manifest

    def get(self, chunk: ChunkId) -> Record | None:
        """The chunk's record, None if it isn't stored."""
        data = self._txn.get(_pack(chunk), db=self._m.chunks)
        return None if data is None else _decode(_data(data))

    def leaving(self, chunk: ChunkId) -> str | None:
        """Why the chunk is leaving, None if it isn't."""
        data = self._txn.get(_pack(chunk), db=self._m.leaving)
        return None if data is None else _reason(_data(data))

    def writing(self, chunk: ChunkId) -> bool:
        """Is the chunk being written?"""
        return self._txn.get(_pack(chunk), db=self._m.writing) is not None

    def children(self, group: int, parent: bytes, unit: bytes, limit: int) -> list[ChunkId]:
        """At most `limit` children of `parent` whose first unit has the digest `unit`."""
        found: list[ChunkId] = []
        with self._txn.cursor(db=self._m.children) as cursor:
            more = cursor.set_range_dup(parent + group.to_bytes(1, "little"), unit)
            while more and len(found) < limit and (value := _data(cursor.value())).startswith(unit):
                found.append(ChunkId(group, value[len(unit) :]))
                more = cursor.next_dup()
        return found

    def in_folder(self, first_byte: int) -> list[ChunkId]:
        """Chunks whose key begins with this byte, in order."""
        found: list[ChunkId] = []
        with self._txn.cursor(db=self._m.chunks) as cursor:
            more = cursor.set_range(bytes([first_byte]))
            while more and (key := _data(cursor.key()))[0] == first_byte:
                found.append(_unpack(key))
                more = cursor.next()
        return found


class Manifest:
    """The open manifest. Methods may be called from any thread; lmdb.Error passes through."""

    def __init__(self, path: Path, map_bytes: int, *, readonly: bool = False) -> None:
        self._env = lmdb.open(
            str(path), map_size=map_bytes, max_dbs=8, max_readers=256, sync=False, metasync=False, mode=0o600,
            readonly=readonly, create=not readonly,
        )  # fmt: skip
        self.chunks = self._env.open_db(b"chunks")
        self.children = self._env.open_db(b"children", dupsort=True)
        self.order = self._env.open_db(b"order")
        self.leaving = self._env.open_db(b"leaving")
        self.writing = self._env.open_db(b"writing")
        self._totals = self._env.open_db(b"totals")
        self._change = _Change()  # of the one write transaction that can be open
        # A map that is never full needs no way out of being full: deletions take pages too.
        self.chunks_max = map_bytes // _BYTES_PER_CHUNK
        self.path = path
        try:
            self._newest, self._oldest = self._stamp_range()
        except lmdb.Error:
            self._env.close()  # it can't be opened a second time otherwise
            raise

    def _stamp_range(self) -> tuple[int, int]:
        stamps = [_FIRST_STAMP]
        with self._env.begin() as txn, txn.cursor(db=self.order) as cursor:
            for found in (cursor.first, lambda: cursor.set_range(_ORDER.pack(1, 0)), cursor.last):
                if found():
                    stamps.append(_fields(_ORDER, cursor.key())[1])
            if cursor.set_range(_ORDER.pack(1, 0)) and cursor.prev():
                stamps.append(_fields(_ORDER, cursor.key())[1])
        return max(stamps), min(stamps)

    @contextmanager
    def reading(self) -> Iterator[View]:
        """Reads of one moment. Keep it short: an old reader keeps old pages from being reused."""
        with self._env.begin(buffers=False) as txn:
            yield View(txn, self)

    def get(self, chunk: ChunkId) -> Record | None:
        """The chunk's record, None if it isn't stored."""
        with self.reading() as view:
            return view.get(chunk)

    def all(self) -> Iterator[tuple[ChunkId, Record]]:
        """Everything stored, in key order, as it was at the first step."""
        with self._env.begin() as txn:
            for key, data in txn.cursor(db=self.chunks):
                yield _unpack(_data(key)), _decode(_data(data))

    def count(self) -> int:
        """How many chunks are stored."""
        with self._env.begin() as txn:
            return int(txn.stat(self.chunks)["entries"])

    @contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        """A write transaction that keeps the totals right."""
        with self._env.begin(write=True) as txn:
            change = self._change = _Change()
            yield txn
            if change.stored or change.leaving:
                data = txn.get(_TOTALS_KEY, db=self._totals)
                stored, leaving = _fields(_TOTALS, data) if data else (0, 0)
                after = _TOTALS.pack(stored + change.stored, leaving + change.leaving)
                txn.put(_TOTALS_KEY, after, db=self._totals)

    def totals(self) -> tuple[int, int]:
        """Bytes on disk of stored and of leaving chunks."""
        with self._env.begin() as txn:
            data = txn.get(_TOTALS_KEY, db=self._totals)
        return _fields(_TOTALS, data) if data else (0, 0)

    def counted_totals(self) -> tuple[int, int]:
        """The same, counted one by one: three seconds for a million chunks."""
        stored = leaving = 0
        with self._env.begin(buffers=True) as txn:
            for _, data in txn.cursor(db=self.chunks):
                stored += _fields(_U64, data, _DISK_AT)[0]
            for _, data in txn.cursor(db=self.leaving):
                leaving += _fields(_U64, data)[0]
        return stored, leaving

    def size(self) -> int:
        """Bytes that the manifest itself takes on disk."""
        return (self.path / "data.mdb").stat().st_blocks * 512

    # --- storing ---------------------------------------------------------------------------------------

    def begin_write(self, chunk: ChunkId, size: int) -> None:
        """From now on a file may appear under the chunk's name."""
        with self._writing() as txn:
            txn.put(_pack(chunk), _U64.pack(size), db=self.writing)

    def end_write(self, chunk: ChunkId) -> None:
        """No file has appeared, or whatever did is gone."""
        with self._writing() as txn:
            txn.delete(_pack(chunk), db=self.writing)

    def unfinished(self) -> list[ChunkId]:
        """Chunks that a killed process was writing."""
        with self._env.begin() as txn:
            return [_unpack(key) for key, _ in txn.cursor(db=self.writing)]

    def commit(self, chunk: ChunkId, record: Record, *, found: bool = False) -> Replaced:
        """The chunk's file is in place. A file that was merely `found` counts as the least recently used."""
        with self._writing() as txn:
            return self._commit(txn, chunk, record, found=found)

    def _commit(self, txn: lmdb.Transaction, chunk: ChunkId, record: Record, *, found: bool) -> Replaced:
        packed = _pack(chunk)
        txn.delete(packed, db=self.writing)
        old = self._remove(txn, chunk)
        left = txn.pop(packed, db=self.leaving)
        left_bytes = _fields(_U64, left)[0] if left else 0
        self._change.stored += record.disk
        self._change.leaving -= left_bytes
        if found:
            self._oldest -= 1
        else:
            self._newest += 1
        stamp = self._oldest if found else self._newest
        self._put(txn, packed, _encode(record), stamp, record.cold)
        txn.put(record.parent + packed[KEY_BYTES:], record.unit + chunk.key, db=self.children)
        return Replaced(old.disk if old else 0, left_bytes)

    def _put(self, txn: lmdb.Transaction, packed: bytes, data: bytes, stamp: int, cold: bool) -> None:
        flags = (data[-1] & ~_COLD) | (_COLD if cold else 0)
        txn.put(packed, data[: -_TAIL.size] + _TAIL.pack(stamp, flags), db=self.chunks)
        txn.put(_ORDER.pack(0 if cold else 1, stamp), packed, db=self.order)

    def touch(self, chunks: Iterable[tuple[ChunkId, bool]]) -> None:
        """Move chunks to the recently used end, in this order; those with True become warm if they were cold."""
        with self._writing() as txn:
            for chunk, warm in chunks:
                packed = _pack(chunk)
                data = txn.get(packed, db=self.chunks)
                if data is None:
                    continue
                old = _decode(_data(data))
                txn.delete(_ORDER.pack(0 if old.cold else 1, old.stamp), db=self.order)
                self._newest += 1
                self._put(txn, packed, _data(data), self._newest, old.cold and not warm)

    # --- removing --------------------------------------------------------------------------------------

    def _remove(self, txn: lmdb.Transaction, chunk: ChunkId) -> Record | None:
        data = txn.pop(_pack(chunk), db=self.chunks)
        if data is None:
            return None
        record = _decode(_data(data))
        txn.delete(_ORDER.pack(0 if record.cold else 1, record.stamp), db=self.order)
        parent = record.parent + chunk.group.to_bytes(1, "little")
        txn.delete(parent, record.unit + chunk.key, db=self.children)
        self._change.stored -= record.disk
        return record

    def drop(self, chunk: ChunkId) -> Record | None:
        """Forget a stored chunk whose file is gone or has been moved."""
        with self._writing() as txn:
            return self._remove(txn, chunk)

    def leave(self, chunks: Sequence[ChunkId], reason: str) -> list[Leaving]:
        """Take chunks out of sight. Their files are still there; unknown chunks are ignored."""
        with self._writing() as txn:
            return [gone for chunk in chunks if (gone := self._leave(txn, chunk, reason)) is not None]

    def _leave(self, txn: lmdb.Transaction, chunk: ChunkId, reason: str) -> Leaving | None:
        record = self._remove(txn, chunk)
        if record is None:
            return None
        # It can't be leaving already: a commit takes it off that table.
        txn.put(_pack(chunk), _U64.pack(record.disk) + reason.encode(), db=self.leaving)
        self._change.leaving += record.disk
        return Leaving(chunk, reason, record.disk)

    def leave_coldest(self, size: int, count: int, skip: Callable[[ChunkId], bool], reason: str) -> list[Leaving]:
        """Take chunks out of sight, coldest first, until `size` bytes and `count` chunks are reached."""
        gone: list[Leaving] = []
        with self._writing() as txn:
            victims: list[ChunkId] = []
            taken = 0
            with txn.cursor(db=self.order) as cursor:
                more = cursor.first()
                while more and (taken < size or len(victims) < count):
                    chunk = _unpack(_data(cursor.value()))
                    if not skip(chunk):
                        victims.append(chunk)
                        taken += _fields(_U64, _data(txn.get(cursor.value(), db=self.chunks)), _DISK_AT)[0]
                    more = cursor.next()
            for chunk in victims:
                left = self._leave(txn, chunk, reason)
                assert left is not None, "the order names a chunk that isn't stored"
                gone.append(left)
        return gone

    def leave_scope(self, scope: ClearScope, reason: str) -> Iterator[list[Leaving]]:
        """Take at least what a scope covers out of sight, some chunks with each step: of a million, all of them take
        longer than anybody may be kept waiting.

        Behind a prefix, chunks of its namespace whose parents are gone leave as well (nothing tells what they go on
        from), and those that differ from the prefix only behind the first unit of its open chunk. So an interrupted
        walk is made good by one from the start.
        """
        if not scope.parent:
            for page in self._covered(scope, 0):
                yield self.leave(page, reason) if page else []
            return
        unit = first_unit(scope.parent, scope.tokens, scope.extra) if scope.tokens else b""
        with self._env.begin() as txn:
            beginning = self._children_of(txn, scope, scope.parent, unit)
        yield from self._leave_below(scope, beginning, reason)
        for page in self._covered(scope, scope.start + 1):
            with self._env.begin() as txn:
                orphans = [chunk for chunk in page if self._is_orphan(txn, scope, chunk)]
            yield from self._leave_below(scope, orphans, reason)

    def _is_orphan(self, txn: lmdb.Transaction, scope: ClearScope, chunk: ChunkId) -> bool:
        parent = self._parent_of(txn, chunk)
        return parent is not None and not any(
            txn.get(parent + bytes([g]), db=self.chunks) for g in range(scope.groups)
        )

    def _covered(self, scope: ClearScope, start: int) -> Iterator[list[ChunkId]]:
        """Chunks of the scope's namespace and tenant that don't begin before `start`, and those that can't be decoded
        and may be anybody's; a page of the table at a time."""
        tenant = tenant_digest(scope.tenant) if scope.tenant is not None else None
        last = b""
        while True:
            found, seen = [], 0
            with self._env.begin() as txn, txn.cursor(db=self.chunks) as cursor:
                more = cursor.set_range(last + b"\0") if last else cursor.first()
                while more and seen < PAGE_CHUNKS:
                    last, data, seen = _data(cursor.key()), _data(cursor.value()), seen + 1
                    if data[_NAMESPACE] == UNKNOWN or (
                        (not scope.namespace or data[_NAMESPACE] == scope.namespace)
                        and (tenant is None or data[_TENANT] == tenant)
                        and _fields(_U64, data, _START_AT)[0] >= start
                    ):
                        found.append(_unpack(last))
                    more = cursor.next()
            yield found
            if not more:
                return

    def _parent_of(self, txn: lmdb.Transaction, chunk: ChunkId) -> bytes | None:
        data = txn.get(_pack(chunk), db=self.chunks)
        return None if data is None else _data(data)[:KEY_BYTES]

    def _children_of(self, txn: lmdb.Transaction, scope: ClearScope, parent: bytes, unit: bytes) -> list[ChunkId]:
        return [
            ChunkId(group, _data(value)[UNIT_DIGEST_BYTES:])
            for group in range(scope.groups)
            for value in self._values(txn, parent + bytes([group]))
            if value.startswith(unit)
        ]

    def _values(self, txn: lmdb.Transaction, key: bytes) -> list[bytes]:
        with txn.cursor(db=self.children) as cursor:
            return [_data(value) for value in cursor.iternext_dup()] if cursor.set_key(key) else []

    def _leave_below(self, scope: ClearScope, chunks: list[ChunkId], reason: str) -> Iterator[list[Leaving]]:
        """These chunks and all that go on from them leave, as far as they are the scope's tenant's."""
        tenant = tenant_digest(scope.tenant) if scope.tenant is not None else None
        while chunks:
            gone: list[Leaving] = []
            with self._writing() as txn:
                while chunks and len(gone) < PAGE_CHUNKS:
                    chunk = chunks.pop()
                    data = txn.get(_pack(chunk), db=self.chunks)
                    if data is None:
                        continue
                    record = _data(data)
                    if tenant is not None and record[_TENANT] != tenant and record[_NAMESPACE] != UNKNOWN:
                        continue
                    left = self._leave(txn, chunk, reason)
                    assert left is not None
                    gone.append(left)
                    chunks += self._children_of(txn, scope, chunk.key, b"")
            yield gone

    def list_leaving(self, limit: int, after: ChunkId | None = None) -> list[Leaving]:
        """At most `limit` chunks whose files are to be unlinked, in key order, behind `after`."""
        found: list[Leaving] = []
        with self._env.begin() as txn, txn.cursor(db=self.leaving) as cursor:
            more = cursor.set_range(_pack(after) + b"\0") if after else cursor.first()
            while more and len(found) < limit:
                data = _data(cursor.value())
                found.append(Leaving(_unpack(_data(cursor.key())), _reason(data), _fields(_U64, data)[0]))
                more = cursor.next()
        return found

    def bury(self, chunk: ChunkId) -> None:
        """A leaving chunk's file is gone."""
        with self._writing() as txn:
            left = txn.pop(_pack(chunk), db=self.leaving)
            if left is not None:
                self._change.leaving -= _fields(_U64, left)[0]

    def close(self) -> None:
        """Flush to disk and close."""
        if not self._env.flags()["readonly"]:
            self._env.sync(True)
        self._env.close()
