"""A file tier that compresses or encrypts: the same chunks come back, and who has no key has misses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.main import main
from forebay.errors import ConfigError
from forebay.tiers.base import ClearScope
from forebay.tiers.codec.codec import Codec
from forebay.tiers.codec.keys import load_keys
from forebay.tiers.fs.fsck import check_directory, list_directory
from forebay.tiers.fs.tier import FsTier
from tests.tiers.fs_rig import FsRig
from tests.tiers.support import NAMESPACE, ROOT, Driver, Made, make_chunk, numbered

BIG = 48 << 10
KINDS = ["zstd", "key", "both"]


def key_file(folder: Path, name: str = "key") -> str:
    path = folder / name
    path.write_text(os.urandom(32).hex())
    path.chmod(0o600)
    return str(path)


def options(kind: str, folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if kind in ("zstd", "both"):
        made["compress"] = "zstd"
    if kind in ("key", "both"):
        made["encrypt_key_file"] = key_file(folder)
    return made


def squeezable(number: int, granule: int = BIG) -> Made:
    """A chunk whose payload is mostly zeros."""
    from forebay.kvstore.header import ChunkHeader, granule_checksums

    header = numbered(number, granule=granule).header
    payload = (number.to_bytes(8, "little") + bytes(1000)) * (header.payload_length // 1008 + 1)
    payload = payload[: header.payload_length]
    sums = granule_checksums(memoryview(payload), granule)
    return Made(
        ChunkHeader(
            header.namespace, 0, header.key, header.parent, 0, header.tokens, "", b"", len(payload), sums
        ), payload,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granule", [16, 4096, 30_001, BIG])
def test_what_was_stored_comes_back_also_after_a_restart_and_without_a_manifest(
    rig: FsRig, tmp_path: Path, kind: str, granule: int
) -> None:
    rig.options.update(options(kind, tmp_path))
    chunks = [numbered(1, granule=granule), squeezable(2, granule)]
    with rig.opened() as driver:
        for chunk in chunks:
            assert driver.store(chunk).ok
        assert all(driver.serves(chunk) for chunk in chunks)
        assert driver.value("bytes") == rig.usage()
        assert [found.length for found in driver.lookup(*[c.query() for c in chunks])] == [c.length for c in chunks]
    with rig.opened() as driver:
        assert all(driver.serves(chunk) for chunk in chunks)
    rig.lose_manifest()
    with rig.opened() as driver:
        assert all(driver.serves(chunk) for chunk in chunks)
        assert driver.value("bytes") == rig.usage()
    keys = rig.options.get("encrypt_key_file")
    report = check_directory(rig.directory, False, codec=Codec(keys=load_keys("t", Path(keys)) if keys else None))
    assert (report.clean, report.chunks, report.sealed) == (True, 2, {})


def test_a_partial_match_reads_its_header_through_the_codec(rig: FsRig, tmp_path: Path) -> None:
    rig.options.update(options("both", tmp_path))
    chunk = make_chunk([*range(16), *range(100, 116)], granule=BIG)
    with rig.opened() as driver:
        driver.store(chunk)
    with rig.opened() as driver:
        other = make_chunk([*range(16), *range(200, 216)])
        (found,) = driver.lookup(other.query())
        assert (found.outcome, found.matched) == ("hit", 16)


def test_the_quota_counts_what_a_compressed_chunk_takes(rig: FsRig) -> None:
    with rig.opened(compress="zstd", quota_bytes=1 << 20) as driver:
        for i in range(40):
            assert driver.store(squeezable(i)).ok
        assert driver.value("evicted") == 0, "4 MiB of chunks in 1 MiB"
        assert driver.value("bytes") == rig.usage() <= 1 << 20
        assert all(driver.serves(squeezable(i)) for i in range(40))


def fill(rig: FsRig, count: int = 8) -> list[Made]:
    chunks = [numbered(i, granule=BIG) for i in range(count)]
    with rig.opened() as driver:
        for chunk in chunks:
            assert driver.store(chunk).ok
    return chunks


def reconciled(driver: Driver) -> None:
    driver.until(lambda: driver.value("reconciled") == 1, "the walk")


@pytest.mark.parametrize("manifest", ["kept", "lost"])
def test_with_another_key_all_is_a_miss_and_nothing_is_removed(rig: FsRig, tmp_path: Path, manifest: str) -> None:
    rig.options.update(options("key", tmp_path))
    right = rig.options["encrypt_key_file"]
    chunks = fill(rig)
    files = rig.files()
    if manifest == "lost":
        rig.lose_manifest()
    with rig.opened(encrypt_key_file=key_file(tmp_path, "other")) as driver:
        assert not any(driver.serves(chunk) for chunk in chunks)
        reconciled(driver)
        assert not any(driver.has(chunk) for chunk in chunks)
        assert driver.value("unreadable") == len(chunks)
        assert driver.value("bytes") == rig.usage()
        assert (driver.value("corrupt"), rig.quarantined()) == (0, [])
    assert rig.files() == files
    with rig.opened(encrypt_key_file="") as driver:
        assert not any(driver.serves(chunk) for chunk in chunks)
        reconciled(driver)
    assert rig.files() == files
    with rig.opened(encrypt_key_file=right) as driver:
        reconciled(driver)
        assert all(driver.has(chunk) and driver.serves(chunk) for chunk in chunks)
        assert driver.value("bytes") == rig.usage()


@pytest.mark.parametrize(
    "scope", [ClearScope(NAMESPACE), ClearScope(NAMESPACE, ""), ClearScope(NAMESPACE, "", 1, ROOT)], ids=str
)
def test_a_clear_takes_what_cannot_be_read_and_may_be_meant(rig: FsRig, tmp_path: Path, scope: ClearScope) -> None:
    first, second = key_file(tmp_path, "first"), key_file(tmp_path, "second")
    chunks = [numbered(i, granule=BIG) for i in range(3)]
    with rig.opened(encrypt_key_file=first) as driver:
        for chunk in chunks:
            assert driver.store(chunk).ok
    rig.lose_manifest()
    with rig.opened(encrypt_key_file=second) as driver:
        driver.until(lambda: driver.value("unreadable") == len(chunks), "the walk")
        assert driver.engine.clear_scope(scope) == len(chunks)
    with rig.opened(encrypt_key_file=first) as driver:
        assert not any(driver.serves(chunk) for chunk in chunks)


def test_what_cannot_be_read_makes_room_first_and_can_be_stored_anew(rig: FsRig, tmp_path: Path) -> None:
    rig.options.update(options("key", tmp_path), quota_bytes=1 << 20)
    chunks = fill(rig)
    with rig.opened(encrypt_key_file=key_file(tmp_path, "other")) as driver:
        reconciled(driver)
        assert driver.store(chunks[0]).ok and driver.serves(chunks[0])
        for i in range(20, 26):
            assert driver.store(numbered(i, granule=BIG)).ok
        assert driver.serves(chunks[0]), "what nobody can read has left before it"
        assert driver.value("bytes") == rig.usage() <= 1 << 20


def test_fsck_without_the_key_says_which_key_and_finds_damage_all_the_same(rig: FsRig, tmp_path: Path) -> None:
    rig.options.update(options("both", tmp_path))
    chunks = fill(rig)
    report = check_directory(rig.directory, repair=True)
    assert (report.clean, report.chunks, list(report.sealed.values())) == (True, 0, [8])
    assert (report.unindexed, report.vanished) == (0, 0)
    data = bytearray(rig.file(chunks[0]).read_bytes())
    data[9000] ^= 1
    rig.file(chunks[0]).write_bytes(data)
    report = check_directory(rig.directory, repair=False)
    assert [problem.path for problem in report.problems] == [str(rig.file(chunks[0]))]
    assert list(list_directory(rig.directory)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_any_flipped_byte_or_cut_is_a_miss(rig: FsRig, tmp_path: Path, kind: str) -> None:
    rig.options.update(options(kind, tmp_path))
    chunk = squeezable(1, 4096)
    with rig.opened() as driver:
        driver.store(chunk)
        path = rig.file(chunk)
        good = path.read_bytes()
        for at in [*range(0, min(len(good), 140), 3), *range(140, len(good), max(1, len(good) // 40))]:
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            assert not driver.serves(chunk), at
            assert not driver.has(chunk)
            driver.until(lambda: not path.exists() or driver.store(chunk).ok, "room")
            assert driver.store(chunk).ok
            good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2])
        assert not driver.serves(chunk)


def test_a_plain_chunk_in_a_directory_that_is_encrypted_is_removed_not_kept(rig: FsRig, tmp_path: Path) -> None:
    chunks = fill(rig, 3)
    with rig.opened(**options("key", tmp_path)) as driver:
        assert not any(driver.serves(chunk) for chunk in chunks)
        reconciled(driver)
        driver.until(lambda: rig.files() == [], "they to go")
        assert rig.quarantined() == []
        assert driver.store(chunks[0]).ok and driver.serves(chunks[0])


def test_plain_and_compressed_chunks_may_lie_side_by_side(rig: FsRig) -> None:
    plain, packed = squeezable(1), squeezable(2)
    with rig.opened() as driver:
        driver.store(plain)
    with rig.opened(compress="zstd") as driver:
        driver.store(packed)
        assert driver.serves(plain) and driver.serves(packed)
        assert rig.file(packed).stat().st_size < rig.file(plain).stat().st_size // 4
    with rig.opened(compress="none") as driver:
        assert driver.serves(plain) and driver.serves(packed)


def test_nothing_of_the_tokens_is_in_the_files(rig: FsRig, tmp_path: Path) -> None:
    rig.options.update(options("key", tmp_path))
    (chunk, *_) = fill(rig, 1)
    data = rig.file(chunk).read_bytes()
    assert chunk.header.tokens[:32] not in data and chunk.payload[:64] not in data


@pytest.mark.parametrize(
    ("wrong", "word"), [({"compress": "lzma"}, "compress"), ({"encrypt_key_file": "key"}, "encrypt_key_file")]
)
def test_a_wrong_option_is_named(tmp_path: Path, wrong: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        FsTier("f", {"directory": str(tmp_path), **wrong})


def test_the_command_says_which_key_is_missing_and_takes_it(
    rig: FsRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.options.update(options("both", tmp_path))
    fill(rig, 2)
    assert main(["fsck", "--fs", str(rig.directory)]) == 0
    assert "2 chunks are encrypted under key" in capsys.readouterr().out
    assert main(["fsck", "--fs", str(rig.directory), "--fs-key", rig.options["encrypt_key_file"]]) == 0
    assert "files: 2 chunks" in capsys.readouterr().out
