"""Compressed and encrypted chunks in a bucket."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.kvstore.header import ChunkHeader, granule_checksums
from forebay.testing.buckets import Server
from tests.tiers.s3.conftest import MakeRig
from tests.tiers.s3.rig import S3Rig
from tests.tiers.s3.test_s3_objects import load_together, rested, store_together
from tests.tiers.support import Made, make_chunk


def compressible(number: int, granule: int = 4096) -> Made:
    """A chunk as a model makes them: of bf16 values, whose upper bytes differ little."""
    made, rng = make_chunk([number * 1000 + i for i in range(32)], granule=granule), random.Random(number)
    payload = b"".join(bytes((rng.randrange(256), 0x3E + rng.randrange(3))) for _ in range(len(made.payload) // 2))
    sums = granule_checksums(memoryview(payload), granule)
    h = made.header
    header = ChunkHeader(h.namespace, h.group, h.key, h.parent, h.start, h.tokens, "", b"", len(payload), sums)
    return Made(header, payload)


def key_file(folder: Path, name: str) -> str:
    path = folder / name
    path.write_bytes(random.Random(name).randbytes(32))
    path.chmod(0o600)
    return str(path)


@pytest.fixture(params=["compressed", "encrypted", "both"])
def rig(make_rig: MakeRig, seaweed: Server, tmp_path: Path, request: pytest.FixtureRequest) -> S3Rig:
    options: dict[str, object] = {"pack_wait_s": 0.2, "state_dir": str(tmp_path / "state")}
    if request.param != "encrypted":
        options["compress"] = "zstd"
    if request.param != "compressed":
        options["encrypt_key_file"] = key_file(tmp_path, "a.key")
    return make_rig(seaweed, **options)


def test_chunks_come_back_as_they_were_packed_or_not(rig: S3Rig) -> None:
    chunks = [*(compressible(i, 3000 + 16 * i) for i in range(6)), compressible(50, 256 << 10)]
    store_together(rig, chunks)
    assert rig.value("chunks_packed") == 6
    (found,) = rig.lookup(chunks[-1].query())
    assert found.length == chunks[-1].length, "a slot has to hold what was compressed"
    assert all(rig.serves(chunk) for chunk in chunks) and all(load_together(rig, chunks))
    assert rig.value("bytes") == rig.bytes_in_bucket()
    if rig.options.get("compress"):
        assert rig.bytes_in_bucket() < 0.8 * sum(chunk.length for chunk in chunks)


def test_another_store_with_the_same_options_finds_them(rig: S3Rig, tmp_path: Path) -> None:
    chunks = [*(compressible(i) for i in range(4)), compressible(50, 256 << 10)]
    store_together(rig, chunks)
    other = rig.again(state_dir=None)
    other.until(lambda: other.value("chunks_learned") == 4, "the segment to be found")
    for chunk in chunks:
        (found,) = other.lookup(chunk.query())
        assert (found.outcome, found.length) == ("hit", chunk.length)
    assert all(other.serves(chunk) for chunk in chunks)


def test_a_changed_byte_anywhere_is_a_miss(rig: S3Rig) -> None:
    chunk = compressible(1, 256 << 10)
    rng = random.Random(1)
    for _ in range(6):
        assert rig.store(chunk).ok
        body = bytearray(rig.get(rig.name(chunk)))
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        rig.put(rig.name(chunk), bytes(body))
        assert not rig.serves(chunk)
        rested(rig)


def test_nothing_of_an_encrypted_chunk_is_left_in_clear_text(
    make_rig: MakeRig, seaweed: Server, tmp_path: Path
) -> None:
    rig = make_rig(
        seaweed, encrypt_key_file=key_file(tmp_path, "a.key"), pack_wait_s=0.3, state_dir=str(tmp_path / "state")
    )
    chunks = [*(make_chunk([9_000_000 + 100 * i + j for j in range(16)], tenant="acme-tenant") for i in range(3))]
    chunks.append(make_chunk(range(7_000_000, 7_000_016), granule=300 << 10, tenant="acme-tenant"))
    store_together(rig, chunks)
    assert all(rig.serves(chunk) for chunk in chunks)
    rig.close()
    kept = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    kept += b"".join(rig.get(name) + name.encode() for name in rig.objects())
    for chunk in chunks:
        assert chunk.header.tokens not in kept and chunk.payload[:64] not in kept
    assert b"acme-tenant" not in kept


def test_without_its_key_a_chunk_is_a_miss_that_stays_until_somebody_stores_it(
    make_rig: MakeRig, seaweed: Server, tmp_path: Path
) -> None:
    rig, chunk = make_rig(seaweed, encrypt_key_file=key_file(tmp_path, "a.key")), compressible(1, 256 << 10)
    rig.store(chunk)
    stored = rig.get(rig.name(chunk))
    other = rig.again(encrypt_key_file=key_file(tmp_path, "b.key"))
    assert not other.has(chunk) and other.load(chunk).result.reason == "missing"
    assert other.value("fronts_undecodable") >= 1 and other.value("loads_undecodable") >= 1
    rested(other)
    assert rig.get(rig.name(chunk)) == stored and rig.serves(chunk)
    assert other.store(chunk).ok and other.serves(chunk)


def test_where_chunks_are_encrypted_one_in_clear_text_is_no_hit_and_is_removed(
    make_rig: MakeRig, seaweed: Server, tmp_path: Path
) -> None:
    plain, chunk = make_rig(seaweed), compressible(1, 256 << 10)
    plain.store(chunk)
    sealing = plain.again(encrypt_key_file=key_file(tmp_path, "a.key"))
    assert not sealing.has(chunk) and not sealing.serves(chunk)
    rested(sealing)
    assert plain.objects() == []


def test_options_may_change_over_what_is_there(make_rig: MakeRig, seaweed: Server) -> None:
    plain, chunks = make_rig(seaweed), [compressible(i, 256 << 10) for i in range(2)]
    plain.store(chunks[0])
    packed = plain.again(compress="zstd")
    packed.store(chunks[1])
    assert all(rig.serves(chunk) for rig in (plain, packed) for chunk in chunks)


@pytest.mark.parametrize("options", [{"compress": "lzw"}, {"encrypt_key_file": "here"}, {"encrypt_key_file": "/none"}])
def test_what_cant_be_used_is_refused_by_name(make_rig: MakeRig, seaweed: Server, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_rig(seaweed, **options)
