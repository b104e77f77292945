"""Whatever happens to a file, nobody is served anything but the bytes that were stored."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.errors import CorruptChunk
from forebay.kvstore.identity import pack_tokens
from forebay.tiers.base import Query
from forebay.tiers.fs.device import Device
from forebay.tiers.fs.inspect import check_payload
from tests.tiers.fs_rig import FsRig
from tests.tiers.support import Driver, Made, make_chunk, numbered


def assert_a_counted_miss(rig: FsRig, driver: Driver, chunk: Made, before: float) -> None:
    result = driver.load(chunk).result
    assert (result.ok, result.reason) == (False, "corrupt")
    assert driver.value("loads_corrupt") == before + 1
    assert not rig.file(chunk).exists(), "it is moved aside"
    assert not driver.has(chunk)


def test_every_flipped_byte_is_found(rig: FsRig) -> None:
    """Each byte of the file, header padding included, by the check that loads and fsck share."""
    chunk = make_chunk(granule=64)
    with rig.opened() as driver:
        driver.store(chunk)
    path = rig.file(chunk)
    good = path.read_bytes()
    device = Device(rig.paths, "off", fsync=False)
    check_payload(device, str(path))
    with path.open("r+b", buffering=0) as file:
        for at in range(len(good)):
            os.pwrite(file.fileno(), bytes([good[at] ^ 0x40]), at)
            with pytest.raises(CorruptChunk):
                check_payload(device, str(path))
            os.pwrite(file.fileno(), good[at : at + 1], at)
    check_payload(device, str(path))


@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_a_flipped_byte_is_a_counted_miss_and_the_file_is_moved_aside(rig: FsRig, bit: int) -> None:
    chunk = make_chunk(granule=16)
    places = [*range(0, 64), *range(64, 400, 13), *range(400, 4096, 211), *range(4096, 4096 + 32)]
    with rig.opened(quarantine_files=8) as driver:
        for count, at in enumerate(places):
            driver.store(chunk)
            damage(rig, chunk, lambda data, at=at: data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])  # type: ignore[misc]
            assert_a_counted_miss(rig, driver, chunk, count)
        assert len(rig.quarantined()) == 8, "the quarantine is bounded"
        driver.store(chunk)
        assert driver.serves(chunk), "a good copy can be stored after a bad one"


def damage(rig: FsRig, chunk: Made, change: Callable[[bytes], bytes]) -> None:
    path = rig.file(chunk)
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("granule", [16, 4096, 65_536])
def test_every_truncation_is_a_miss(rig: FsRig, granule: int) -> None:
    chunk = make_chunk(granule=granule)
    size = chunk.length
    lengths = sorted({0, 1, 35, 36, 37, 300, 4095, 4096, 4097, size // 2, size - 4096, size - 1, *range(0, size, 9973)})
    with rig.opened() as driver:
        for count, length in enumerate(x for x in lengths if 0 <= x < size):
            driver.store(chunk)
            os.truncate(rig.file(chunk), length)
            assert_a_counted_miss(rig, driver, chunk, count)


@pytest.mark.parametrize("granule", [16, 4096, 65_536])
@pytest.mark.parametrize("more", [1, 4096])
def test_a_file_that_has_grown_is_a_miss(rig: FsRig, granule: int, more: int) -> None:
    chunk = make_chunk(granule=granule)
    with rig.opened() as driver:
        driver.store(chunk)
        damage(rig, chunk, lambda data: data + bytes(more))
        assert_a_counted_miss(rig, driver, chunk, 0)


@pytest.mark.parametrize("manifest", ["kept", "lost"])
def test_another_chunks_file_under_this_name_is_a_miss(rig: FsRig, manifest: str) -> None:
    ours, theirs = numbered(1), numbered(2)
    with rig.opened() as driver:
        driver.store(ours)
        driver.store(theirs)
    rig.file(ours).write_bytes(rig.file(theirs).read_bytes())
    if manifest == "lost":
        rig.lose_manifest()
    with rig.opened() as driver:
        assert not driver.serves(ours)
        assert driver.serves(theirs)
        assert len(rig.quarantined()) == 1


def test_a_file_of_zeros_is_a_miss(rig: FsRig) -> None:
    chunk = make_chunk()
    with rig.opened() as driver:
        driver.store(chunk)
        damage(rig, chunk, lambda data: bytes(len(data)))
        assert_a_counted_miss(rig, driver, chunk, 0)


def test_what_is_no_regular_file_is_a_miss_and_blocks_nobody(rig: FsRig) -> None:
    secret = rig.directory.parent / "secret"
    with rig.opened() as driver:
        chunk = make_chunk()
        driver.store(chunk)
        secret.write_bytes(rig.file(chunk).read_bytes())
        makers: list[Callable[[Path], None]] = [lambda path: path.symlink_to(secret), os.mkfifo]
        for count, make in enumerate(makers):
            driver.store(chunk)
            rig.file(chunk).unlink()
            make(rig.file(chunk))
            assert_a_counted_miss(rig, driver, chunk, count)


def test_a_file_that_is_gone_is_missing_and_forgotten(rig: FsRig) -> None:
    chunk = make_chunk()
    with rig.opened() as driver:
        empty = driver.value("bytes")
        driver.store(chunk)
        rig.file(chunk).unlink()
        assert driver.has(chunk), "lookups don't go to the disk"
        assert driver.load(chunk).result.reason == "missing"
        assert not driver.has(chunk)
        assert driver.value("bytes") == rig.usage() == empty
        assert driver.store(chunk).ok
        assert driver.serves(chunk)


def test_damage_that_a_partial_lookup_meets_is_moved_aside(rig: FsRig) -> None:
    chunk = make_chunk(range(64))
    with rig.opened() as driver:
        driver.store(chunk)
    damage(rig, chunk, lambda data: data[:50] + b"\xff" + data[51:])
    with rig.opened() as driver:
        query = Query(0, b"x" * 32, chunk.header.parent, pack_tokens(range(32)))
        assert driver.lookup(query)[0].outcome == "miss"
        driver.until(lambda: len(rig.quarantined()) == 1, "the quarantine")


def test_damage_is_told_as_a_removal(rig: FsRig) -> None:
    chunk = make_chunk()
    with rig.opened() as driver:
        driver.store(chunk)
        damage(rig, chunk, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
        driver.load(chunk)
        driver.pump()
        assert [(c.chunk, c.stored, c.reason) for c in driver.changes][1:] == [(chunk.id, False, "corrupt")]


def test_the_quarantine_counts_against_the_quota_and_has_caps_of_its_own(rig: FsRig) -> None:
    with rig.opened(quota_bytes=2 << 20, quarantine_files=5, quarantine_bytes=300_000) as driver:
        for i in range(12):
            chunk = numbered(i, granule=30_000)
            driver.store(chunk)
            damage(rig, chunk, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
            assert not driver.serves(chunk)
            assert sum(path.stat().st_blocks * 512 for path in rig.quarantined()) <= 300_000
            assert driver.value("bytes") == rig.usage()
        assert len(rig.quarantined()) == 4
    with rig.opened() as driver:
        assert driver.value("quarantine_files") == 4
        assert driver.value("bytes") == rig.usage()


def test_foreign_files_are_moved_aside_and_folders_left_alone(rig: FsRig) -> None:
    with rig.opened() as driver:
        driver.store(make_chunk())
    folder = rig.file(make_chunk()).parent
    (folder / "notes.txt").write_text("not a chunk")
    (folder / make_chunk(range(64)).header.key.hex()).write_text("not quite a name")
    (folder / "lost+found").mkdir()
    rig.lose_manifest()
    with rig.opened() as driver:
        assert len(rig.quarantined()) == 2
        assert (folder / "lost+found").is_dir()
        assert driver.value("foreign") == 2
        assert driver.serves(make_chunk())


def test_a_good_file_that_has_taken_a_bad_ones_place_stays(rig: FsRig) -> None:
    chunk = make_chunk()
    with rig.opened() as driver:
        driver.store(chunk)
        bad = rig.file(chunk).stat().st_ino
        driver.engine.forget([chunk.id], "cleared")
        driver.until(lambda: not rig.file(chunk).exists(), "the file to go")
        placeholder = rig.directory / "placeholder"
        placeholder.write_text("so that the number isn't given out again")
        driver.store(chunk)
        good = rig.file(chunk).stat().st_ino
        if good != bad:
            rig.tier._shelf.damaged(chunk.id, bad, "found late, by whoever still read the old file")
            assert driver.serves(chunk)
        rig.tier._shelf.damaged(chunk.id, good, "found in time")
        assert not driver.serves(chunk)
