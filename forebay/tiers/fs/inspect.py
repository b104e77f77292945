"""Looking at a chunk file's header, and judging a whole file, without a manifest."""

from __future__ import annotations

import os
from dataclasses import dataclass

from forebay.errors import CorruptChunk
from forebay.kvstore.header import HEADER_BYTES_MAX, ChunkHeader, decode_header, header_bytes
from forebay.kvstore.identity import chunk_key
from forebay.kvstore.layout import ALIGNMENT
from forebay.tiers.base import ChunkId
from forebay.tiers.chunks import granule_bytes, stored_header, verify_payload
from forebay.tiers.codec.codec import front_length
from forebay.tiers.codec.envelope import is_enveloped
from forebay.tiers.codec.errors import UnsealedChunk
from forebay.tiers.fs.device import AlignedBuffer, Device, Expected, disk_bytes
from forebay.tiers.fs.paths import chunk_of_name

_LENGTH_AT = 32
_BODY_AT = 36


@dataclass(frozen=True, slots=True)
class Front:
    """A file's decoded header and what the file system says of the file. `sealed`: it is a codec's, with so many
    bytes; 0 for a plain one."""

    header: ChunkHeader
    block: bytes
    disk: int
    inode: int
    sealed: int = 0

    @property
    def length(self) -> int:
        """Of the chunk, header and payload."""
        return len(self.block) + self.header.payload_length

    @property
    def expected(self) -> Expected:
        return Expected(len(self.block), self.length, self.sealed)


def read_front(device: Device, descriptor: int) -> Front:
    """The header at the front of an open file. Raises CorruptChunk, also if the file's size can't be right, and
    CannotDecode."""
    block = device.read_front(descriptor, ALIGNMENT)
    if is_enveloped(block):
        return _sealed_front(device, descriptor, block)
    if len(block) >= _BODY_AT:
        wanted = _BODY_AT + int.from_bytes(block[_LENGTH_AT:_BODY_AT], "little")
        if len(block) < wanted <= HEADER_BYTES_MAX:
            block = device.read_front(descriptor, wanted)
    size_of = decode_header(block)
    size = header_bytes(size_of.token_count, len(size_of.extra))
    if len(block) != size:
        block = device.read_front(descriptor, size)
    header = stored_header(block)
    if device.codec.sealing:
        raise UnsealedChunk("the chunk isn't encrypted, and this tier takes only what is")
    status = os.fstat(descriptor)
    if status.st_size != size + header.payload_length:
        raise CorruptChunk(f"file of {status.st_size} bytes, its header says {size} + {header.payload_length}")
    return Front(header, block, disk_bytes(status), status.st_ino)


def _sealed_front(device: Device, descriptor: int, first: bytes) -> Front:
    wanted = front_length(first)
    if wanted > len(first):
        first = device.read_front(descriptor, wanted)
    found, status = device.codec.front(first), os.fstat(descriptor)
    if status.st_size != found.stored_length:
        raise CorruptChunk(f"file of {status.st_size} bytes, its envelope says {found.stored_length}")
    return Front(found.header, found.block, disk_bytes(status), status.st_ino, status.st_size)


def front_of(device: Device, path: str) -> Front:
    """The header of the file at `path`, checked against its name. Raises CorruptChunk and OSError."""
    descriptor = device.open(path)
    try:
        front = read_front(device, descriptor)
    finally:
        os.close(descriptor)
    check_name(os.path.basename(path), front.header)
    return front


def check_name(name: str, header: ChunkHeader) -> None:
    """Raises CorruptChunk unless a file of this name may have this header."""
    chunk = chunk_of_name(name)
    if chunk is None:
        raise CorruptChunk("the name is no chunk's")
    if chunk != ChunkId(header.group, header.key):
        raise CorruptChunk("the header is another chunk's than the name says")
    if not header.checksums:
        raise CorruptChunk("the header has no checksums")
    if chunk_key(header.parent, header.tokens, header.extra) != header.key:
        raise CorruptChunk("the key doesn't follow from parent and tokens")


def check_payload(device: Device, path: str) -> Front:
    """Read and verify all of a file, a granule at a time. Raises CorruptChunk and OSError."""
    descriptor = device.open(path)
    try:
        front = read_front(device, descriptor)
        check_name(os.path.basename(path), front.header)
        if front.sealed:
            _check_sealed_payload(device, descriptor, front)
            return front
        step, at = granule_bytes(front.header), len(front.block)
        payload = bytearray(front.header.payload_length)
        view = memoryview(payload)
        for offset in range(0, len(payload), step):
            if device.read_all(descriptor, [view[offset : offset + step]], at + offset) != step:
                raise CorruptChunk("the file ends inside a granule")
        verify_payload(front.header, view)
    finally:
        os.close(descriptor)
    return front


def _check_sealed_payload(device: Device, descriptor: int, front: Front) -> None:
    stored = device.read_whole(descriptor, front.sealed, AlignedBuffer(), direct=False)
    payload = memoryview(bytearray(front.header.payload_length))
    device.codec.decode(stored, payload)
    verify_payload(front.header, payload)
