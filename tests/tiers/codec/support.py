"""Chunks and codecs for these tests."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import msgspec

from forebay.kvstore.header import granule_checksums
from forebay.tiers.chunks import verify_payload
from forebay.tiers.codec.codec import Codec, Front
from forebay.tiers.codec.keys import Key, KeyRing
from tests.tiers.support import Made, make_chunk

OLD, NEW, FOREIGN = (Key(bytes([number]) * 32) for number in (1, 2, 3))
BEHIND = b"\xee" * 64


def holding(payload: bytes, tokens: Sequence[int] = range(32), tenant: str = "", group: int = 0) -> Made:
    """A chunk with this payload, whose length must divide by the number of its granules."""
    made = make_chunk(tokens, granule=16, tenant=tenant, group=group)
    sums = granule_checksums(memoryview(payload), len(payload) // (len(tokens) // 16))
    return Made(msgspec.structs.replace(made.header, payload_length=len(payload), checksums=sums), payload)


def floats(count: int, seed: int = 1, *, width: int = 2) -> bytes:
    """Numbers as a model's cache has them: bf16 (or fp32, width 4) from a bell curve. Little endian."""
    rng = random.Random(seed)
    whole = (struct.pack("<f", rng.gauss(0, 2)) for _ in range(count))
    return b"".join(number[4 - width :] for number in whole)


def codecs() -> dict[str, Codec]:
    """One of each kind; those with keys share them."""
    keys = KeyRing([OLD, NEW])
    return {
        "none": Codec(),
        "zstd": Codec(compress=True),
        "aes": Codec(keys=keys),
        "zstd+aes": Codec(compress=True, keys=keys),
    }


def stored(codec: Codec, chunk: Made) -> bytes:
    """What `codec` stores for a chunk."""
    return bytes(codec.encode(chunk.block, memoryview(chunk.payload)))


def decoded(codec: Codec, data: bytes, chunk: Made) -> Front:
    """Decode, and verify as a tier does, into a buffer that is larger; returns the front.

    Fails if what comes back isn't the chunk, or if bytes behind it were written. Raises what the codec raises.
    """
    buffer = bytearray(len(chunk.payload)) + BEHIND
    front = codec.decode(data, memoryview(buffer))
    assert buffer[len(chunk.payload) :] == BEHIND, "bytes behind the payload were written"
    verify_payload(front.header, memoryview(buffer)[: front.header.payload_length])
    assert front.block == chunk.block, "another header was served"
    assert buffer[: len(chunk.payload)] == chunk.payload, "wrong bytes were served"
    return front
