"""What another version has left is refused as it is: clearly, neither read nor touched."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import RequestRefused
from forebay.kvstore import formats
from forebay.kvstore.client import StoreClient
from forebay.kvstore.extents import pool_path
from forebay.kvstore.identity import encoded_namespace_id
from tests.cli.commands import told
from tests.kvstore.running import get, put
from tests.kvstore.support import CHUNK, namespace
from tests.kvstore.test_daemon_files import FileStore
from tests.tiers.fs_rig import FsRig
from tests.tiers.support import Pool, numbered

TOKENS = list(range(1, 4 * CHUNK + 1))


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[FileStore]:
    """A store that was killed with chunks in memory and in files."""
    store = FileStore(tmp_path)
    store.start()
    with StoreClient(store.address) as client:
        client.register(namespace())
        assert put(client, namespace(), TOKENS) == 8
    store.settled()
    store.stop(signal.SIGKILL)
    yield store
    if store.process is not None and store.process.poll() is None:
        assert store.stop() == 0
    shutil.rmtree(store.pool, ignore_errors=True)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def start(store: FileStore) -> list[str]:
    return ["store", "--socket", str(store.socket), "--memory", store.memory, "--extent", "2MiB",
            "--fs", str(store.files), "--fs-quota", "64MiB"]  # fmt: skip


def relabel(store: FileStore) -> None:
    (store.pool / "lock").write_text(formats.format_line("pool").replace("layout/1", "layout/7"))


def other_extents(store: FileStore) -> None:
    for extent in store.pool.glob("extent-*"):
        patch(extent, 0, b"FBEXTNT9")


def other_headers(store: FileStore) -> None:
    for extent in store.pool.glob("extent-*"):
        data = extent.read_bytes()
        at = data.find(b"FOREBAY1")
        while at >= 0:
            patch(extent, at + 12, struct.pack("<I", 2))
            at = data.find(b"FOREBAY1", at + 1)


def other_namespace(store: FileStore) -> None:
    (saved,) = (store.pool / "namespaces").iterdir()
    encoded = saved.read_bytes().replace(b"sha256", b"blake3")
    saved.unlink()
    (store.pool / "namespaces" / encoded_namespace_id(encoded).hex()).write_bytes(encoded)


def patch(file: Path, at: int, data: bytes) -> None:
    with open(file, "r+b") as opened:
        os.pwrite(opened.fileno(), data, at)


def test_a_pool_of_another_version_is_refused_and_left_as_it_is_until_the_remedy(killed: FileStore) -> None:
    as_it_was = killed.socket.parent / "copy"
    shutil.copytree(killed.pool, as_it_was)
    for change in (relabel, other_extents, other_headers, other_namespace):
        change(killed)
        before = contents(killed.pool)
        text = told(*start(killed), code=4)
        assert "another version" in text and str(killed.pool) in text and "fsck --pools --repair" in text, change
        # Who gets as far as looking at headers has named itself in the lock file by then.
        assert without_lock(contents(killed.pool)) == without_lock(before), change
        assert not killed.socket.exists(), "what didn't start leaves no socket"
        shutil.rmtree(killed.pool)
        shutil.copytree(as_it_was, killed.pool)
    relabel(killed)
    only = killed.socket.parent / "pools"
    shutil.move(killed.pool, only / killed.pool.name)
    listed = told("fsck", "--pools", "--pool-dir", only, code=1)
    assert "its store is gone" in listed and "layout/7" in listed
    assert "removed" in told("fsck", "--pools", "--pool-dir", only, "--repair", code=1)
    assert list(only.iterdir()) == []
    assert "0 of stores that are gone" in told("fsck", "--pools", "--pool-dir", only)


def without_lock(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if not path.endswith("/lock")}


def test_a_directory_of_another_version_is_refused_and_left_as_it_is(killed: FileStore) -> None:
    lock = killed.files / ".lock"
    ours = lock.read_text()
    lock.write_text(ours.replace("header/1", "header/3"))
    before = contents(killed.files)
    text = told(*start(killed), code=4)
    assert "another version" in text and "header/3" in text and "--fs DIR" in text
    assert contents(killed.files) == before
    # One that says nothing is judged by a file of it.
    lock.write_text(ours[:32])
    for file in killed.chunk_files():
        patch(file, 12, struct.pack("<I", 2))
    before = contents(killed.files)
    text = told(*start(killed), code=4)
    assert "header version 2" in text and str(killed.files) in text
    assert contents(killed.files) == before


def test_a_manifest_of_another_version_is_built_anew_from_the_files(killed: FileStore) -> None:
    marker = killed.files / ".state" / "marker.json"
    ours = marker.read_text()
    marker.write_text(re.sub(r'"version":\d+', '"version":99', ours))
    assert marker.read_text() != ours
    killed.start()
    with StoreClient(killed.address) as client:
        with pytest.raises(RequestRefused, match="this store speaks"):
            client.register(namespace(layout_version=7))
        client.register(namespace())
        assert get(client, namespace(), TOKENS).hit == 4 * CHUNK
    assert killed.settled()["tier.fs.chunks"] == 8


def test_a_file_of_another_version_among_ours_stays_and_counts_until_it_is_replaced(pool: Pool, tmp_path: Path) -> None:
    rig = FsRig(pool, tmp_path / "fs")
    chunks = [numbered(number) for number in range(4)]
    with rig.opened() as driver:
        for chunk in chunks:
            driver.store(chunk)
    patch(rig.file(chunks[0]), 12, struct.pack("<I", 2))
    foreign = rig.file(chunks[0]).read_bytes()
    rig.lose_manifest()
    with rig.opened() as driver:
        driver.until(lambda: driver.value("reconciled") == 1, "the walk")
        assert not driver.serves(chunks[0]) and all(driver.serves(chunk) for chunk in chunks[1:])
        assert driver.value("other_version") == 1 and driver.value("bytes") == rig.usage()
    rig.lose_manifest()
    with rig.opened() as driver:
        driver.until(lambda: driver.value("reconciled") == 1, "the walk")
        assert rig.file(chunks[0]).read_bytes() == foreign
        assert driver.store(chunks[0]).ok and driver.serves(chunks[0])
        assert driver.value("bytes") == rig.usage()


def test_pools_whose_stores_are_gone_are_told_of_when_a_store_starts(tmp_path: Path) -> None:
    pools = tmp_path / "pools"
    left = pool_path(pools, tmp_path / "gone.sock")
    left.mkdir(parents=True)
    (left / "lock").touch()
    (left / "extent-000000").write_bytes(bytes(3 << 20))
    ours = tmp_path / "store.sock"
    command = ["store", "--socket", str(ours), "--memory", "16MiB", "--pool-dir", str(pools)]
    process = subprocess.Popen([sys.executable, "-m", "forebay", *command], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while "ready" not in said:
        said += process.stderr.readline()
    listed = told("fsck", "--pools", "--pool-dir", pools, "--repair", code=1)
    process.terminate()
    assert process.wait(30) == 0
    process.stderr.close()
    assert "1 pools of stores that were killed hold 3 MiB" in said and "fsck --pools" in said
    assert f"{left}: 3.0 MiB" in listed and "in use" in listed, "a living store's pool is never removed"
    assert not left.exists()
