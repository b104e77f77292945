"""Whatever befalls stored bytes is told, by its type; and what is encrypted can't be forged either."""

from __future__ import annotations

import random

import pytest
import xxhash

from forebay.errors import CorruptChunk, ForeignChunk
from forebay.tiers.codec.codec import Codec, check_sealed
from forebay.tiers.codec.envelope import ENVELOPE_BYTES, VERSION, decode_envelope
from forebay.tiers.codec.errors import MissingKey, UnsealedChunk
from forebay.tiers.codec.keys import KeyRing
from tests.formats.mutations import cuts, flips
from tests.tiers.codec.support import FOREIGN, NEW, OLD, codecs, decoded, floats, holding, stored

KINDS = tuple(codecs())
SUMS_AT, CHECK_AT = 112, 128
CHUNK = holding(floats(320), tenant="acme")
ANSWERS = (CorruptChunk, MissingKey)


def resummed(data: bytes) -> bytes:
    """The same bytes with checksums that agree: what somebody does who knows the format, but no key."""
    at = ENVELOPE_BYTES + int.from_bytes(data[92:96], "little")
    digest = xxhash.xxh3_64_intdigest
    sums = b"".join(digest(part).to_bytes(8, "little") for part in (data[ENVELOPE_BYTES:at], data[at:]))
    front = data[:SUMS_AT] + sums
    return front + digest(front).to_bytes(8, "little") + data[ENVELOPE_BYTES:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_that_changed_anywhere_is_told(kind: str) -> None:
    codec = codecs()[kind]
    data = stored(codec, CHUNK)
    for _, changed in flips(data):
        with pytest.raises(CorruptChunk):
            decoded(codec, changed, CHUNK)
        with pytest.raises(CorruptChunk):
            check_sealed(changed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_that_is_cut_or_goes_on_is_told(kind: str) -> None:
    codec = codecs()[kind]
    data = stored(codec, CHUNK)
    for changed in (*cuts(data), data + b"\0", data + data):
        with pytest.raises(CorruptChunk):
            decoded(codec, changed, CHUNK)
        with pytest.raises(CorruptChunk):
            check_sealed(changed)


@pytest.mark.parametrize("kind", ["aes", "zstd+aes"])
def test_a_forged_byte_of_a_sealed_chunk_is_told_though_the_checksums_agree(kind: str) -> None:
    codec = codecs()[kind]
    data = stored(codec, CHUNK)
    assert resummed(data) == data
    for at, changed in flips(data, patterns=(0x01, 0x80)):
        if SUMS_AT <= at < ENVELOPE_BYTES:
            continue  # the checksums themselves
        with pytest.raises(ANSWERS):
            decoded(codec, resummed(changed), CHUNK)


@pytest.mark.parametrize("kind", ["none", "zstd"])
def test_a_forged_byte_of_an_open_chunk_never_serves_other_bytes_under_a_header(kind: str) -> None:
    """Without a key nothing proves who wrote a chunk, but header and payload still have to agree."""
    codec = codecs()[kind]
    data = stored(codec, CHUNK)
    refused = 0
    for _, changed in flips(data, patterns=(0x01, 0x80)):
        try:
            decoded(codec, resummed(changed), CHUNK)  # fails by itself if anything but the chunk comes out
        except ANSWERS:
            refused += 1
    # What is left are the checksums (made anew), key id and salt (unused here), a few idle bits of zstd's.
    assert refused > 2 * (len(data) - 24 - 40) - 32


def test_a_sealed_chunk_can_not_be_passed_off_as_another() -> None:
    """Neither whole, nor its payload under another chunk's header, nor under an envelope that names another."""
    codec = codecs()["aes"]
    one, other = holding(floats(320, 1), range(32)), holding(floats(320, 2), range(100, 132))
    a, b = stored(codec, one), stored(codec, other)
    assert len(a) == len(b)
    front = decode_envelope(a).front_length
    for mixed in (a[:front] + b[front:], a[:ENVELOPE_BYTES] + b[ENVELOPE_BYTES:], a[:12] + b[12:48] + a[48:]):
        with pytest.raises(CorruptChunk):
            decoded(codec, resummed(mixed), one)


def test_a_sealed_chunk_made_to_look_open_is_not_taken() -> None:
    codec = codecs()["aes"]
    data = stored(codec, CHUNK)
    with pytest.raises(UnsealedChunk):
        decoded(codec, resummed(data[:11] + b"\0" + data[12:]), CHUNK)


def test_another_version_is_told_from_damage() -> None:
    for codec in codecs().values():
        data = stored(codec, CHUNK)
        other = data[:8] + (VERSION + 1).to_bytes(2, "little") + data[10:]
        with pytest.raises(ForeignChunk):
            decoded(codec, other, CHUNK)
        for method_at in (10, 11):
            unknown = data[:method_at] + b"\x77" + data[method_at + 1 :]
            with pytest.raises(ForeignChunk):
                decoded(codec, resummed(unknown), CHUNK)


def test_noise_is_no_chunk() -> None:
    rng = random.Random(5)
    for codec in codecs().values():
        for length in (0, 1, 7, 8, 35, 36, 135, 136, 137, 5000):
            for front in (b"", b"FOREBAYC", b"FOREBAY1"):
                with pytest.raises(CorruptChunk):
                    decoded(codec, (front + rng.randbytes(length))[:length], CHUNK)


def test_a_chunk_that_claims_to_unpack_to_much_more_asks_for_no_memory() -> None:
    """Its lengths agree with each other, but not with its header."""
    codec = codecs()["zstd"]
    data = stored(codec, holding(bytes(64_000)))
    bomb = data[:96] + (1 << 40).to_bytes(8, "little") + data[104:]
    with pytest.raises(CorruptChunk, match="envelope says"):
        decoded(codec, resummed(bomb), CHUNK)


# --- keys ----------------------------------------------------------------------------------------------


def test_the_wrong_key_is_a_missing_key_and_no_damage() -> None:
    for compress in (False, True):
        data = stored(Codec(compress=compress, keys=KeyRing([OLD])), CHUNK)
        for codec in (Codec(keys=KeyRing([FOREIGN])), Codec()):
            with pytest.raises(MissingKey, match=OLD.id.hex()):
                decoded(codec, data, CHUNK)
            with pytest.raises(MissingKey):
                codec.front(data)
        assert check_sealed(data).key_id == OLD.id


def test_after_a_rotation_the_new_key_writes_and_the_old_one_still_reads() -> None:
    before, after = Codec(keys=KeyRing([OLD])), Codec(keys=KeyRing([OLD, NEW]))
    old = stored(before, CHUNK)
    decoded(after, old, CHUNK)
    new = stored(after, CHUNK)
    assert decode_envelope(new).key_id == NEW.id
    with pytest.raises(MissingKey):
        decoded(before, new, CHUNK)
    decoded(Codec(keys=KeyRing([NEW])), new, CHUNK)


def test_nothing_of_a_sealed_chunk_can_be_read_but_what_is_stated() -> None:
    """No token, tenant, parent, namespace or payload: only group, chain key, lengths and the key's id."""
    for kind in ("aes", "zstd+aes"):
        data = stored(codecs()[kind], CHUNK)
        header = CHUNK.header
        for hidden in (header.tokens[:16], b"acme", header.parent, header.namespace, CHUNK.payload[:16], NEW.secret):
            assert hidden not in data
        assert data.count(header.key) == 1 and data.index(header.key) == 16
        assert data.count(NEW.id) == 1


def test_two_copies_of_one_chunk_have_nothing_in_common() -> None:
    codec = codecs()["aes"]
    one, other = stored(codec, CHUNK), stored(codec, CHUNK)
    assert one[56:88] != other[56:88]
    same = sum(a == b for a, b in zip(one[ENVELOPE_BYTES:], other[ENVELOPE_BYTES:], strict=True))
    assert same < len(one) / 50
