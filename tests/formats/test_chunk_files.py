"""Chunk files, as fsck and a store without a manifest see them. (Flipped bytes: `tests/tiers/test_fs_damage.py`.)"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import CorruptChunk
from forebay.tiers.fs.device import Device
from forebay.tiers.fs.inspect import check_payload
from tests.formats.mutations import PATTERNS
from tests.tiers.fs_rig import FsRig
from tests.tiers.support import Pool, make_chunk


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FsRig]:
    pool = Pool()
    made = FsRig(pool, tmp_path / "fs")
    yield made
    made.close()
    pool.close()


def test_a_file_cut_at_any_length_is_no_chunk(rig: FsRig) -> None:
    chunk = make_chunk(granule=64)
    with rig.opened() as driver:
        driver.store(chunk)
    path, device = rig.file(chunk), Device(rig.paths, "off", fsync=False)
    check_payload(device, str(path))
    for length in range(chunk.length - 1, -1, -1):
        os.truncate(path, length)
        with pytest.raises(CorruptChunk):
            check_payload(device, str(path))


def test_a_store_without_a_manifest_serves_a_damaged_file_as_a_miss(rig: FsRig) -> None:
    """The load that finds its file by name alone: nothing but the file itself tells what it should be."""
    chunk = make_chunk(granule=64)
    with rig.opened() as driver:
        driver.store(chunk)
    path = rig.file(chunk)
    good = path.read_bytes()
    used = [at for at in range(len(good)) if good[at] or at % 211 == 0]
    with rig.opened(quarantine_files=4) as driver:
        for number, at in enumerate(used[::3]):
            rig.tier._shelf.manifest.drop(chunk.id)
            path.write_bytes(good[:at] + bytes([good[at] ^ PATTERNS[number % 3]]) + good[at + 1 :])
            assert not driver.serves(chunk), at
        rig.tier._shelf.manifest.drop(chunk.id)
        path.write_bytes(good)
        assert driver.serves(chunk)
