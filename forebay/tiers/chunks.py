"""What every tier does with a chunk's bytes: check a slot before storing it, a chunk after loading it, and
choose among candidates for a partial match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forebay.errors import CorruptChunk
from forebay.kvstore.header import (
    ChunkHeader,
    SlotState,
    decode_header,
    encode_header,
    first_bad_granule,
    header_bytes,
    mark_slot,
)
from forebay.kvstore.identity import MATCH_UNIT, chain
from forebay.tiers.base import ChunkId, Query, StoreJob

_BODY_LENGTH_AT = 32
_BODY_AT = 36
UNIT_BYTES = 4 * MATCH_UNIT


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot that may be stored. `block` is a copy of its header block with the slot's own fields reset;
    `payload` is the pool's memory, valid until the job is finished."""

    header: ChunkHeader
    block: bytes
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Match:
    """The candidate that serves the most of a query, and how many tokens."""

    chunk: ChunkId
    matched: int


def checked_slot(memory: memoryview, job: StoreJob) -> Slot:
    """The slot in `memory` if it is what the job says it is. Raises CorruptChunk with the reason.

    The payload's checksums aren't computed here: whoever wrote it did, and whoever loads it will.
    """
    header = decode_header(memory)
    if (header.group, header.key, header.parent) != (job.chunk.group, job.chunk.key, job.parent):
        raise CorruptChunk("the slot holds another chunk than its job says")
    if not header.checksums:
        raise CorruptChunk("the slot's chunk has no checksums yet")
    size = header_bytes(header.token_count, len(header.extra))
    if len(memory) != size + header.payload_length:
        raise CorruptChunk(f"the job has {len(memory)} bytes, its chunk {size} + {header.payload_length}")
    block = bytearray(memory[:size])
    mark_slot(memoryview(block), SlotState.COMMITTED, 0)
    return Slot(header, bytes(block), memory[size:])


def stored_header(block: bytes) -> ChunkHeader:
    """The header in a block that a tier has stored. Raises CorruptChunk unless it is that to the last bit:
    the padding and the slot's own fields lie outside of its checksum, and here they can have one value only.
    """
    header = decode_header(block)
    if encode_header(header) != block:
        raise CorruptChunk("the header's padding or slot fields have changed")
    return header


def granule_bytes(header: ChunkHeader) -> int:
    """Bytes of one granule of this chunk."""
    return header.granule_bytes


def verify_payload(header: ChunkHeader, payload: memoryview) -> None:
    """Raises CorruptChunk unless every granule of `payload` has the header's checksum."""
    if not header.checksums:
        raise CorruptChunk("a chunk without checksums can't be verified")
    if len(payload) != header.payload_length:
        raise CorruptChunk(f"payload of {len(payload)} bytes, its header says {header.payload_length}")
    bad = first_bad_granule(payload, granule_bytes(header), header.checksums)
    if bad is not None:
        raise CorruptChunk(f"granule {bad} has another checksum than its header says")


def header_block(block: bytes | memoryview) -> bytes:
    """A header block without its padding; `decode_header` takes it as well."""
    length = int.from_bytes(block[_BODY_LENGTH_AT:_BODY_AT], "little")
    return bytes(block[: _BODY_AT + length])


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens (u32 LE) two sequences share at their front, in whole units."""
    shared = 0
    for at in range(0, min(len(one), len(other)) // UNIT_BYTES * UNIT_BYTES, UNIT_BYTES):
        if one[at : at + UNIT_BYTES] != other[at : at + UNIT_BYTES]:
            break
        shared += MATCH_UNIT
    return shared


def best_match(query: Query, candidates: Mapping[ChunkId, ChunkHeader]) -> Match | None:
    """The candidate that serves the most tokens of the query; among equals the shortest, then the least key.

    The exact chunk always serves all of it. Others must be on the same chain: the same tokens with another
    `extra` are another chunk. Where the query asks for a whole chunk, its last token must be the query's too.
    """
    best: tuple[int, int, bytes] | None = None
    first = query.first or _first_key(query.parent, query.tokens, b"")
    for chunk, header in candidates.items():
        exact = chunk.key == query.key
        if not exact and (
            header.parent != query.parent or _first_key(header.parent, header.tokens, header.extra) != first
        ):
            continue
        matched = header.token_count if exact else common_tokens(query.tokens, header.tokens)
        if query.whole and matched != header.token_count:
            continue
        rank = (-matched, header.token_count, chunk.key)
        if matched and (best is None or rank < best):
            best = rank
    return Match(ChunkId(query.group, best[2]), -best[0]) if best else None


def _first_key(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
    keys = chain(parent, tokens[:UNIT_BYTES], extra)
    return keys[0] if keys else b""
