"""A segment: several chunks in one object, behind an index that says where each begins.

    0    magic "FBSEGMT1"    8   xxh3_64 of [16, 20 + length)    16   length u32 of the body
    20   body: msgpack list of `Entry`, ... zeros up to a multiple of 4,096
    then the chunks, each as in an object of its own

The index only finds chunks. What is served is verified by the chunk's own header and checksums, so an index that is
wrong, or belongs to an object that was written over since, costs a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from forebay.errors import CorruptChunk
from forebay.kvstore.header import ChunkHeader
from forebay.kvstore.identity import KEY_BYTES
from forebay.tiers.base import ChunkId
from forebay.tiers.fs.manifest import tenant_digest

MAGIC = b"FBSEGMT1"
ALIGNMENT = 4096
INDEX_BYTES_MAX = 4 << 20
FRONT_BYTES = 64 << 10
_PREFIX = struct.Struct("<8sQI")


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One chunk of a segment: `offset` and `length` of what is stored of it, in the object; `plain` is its length with
    the header as it lies in the pool. `tenant` is a digest."""

    group: int
    key: bytes
    namespace: bytes
    tenant: bytes
    tokens: int
    plain: int
    offset: int
    length: int

    @property
    def chunk(self) -> ChunkId:
        return ChunkId(self.group, self.key)


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk that is to go into a segment: its header, how long it is in the pool, and the bytes to be stored."""

    header: ChunkHeader
    plain: int
    stored: Sequence[bytes | memoryview]

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.stored)


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment's bytes, and where its chunks are."""

    body: bytes
    index_bytes: int
    entries: list[Entry]


def build(pieces: Sequence[Piece]) -> Segment:
    """The segment of these chunks, in this order. Copies them."""
    size = _index_size(_entries(pieces, INDEX_BYTES_MAX))  # offsets of that size take no less room than the real ones
    entries = _entries(pieces, size)
    index = _encode(entries).ljust(size, b"\0")
    parts: list[bytes | memoryview] = [index]
    for piece in pieces:
        parts += piece.stored
    return Segment(b"".join(parts), size, entries)


def _entries(pieces: Sequence[Piece], at: int) -> list[Entry]:
    entries = []
    for piece in pieces:
        h = piece.header
        entries.append(
            Entry(h.group, h.key, h.namespace, tenant_digest(h.tenant), h.token_count, piece.plain, at, piece.length)
        )
        at += piece.length
    return entries


def _index_size(entries: list[Entry]) -> int:
    return -(-len(_encode(entries)) // ALIGNMENT) * ALIGNMENT


def _encode(entries: list[Entry]) -> bytes:
    body = msgspec.msgpack.encode(entries)
    checked = len(body).to_bytes(4, "little") + body
    return MAGIC + xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little") + checked


def index_length(front: bytes) -> int:
    """How many bytes of a segment hold its index, from its first 20. Raises CorruptChunk if it is no segment."""
    if len(front) < _PREFIX.size:
        raise CorruptChunk(f"{len(front)} bytes are too few for a segment")
    magic, _, length = _PREFIX.unpack_from(front)
    if magic != MAGIC or length > INDEX_BYTES_MAX:
        raise CorruptChunk("no segment begins here")
    return _PREFIX.size + int(length)


def parse(front: bytes) -> list[Entry]:
    """The index at the front of a segment. Raises CorruptChunk with the reason, whatever `front` is."""
    end = index_length(front)
    if len(front) < end:
        raise CorruptChunk("a segment's index is cut short")
    _, digest, _ = _PREFIX.unpack_from(front)
    if xxhash.xxh3_64_intdigest(front[_PREFIX.size - 4 : end]) != digest:
        raise CorruptChunk("a segment's index has another checksum than it says")
    try:
        entries = msgspec.msgpack.decode(front[_PREFIX.size : end], type=list[Entry])
    except msgspec.DecodeError as error:
        raise CorruptChunk(f"a segment's index: {error}") from error
    if any(
        len(e.key) != KEY_BYTES or len(e.namespace) != KEY_BYTES or not 0 <= e.group < 256
        or e.length < 1 or e.plain < 1 or e.offset < end or e.tokens < 1
        for e in entries
    ):  # fmt: skip
        raise CorruptChunk("a segment's index names what can't be a chunk")
    return entries
