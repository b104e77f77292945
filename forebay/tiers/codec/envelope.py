"""The envelope at the front of a chunk that a codec has stored: what follows, how long it is, and whose it is.

      0  magic "FOREBAYC"             8  version u16, 1      10  compression u8     11  encryption u8
     12  group u32                   16  key (32)            48  key id (8)         56  salt (32)
     88  header block's length u32   92  its stored length u32
     96  payload's length u64       104  its stored length u64
    112  xxh3_64 of the stored header block, u64            120  of the stored payload, u64
    128  xxh3_64 of [0, 128), u64
    136  stored header block, stored payload

All integers are little endian. Key id and salt are zeros where nothing is encrypted. The checksums tell damage
from a chunk that is well, also to somebody without the key; they prove nothing to an enemy. What proves
something is the encryption, which authenticates [0, 112) with each part.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from forebay.errors import CorruptChunk, ForeignChunk
from forebay.kvstore.header import HEADER_BYTES_MAX
from forebay.tiers.base import ChunkId

MAGIC = b"FOREBAYC"
VERSION = 1
ENVELOPE_BYTES = 136
KEY_ID_BYTES = 8
SALT_BYTES = 32
_FORMAT = struct.Struct("<8sHBBI32s8s32sIIQQ")
_SUMS = struct.Struct("<QQ")
_SUMS_AT = _FORMAT.size
_CHECK_AT = _SUMS_AT + _SUMS.size
assert (_SUMS_AT, _CHECK_AT, _CHECK_AT + 8) == (112, 128, ENVELOPE_BYTES)


class Compression(IntEnum):
    """How the payload is compressed. The header block never is: most of it is hashes and token ids."""

    NONE = 0
    ZSTD = 1
    ZSTD_PLANES_2 = 2
    """Values of two bytes: all first bytes, then all second ones; then zstd."""
    ZSTD_PLANES_4 = 3


class Encryption(IntEnum):
    """How both parts are encrypted."""

    NONE = 0
    AES_256_GCM = 1
    """Under a key of the chunk's own; see `seal.py`."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded envelope. Lengths in bytes; a stored part is compressed and sealed, where that was done."""

    compression: Compression
    encryption: Encryption
    chunk: ChunkId
    key_id: bytes
    salt: bytes
    header_length: int
    header_stored: int
    payload_length: int
    payload_stored: int
    header_sum: int = 0
    payload_sum: int = 0

    @property
    def front_length(self) -> int:
        """So many of the first bytes hold envelope and header block."""
        return ENVELOPE_BYTES + self.header_stored

    @property
    def stored_length(self) -> int:
        """All of it."""
        return self.front_length + self.payload_stored

    def said(self) -> bytes:
        """[0, 112): everything but the checksums. This is what encryption authenticates."""
        return _FORMAT.pack(
            MAGIC, VERSION, self.compression, self.encryption, self.chunk.group, self.chunk.key, self.key_id,
            self.salt, self.header_length, self.header_stored, self.payload_length, self.payload_stored,
        )  # fmt: skip


def is_enveloped(data: bytes | memoryview) -> bool:
    """Does an envelope begin here, of whatever version?"""
    return bytes(data[:8]) == MAGIC


def encode_envelope(envelope: Envelope) -> bytes:
    """Its bytes."""
    front = envelope.said() + _SUMS.pack(envelope.header_sum, envelope.payload_sum)
    return front + xxhash.xxh3_64_intdigest(front).to_bytes(8, "little")


def decode_envelope(data: bytes | memoryview) -> Envelope:
    """The envelope at the front of `data`. Raises CorruptChunk with the reason, whatever `data` is; ForeignChunk if it
    is one of another version."""
    if not is_enveloped(data):
        raise CorruptChunk("no envelope begins here (magic differs)")
    if len(data) < ENVELOPE_BYTES:
        raise CorruptChunk(f"{len(data)} bytes are too few for an envelope")
    version = int.from_bytes(data[8:10], "little")
    if version != VERSION:
        raise ForeignChunk(f"envelope version {version}, this build reads {VERSION}")
    if xxhash.xxh3_64_intdigest(data[:_CHECK_AT]).to_bytes(8, "little") != data[_CHECK_AT:ENVELOPE_BYTES]:
        raise CorruptChunk("envelope checksum differs")
    _, _, compression, encryption, group, key, key_id, salt, *lengths = _FORMAT.unpack_from(data)
    try:
        how = Compression(compression), Encryption(encryption)
    except ValueError as error:
        raise ForeignChunk(f"envelope: {error}") from error
    envelope = Envelope(*how, ChunkId(group, key), key_id, salt, *lengths, *_SUMS.unpack_from(data, _SUMS_AT))
    if not 0 < envelope.header_stored <= HEADER_BYTES_MAX or not 0 < envelope.header_length <= HEADER_BYTES_MAX:
        raise CorruptChunk(f"header of {envelope.header_stored} bytes, {envelope.header_length} without its envelope")
    return envelope


def check_header_part(envelope: Envelope, front: memoryview) -> memoryview:
    """The stored header block in the first bytes of a stored chunk. Raises CorruptChunk if it is cut or damaged."""
    part = front[ENVELOPE_BYTES : envelope.front_length]
    if len(part) != envelope.header_stored:
        raise CorruptChunk(f"header of {envelope.header_stored} bytes is cut short")
    if xxhash.xxh3_64_intdigest(part) != envelope.header_sum:
        raise CorruptChunk("the stored header has another checksum than its envelope says")
    return part


def check_payload_part(envelope: Envelope, stored: memoryview) -> memoryview:
    """The stored payload of a whole stored chunk. Raises CorruptChunk if it is cut, too long, or damaged."""
    if len(stored) != envelope.stored_length:
        raise CorruptChunk(f"{len(stored)} stored bytes, the envelope says {envelope.stored_length}")
    part = stored[envelope.front_length :]
    if xxhash.xxh3_64_intdigest(part) != envelope.payload_sum:
        raise CorruptChunk("the stored payload has another checksum than its envelope says")
    return part
