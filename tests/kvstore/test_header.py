"""A header is perfect or it is none."""

from __future__ import annotations

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import CorruptChunk
from forebay.kvstore.header import (
    MAGIC,
    TENANT_BYTES_MAX,
    ChunkHeader,
    SlotState,
    decode_header,
    encode_header,
    first_bad_granule,
    granule_checksums,
    header_bytes,
    mark_slot,
    slot_generation,
    slot_state,
)

STATE_AND_GENERATION = {*range(8, 12), *range(16, 24)}


def header(token_count: int = 32, **changes: object) -> ChunkHeader:
    fields: dict[str, object] = dict(
        namespace=b"n" * 32, group=1, key=b"k" * 32, parent=b"p" * 32, start=64, tokens=bytes(4 * token_count),
        tenant="t", extra=b"", payload_length=1024 * (token_count // 16), checksums=b"c" * (token_count // 2),
    )  # fmt: skip
    return ChunkHeader(**(fields | changes))  # type: ignore[arg-type]


@given(st.integers(1, 64), st.binary(max_size=600), st.text(max_size=20), st.integers(0, 2**64 - 1))
def test_a_header_round_trips_in_exactly_its_announced_size(
    units: int, extra: bytes, tenant: str, generation: int
) -> None:
    original = header(16 * units, extra=extra, tenant=tenant)
    block = encode_header(original, state=SlotState.RESERVED, generation=generation)
    assert len(block) == header_bytes(16 * units, len(extra)) and len(block) % 4096 == 0
    assert decode_header(block) == original
    assert slot_state(block) is SlotState.RESERVED and slot_generation(memoryview(block)) == generation


def test_any_flipped_byte_but_the_slots_own_fields_makes_it_no_header() -> None:
    block = bytearray(encode_header(header()))
    used = len(bytes(block).rstrip(b"\0"))
    for at in sorted(set(range(used)) - STATE_AND_GENERATION):
        block[at] ^= 0x10
        with pytest.raises(CorruptChunk):
            decode_header(bytes(block))
        block[at] ^= 0x10
    assert decode_header(bytes(block)) == header()


def test_a_header_cut_short_anywhere_is_no_header() -> None:
    block = encode_header(header())
    for length in range(len(block.rstrip(b"\0"))):
        with pytest.raises(CorruptChunk):
            decode_header(block[:length])


@given(st.binary(max_size=300))
def test_garbage_is_no_header(data: bytes) -> None:
    with pytest.raises(CorruptChunk):
        decode_header(data)


def test_marking_a_slot_changes_state_and_generation_and_nothing_else() -> None:
    block = bytearray(encode_header(header(), state=SlotState.RESERVED, generation=1))
    mark_slot(memoryview(block), SlotState.COMMITTED, 7)
    assert slot_state(block) is SlotState.COMMITTED and slot_generation(memoryview(block)) == 7
    assert decode_header(bytes(block)) == header()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(key=b"short"),
        dict(tokens=b"\0" * 60),
        dict(payload_length=1023),
        dict(checksums=b"c" * 24),
        dict(checksums=b"c" * 12),
        dict(layout_version=2),
        dict(start=8),
    ],
)
def test_a_header_that_contradicts_itself_is_no_header(wrong: dict[str, object]) -> None:
    with pytest.raises(CorruptChunk):
        decode_header(encode_header(header(**wrong)))


def test_a_state_has_one_checksum_whatever_its_tokens() -> None:
    state = header(payload_length=1023, checksums=b"c" * 8)
    assert decode_header(encode_header(state)) == state and state.granule_bytes == 1023


def test_the_first_bad_granule_is_named() -> None:
    payload = bytearray(range(256)) * 16
    sums = granule_checksums(memoryview(payload), 1024)
    assert first_bad_granule(memoryview(payload), 1024, sums) is None
    payload[2500] ^= 1
    assert first_bad_granule(memoryview(payload), 1024, sums) == 2


def test_a_tenants_id_that_could_not_be_written_is_not_read_either() -> None:
    for length, good in ((TENANT_BYTES_MAX, True), (TENANT_BYTES_MAX + 1, False)):
        body = msgspec.msgpack.encode(header(tenant="t" * length))
        checked = len(body).to_bytes(4, "little") + body
        front = MAGIC + (2).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(8)
        block = front + xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little") + checked
        if good:
            assert decode_header(block).tenant == "t" * length
        else:
            with pytest.raises(CorruptChunk, match="tenant"):
                decode_header(block)
