"""What a codec stores comes back to the last bit, takes no more room than promised, and less where it can."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ConfigError, CorruptChunk
from forebay.tiers.codec.codec import FRONT_BYTES, Codec, front_length, open_codec
from forebay.tiers.codec.envelope import Compression, decode_envelope, is_enveloped
from forebay.tiers.codec.errors import MissingLibrary, UnsealedChunk
from forebay.tiers.codec.keys import KeyRing
from tests.tiers.codec.support import NEW, OLD, codecs, decoded, floats, holding, stored
from tests.tiers.support import make_chunk

KINDS = tuple(codecs())
PIECES = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.builds(lambda value, count: bytes([value]) * count, st.integers(0, 255), st.integers(1, 3000)),
    st.builds(floats, st.integers(1, 400), st.integers(0, 9)),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pieces=st.lists(PIECES, min_size=1, max_size=4),
    units=st.integers(1, 6),
    tenant=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
    group=st.integers(0, 5),
)
def test_a_chunk_of_any_content_comes_back_byte_for_byte(
    kind: str, pieces: list[bytes], units: int, tenant: str, group: int
) -> None:
    codec = codecs()[kind]
    payload = b"".join(pieces) * units
    chunk = holding(payload, range(16 * units), tenant, group)
    data = stored(codec, chunk)
    front = decoded(codec, data, chunk)
    assert front.header == chunk.header
    assert front.stored_length == len(data) <= codec.stored_bytes_max(len(chunk.block), len(payload))


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_is_given_is_filled_and_nothing_behind_it(kind: str) -> None:
    codec, chunk = codecs()[kind], holding(floats(4000))
    most = codec.stored_bytes_max(len(chunk.block), len(chunk.payload))
    buffer = bytearray(b"\xee" * (most + 100))
    data = codec.encode(chunk.block, memoryview(chunk.payload), memoryview(buffer)[:most])
    assert bytes(data) == buffer[: len(data)]
    assert set(buffer[len(data) :]) == {0xEE}
    decoded(codec, bytes(data), chunk)


@pytest.mark.parametrize("kind", KINDS)
def test_the_front_tells_the_header_without_the_payload(kind: str) -> None:
    codec, chunk = codecs()[kind], holding(floats(40_000))
    data = stored(codec, chunk)
    first = data[:FRONT_BYTES]
    assert front_length(first) <= FRONT_BYTES
    front = codec.front(data[: front_length(first)])
    assert (front.header, front.block, front.stored_length) == (chunk.header, chunk.block, len(data))
    assert front.sealed is (kind in ("aes", "zstd+aes"))


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
def test_the_front_of_a_chunk_with_a_long_header_is_found_in_two_steps(kind: str) -> None:
    codec = codecs().get(kind, Codec())
    chunk = make_chunk(range(4096), granule=64)
    data = chunk.block + chunk.payload if kind == "plain" else stored(codec, chunk)
    first = data[:FRONT_BYTES]
    while front_length(first) > len(first):
        first = data[: front_length(first)]
    assert codec.front(first).header == chunk.header


def test_numbers_of_two_and_of_four_bytes_shrink_by_their_planes() -> None:
    for width in (2, 4):
        payload = floats(80_000, width=width)
        data = stored(codecs()["zstd"], holding(payload))
        planes = decode_envelope(data).compression
        assert planes in (Compression.ZSTD_PLANES_2, Compression.ZSTD_PLANES_4)
        assert len(data) < 0.92 * len(payload)


def test_text_shrinks_without_planes() -> None:
    payload = b"the same words come again and again, with numbers like 12 and 345 between them. " * 500
    data = stored(codecs()["zstd"], holding(payload))
    assert decode_envelope(data).compression is Compression.ZSTD
    assert len(data) < 0.2 * len(payload)


@pytest.mark.parametrize("kind", ["zstd", "zstd+aes"])
def test_what_does_not_shrink_is_stored_as_it_is(kind: str) -> None:
    chunk = make_chunk(granule=50_000)
    codec = codecs()[kind]
    data = stored(codec, chunk)
    assert decode_envelope(data).compression is Compression.NONE
    assert len(data) <= codec.stored_bytes_max(len(chunk.block), len(chunk.payload))
    decoded(codec, data, chunk)


def test_a_codec_without_options_reads_what_was_compressed_and_still_writes_plainly() -> None:
    chunk, plain = holding(floats(4000)), Codec()
    decoded(plain, stored(codecs()["zstd"], chunk), chunk)
    assert decode_envelope(stored(plain, chunk)).compression is Compression.NONE
    assert not plain.active and codecs()["zstd"].active and codecs()["aes"].active


def test_plain_chunks_are_read_too_unless_the_tier_encrypts() -> None:
    chunk = make_chunk()
    plain = chunk.block + chunk.payload
    assert not is_enveloped(plain)
    for kind in ("none", "zstd"):
        front = decoded(codecs()[kind], plain, chunk)
        assert front.stored_length == len(plain) and not front.sealed
        with pytest.raises(CorruptChunk):
            decoded(codecs()[kind], plain[:-1], chunk)
    for kind in ("aes", "zstd+aes"):
        for data in (plain, stored(codecs()["zstd"], chunk)):
            with pytest.raises(UnsealedChunk):
                decoded(codecs()[kind], data, chunk)
            with pytest.raises(UnsealedChunk):
                codecs()[kind].front(data)


def test_a_slot_that_is_too_small_is_not_written_to() -> None:
    for kind, codec in codecs().items():
        chunk = holding(floats(4000))
        buffer = bytearray(b"\xee" * (len(chunk.payload) - 1))
        with pytest.raises(CorruptChunk):
            codec.decode(stored(codec, chunk), memoryview(buffer))
        assert set(buffer) == {0xEE}, kind


def test_threads_share_a_codec() -> None:
    codec = Codec(compress=True, keys=KeyRing([OLD, NEW]))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                chunk = holding(floats(3000, 100 * number + turn), range(number, number + 32))
                decoded(codec, stored(codec, chunk), chunk)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_compressed_chunk_without_the_library_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = holding(floats(4000))
    data = stored(codecs()["zstd"], chunk)
    plain = Codec()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingLibrary, match=r"forebay\[compress\]"):
        decoded(plain, data, chunk)
    assert plain.front(data).header == chunk.header, "its header can be read all the same"


def test_options_that_name_no_codec_are_refused() -> None:
    assert not open_codec("t", "none", "").active
    with pytest.raises(ConfigError, match="lz5"):
        open_codec("t", "lz5", "")
    with pytest.raises(ConfigError, match="absolute"):
        open_codec("t", "none", "keys/1.key")


@pytest.mark.parametrize(
    ("module", "compress", "extra"), [("zstandard", "zstd", "compress"), ("cryptography", "none", "encrypt")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, compress: str, extra: str
) -> None:
    key = ""
    if extra == "encrypt":
        key = f"{tmp_path}/1.key"
        Path(key).touch(mode=0o600)
        Path(key).write_bytes(b"k" * 32)
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"forebay\[{extra}\]"):
        open_codec("t", compress, key)
