"""The self-describing header that goes with a chunk everywhere: pool, disk, S3, wire.

    0   magic "FOREBAY1"            8    state        u32   what the pool's slot is (see SlotState)
    12  header version  u32        16   generation   u64   of the pool's slot; 0 outside of the pool
    24  checksum of [32, 32+length)  u64 xxh3_64
    32  length u32 of the body, then the body: a msgpack `ChunkHeader`
    ... zeros up to a multiple of 4,096

`state` and `generation` lie outside of the checksum: they belong to the slot, not to the chunk, and change
in place. A header that isn't perfect decodes to CorruptChunk, never to something near.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec
import xxhash

from forebay.errors import CorruptChunk, ForeignChunk
from forebay.kvstore.identity import KEY_BYTES, LAYOUT_VERSION, MATCH_UNIT, unpack_tokens
from forebay.kvstore.layout import ALIGNMENT, round_up

MAGIC = b"FOREBAY1"
HEADER_VERSION = 1
HEADER_BYTES_MAX = 1 << 20
TENANT_BYTES_MAX = 128
_PREFIX = struct.Struct("<8sIIQQI")
_STATE_AT = 8
_GENERATION_AT = 16
_BODY_AT = 36


class SlotState(IntEnum):
    """What a slot of the pool holds. Anything else in that field is a free slot."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    PROMOTING = 3
    RETIRED = 4


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a chunk says of itself.

    `tokens` are its token ids as u32 LE, `checksums` one xxh3_64 (u64 LE) a granule (a recurrent state is one
    granule), `owner` in a reserved slot the id of the client or tier that may write into it.
    """

    namespace: bytes
    group: int
    key: bytes
    parent: bytes
    start: int
    tokens: bytes
    tenant: str
    extra: bytes
    payload_length: int
    checksums: bytes
    owner: bytes = b""
    layout_version: int = LAYOUT_VERSION

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 4

    @property
    def end(self) -> int:
        """Absolute position after the chunk's last token."""
        return self.start + self.token_count

    @property
    def granule_bytes(self) -> int:
        """Bytes that one checksum covers. There are checksums, so the chunk is written."""
        return self.payload_length // (len(self.checksums) // 8)

    def token_ids(self) -> tuple[int, ...]:
        return unpack_tokens(self.tokens)


def header_bytes(token_count: int, extra_length: int = 0) -> int:
    """Bytes that the padded header of such a chunk takes, an upper bound that writer and reader share."""
    units = token_count // MATCH_UNIT
    fixed = _BODY_AT + 3 * (KEY_BYTES + 2) + 256 + 64
    return round_up(fixed + 4 * token_count + 8 * units + extra_length, ALIGNMENT)


def encode_header(
    header: ChunkHeader, *, state: SlotState = SlotState.COMMITTED, generation: int = 0
) -> bytes:
    """The padded header. Its size is `header_bytes(token_count, len(extra))`."""
    assert len(header.tenant.encode()) <= TENANT_BYTES_MAX, "tenant ids have at most 128 bytes"
    body = msgspec.msgpack.encode(header)
    size = header_bytes(header.token_count, len(header.extra))
    assert _BODY_AT + len(body) <= size <= HEADER_BYTES_MAX, (len(body), size)
    checked = len(body).to_bytes(4, "little") + body
    digest = xxhash.xxh3_64_intdigest(checked)
    prefix = _PREFIX.pack(MAGIC, state, HEADER_VERSION, generation, digest, len(body))
    return (prefix + body).ljust(size, b"\0")


def decode_header(data: bytes | memoryview) -> ChunkHeader:
    """The header at the front of `data`. Raises CorruptChunk with the reason, whatever `data` is; ForeignChunk if it
    seems to be a header of another version."""
    if len(data) < _BODY_AT:
        raise CorruptChunk(f"{len(data)} bytes are too few for a header")
    magic, _, version, _, digest, length = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        kind = ForeignChunk if magic[:7] == MAGIC[:7] else CorruptChunk
        raise kind("no chunk begins here (magic differs)")
    if version != HEADER_VERSION:
        raise ForeignChunk(f"header version {version}, this build reads {HEADER_VERSION}")
    if length > HEADER_BYTES_MAX or _BODY_AT + length > len(data):
        raise CorruptChunk(f"header of {length} bytes is cut short")
    if xxhash.xxh3_64_intdigest(data[_BODY_AT - 4 : _BODY_AT + length]) != digest:
        raise CorruptChunk("header checksum differs")
    try:
        header = msgspec.msgpack.decode(data[_BODY_AT : _BODY_AT + length], type=ChunkHeader)
    except msgspec.DecodeError as error:
        raise CorruptChunk(f"header body: {error}") from error
    if header.layout_version != LAYOUT_VERSION:
        raise ForeignChunk(f"layout version {header.layout_version}, this build reads {LAYOUT_VERSION}")
    why = _inconsistency(header)
    if why:
        raise CorruptChunk(why)
    return header


def _inconsistency(header: ChunkHeader) -> str | None:
    if not len(header.namespace) == len(header.key) == len(header.parent) == KEY_BYTES:
        return "a key has not 32 bytes"
    if len(header.tenant.encode()) > TENANT_BYTES_MAX:
        return f"a tenant's id of more than {TENANT_BYTES_MAX} bytes"
    if not header.tokens or len(header.tokens) % (4 * MATCH_UNIT) or header.start % MATCH_UNIT:
        return f"tokens [{header.start}, {header.end}) are no whole units"
    granules, rest = divmod(len(header.checksums), 8)
    if rest or granules not in (0, 1, header.token_count // MATCH_UNIT):
        return "not one checksum a granule"
    if header.payload_length <= 0 or header.payload_length % max(granules, 1):
        return f"payload of {header.payload_length} bytes doesn't divide into its granules"
    return None


def slot_state(data: bytes | memoryview) -> SlotState:
    """State of the slot whose bytes begin here; FREE for anything that isn't a header."""
    magic, state, _, _, _, _ = _PREFIX.unpack_from(data)
    if magic != MAGIC or state not in SlotState._value2member_map_:
        return SlotState.FREE
    return SlotState(state)


def slot_generation(data: memoryview) -> int:
    """Generation of the slot whose bytes begin here. A reader compares it before and after its copy."""
    return int.from_bytes(data[_GENERATION_AT : _GENERATION_AT + 8], "little")


def mark_slot(data: memoryview, state: SlotState, generation: int) -> None:
    """Change a slot's state and generation in place; mutates the pool. The body stays as it is."""
    data[:8] = MAGIC
    data[_GENERATION_AT : _GENERATION_AT + 8] = generation.to_bytes(8, "little")
    data[_STATE_AT : _STATE_AT + 4] = int(state).to_bytes(4, "little")


def granule_checksums(payload: memoryview, granule_bytes: int) -> bytes:
    """One xxh3_64 (u64 LE) for each granule of `payload`."""
    assert granule_bytes > 0 and len(payload) % granule_bytes == 0, (len(payload), granule_bytes)
    digest = xxhash.xxh3_64_intdigest
    return b"".join(
        digest(payload[at : at + granule_bytes]).to_bytes(8, "little")
        for at in range(0, len(payload), granule_bytes)
    )


def first_bad_granule(payload: memoryview, granule_bytes: int, checksums: bytes) -> int | None:
    """Index of the first granule in `payload` whose checksum differs, or None if all agree."""
    found = granule_checksums(payload, granule_bytes)
    assert len(checksums) >= len(found), (len(checksums), len(found))
    if found == checksums[: len(found)]:
        return None
    return next(i for i in range(len(found) // 8) if found[8 * i : 8 * i + 8] != checksums[8 * i : 8 * i + 8])
