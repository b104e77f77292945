"""What a new process makes of what the old one left: everything that is good, at once, under the same cap."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from forebay.kvstore.header import decode_header
from forebay.kvstore.identity import pack_tokens
from forebay.tiers.base import ChunkId, ClearScope, Query
from forebay.tiers.fs import state
from forebay.tiers.fs import tier as fs_tier
from forebay.tiers.fs.keeper import Keeper
from forebay.tiers.fs.manifest import PAGE_CHUNKS, Manifest, Record, tenant_digest
from forebay.tiers.fs.opening import directory_id, lock_directory, make_folders
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.state import State
from forebay.tiers.fs.tier import FsTier
from tests.tiers.fs_rig import FsRig
from tests.tiers.many_files import measure
from tests.tiers.support import NAMESPACE, ROOT, Driver, InProcess, make_chunk, numbered

BIG = 48 << 10


def all_reconciled(driver: Driver) -> None:
    driver.until(lambda: driver.value("reconciled") == 1, "the walk")


def test_chunks_bytes_and_recency_survive_a_restart(rig: FsRig) -> None:
    chunks = [numbered(i, granule=BIG) for i in range(8)]
    with rig.opened(quota_bytes=1 << 20) as driver:
        for chunk in chunks:
            driver.store(chunk)
        assert driver.has(chunks[0])
        before = driver.value("bytes")
    with rig.opened() as driver:
        assert driver.value("bytes") == before == rig.usage()
        for i in range(4):
            driver.store(numbered(100 + i, granule=BIG))
        assert driver.has(chunks[0]), "used last before the restart"
        assert not driver.has(chunks[1])
        assert driver.serves(chunks[0])


def test_a_partial_hit_works_after_a_restart(rig: FsRig) -> None:
    chunk = make_chunk(range(64))
    with rig.opened() as driver:
        driver.store(chunk)
    with rig.opened() as driver:
        query = Query(0, b"x" * 32, chunk.header.parent, pack_tokens([*range(48), *[3] * 16]))
        (found,) = driver.lookup(query)
        assert (found.outcome, found.matched) == ("hit", 48)
        assert driver.value("headers_read") == 1
        assert driver.lookup(query) == [found]
        assert driver.value("headers_read") == 1, "the header is kept"


def test_what_is_held_is_announced_after_a_restart_once(rig: FsRig) -> None:
    old, new = [numbered(i) for i in range(5)], numbered(9)
    with rig.opened() as driver:
        for chunk in old:
            driver.store(chunk)
    with rig.opened() as driver:
        driver.store(new)
        driver.until(lambda: len(driver.changes) >= 6, "announcements")
        all_reconciled(driver)
        driver.pump()
        assert sorted(c.chunk.key for c in driver.changes) == sorted(c.id.key for c in [*old, new])
        assert all(change.stored for change in driver.changes)
        headers = {change.chunk: decode_header(change.header) for change in driver.changes}
        assert headers == {chunk.id: chunk.header for chunk in [*old, new]}


@pytest.mark.parametrize(
    "scope", [ClearScope(), ClearScope(b"n" * 32, "acme"), ClearScope(b"n" * 32, None, 1, b"r" * 32)], ids=str
)
def test_many_chunks_are_cleared_in_steps_so_that_nobody_waits_for_all_of_them(
    tmp_path: Path, scope: ClearScope
) -> None:
    manifest = Manifest(tmp_path, 64 << 20)
    parent = b"r" * 32
    for number in range(2 * PAGE_CHUNKS + 5):
        record = Record(
            parent=parent, namespace=b"n" * 32, unit=b"u" * 8, start=32 * number, tokens=32, header=4096, length=8192,
            disk=8192, tenant=tenant_digest("acme"),
        )  # fmt: skip
        parent = number.to_bytes(32, "big")
        manifest.commit(ChunkId(0, parent), record)
    counts = [len(gone) for gone in manifest.leave_scope(scope, "cleared")]
    assert sum(counts) == 2 * PAGE_CHUNKS + 5 and max(counts) <= PAGE_CHUNKS
    assert manifest.count() == 0
    manifest.close()


class _Unhurried(Keeper):
    """Walks when the test says so."""

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "scope", [ClearScope(), ClearScope(NAMESPACE, ""), ClearScope(NAMESPACE, None, 1, ROOT)], ids=str
)
def test_a_clear_is_not_done_before_files_that_no_manifest_names_are_cleared_too(
    rig: FsRig, monkeypatch: pytest.MonkeyPatch, scope: ClearScope
) -> None:
    chunks = [numbered(i) for i in range(5)]
    with rig.opened() as driver:
        for chunk in chunks:
            assert driver.store(chunk).ok
    rig.lose_manifest()
    monkeypatch.setattr(fs_tier, "REBUILD_FIRST_S", 0.0)
    tier = FsTier("f", {"directory": str(rig.directory)}, new_keeper=_Unhurried)
    driver = rig.driver = Driver(rig.pool, InProcess(tier, rig.pool))
    steps = tier.clear_steps(scope)
    while next(steps) is not None:
        pass
    assert next(steps) is None, "it waits for the walk"
    while not tier._keeper.reconciled:
        tier._keeper.step()
    assert sum(count or 0 for count in steps) == len(chunks)
    assert not any(driver.serves(chunk) for chunk in chunks)


@pytest.mark.parametrize("loss", ["removed", "garbage", "cut short", "other boot", "other directory", "asked for"])
def test_a_manifest_that_is_lost_or_not_to_be_trusted_is_built_anew(
    rig: FsRig, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [numbered(i) for i in range(10)]
    with rig.opened() as driver:
        for chunk in chunks:
            driver.store(chunk)
    folder = rig.directory / ".state"
    data = folder / "manifest" / "data.mdb"
    match loss:
        case "removed":
            rig.lose_manifest()
        case "garbage":
            data.write_bytes(os.urandom(data.stat().st_size))
        case "cut short":
            os.truncate(data, 100)
        case "other boot":
            marker = (folder / "marker.json").read_text()
            (folder / "marker.json").write_text(marker.replace('"clean":true', '"clean":false'))
            monkeypatch.setattr(state, "_boot_id", lambda: "another boot")
        case "other directory":
            rig.paths.lock.write_text("0" * 32)
        case "asked for":
            rig.options["recover"] = "rebuild"
    rig.file(chunks[0]).unlink()
    with rig.opened() as driver:
        assert not driver.has(chunks[0]), "it comes from the files, not from the old manifest"
        assert all(driver.serves(chunk) for chunk in chunks[1:])
        assert driver.value("bytes") == rig.usage()
        assert driver.value("adopted") == 9


def test_a_manifest_whose_process_keeps_dying_is_given_up(rig: FsRig) -> None:
    chunk = make_chunk()
    with rig.opened() as driver:
        driver.store(chunk)
    found = State(rig.directory / ".state", rig.paths.lock.read_text()[:32])
    reasons = []
    for _ in range(state.CRASHES_MAX + 1):
        reasons.append(found.open(rebuild=False))
        found = State(found.path, found.directory)
    assert reasons[:-1] == [None] * state.CRASHES_MAX
    assert "in a row" in (reasons[-1] or "")


def test_files_and_records_are_brought_together_in_the_background(rig: FsRig) -> None:
    kept, gone, copied = numbered(1), numbered(2), numbered(3)
    with rig.opened() as driver:
        for chunk in (kept, gone, copied):
            driver.store(chunk)
        data = rig.file(copied).read_bytes()
        driver.engine.forget([copied.id], "cleared")
        driver.until(lambda: not rig.file(copied).exists(), "the file to go")
    rig.file(gone).unlink()
    rig.file(copied).write_bytes(data)
    with rig.opened() as driver:
        all_reconciled(driver)
        assert [driver.has(chunk) for chunk in (kept, gone, copied)] == [True, False, True]
        assert driver.serves(copied)
        assert driver.value("bytes") == rig.usage()
        assert (driver.value("vanished"), driver.value("adopted")) == (1, 1)


def test_unfinished_files_of_dead_writers_are_removed(rig: FsRig) -> None:
    with rig.opened() as driver:
        driver.store(make_chunk())
    for name in ("123-0", "probe-77"):
        (rig.paths.tmp / name).write_bytes(bytes(100_000))
    with rig.opened() as driver:
        assert list(rig.paths.tmp.iterdir()) == []
        assert driver.value("leftovers_removed") == 2
        assert driver.value("bytes") == rig.usage()


def test_a_smaller_quota_holds_from_the_start(rig: FsRig) -> None:
    chunks = [numbered(i, granule=BIG) for i in range(16)]
    with rig.opened(quota_bytes=4 << 20) as driver:
        for chunk in chunks:
            driver.store(chunk)
    with rig.opened(quota_bytes=1 << 20) as driver:
        assert rig.usage() <= 1 << 20
        assert driver.serves(chunks[-1])


def test_a_smaller_quota_holds_from_the_start_without_a_manifest(rig: FsRig) -> None:
    with rig.opened(quota_bytes=4 << 20) as driver:
        for i in range(16):
            driver.store(numbered(i, granule=BIG))
    rig.lose_manifest()
    with rig.opened(quota_bytes=1 << 20) as driver:
        assert rig.usage() <= 1 << 20
        assert driver.value("bytes") == rig.usage()
        assert driver.value("chunks") > 5


def test_nothing_is_stored_before_the_files_are_counted(rig: FsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.opened(quota_bytes=1 << 20) as driver:
        for i in range(9):
            driver.store(numbered(i, granule=BIG))
    rig.lose_manifest()
    monkeypatch.setattr("forebay.tiers.fs.tier.REBUILD_FIRST_S", 0.0)
    monkeypatch.setattr("forebay.tiers.fs.keeper.Keeper.start", lambda self: None)
    with rig.opened() as driver:
        assert driver.store(numbered(50, granule=BIG)).reason == "full"
        assert rig.usage() <= 1 << 20
        while not rig.tier._keeper.reconciled:
            rig.tier._keeper.step()
        assert driver.store(numbered(50, granule=BIG)).ok
        assert rig.usage() <= 1 << 20
        monkeypatch.undo()
        rig.tier._keeper.start()


def test_before_the_walk_a_load_finds_its_file_by_name(rig: FsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = make_chunk(granule=65_537)
    with rig.opened() as driver:
        driver.store(chunk)
    rig.lose_manifest()
    monkeypatch.setattr("forebay.tiers.fs.tier.REBUILD_FIRST_S", 0.0)
    monkeypatch.setattr("forebay.tiers.fs.keeper.STEP_PAUSE_S", 0.2)
    with rig.opened() as driver:
        assert driver.serves(chunk)


def test_namespaces_are_kept(rig: FsRig) -> None:
    with rig.opened():
        rig.tier.note_namespace(b"a" * 32, b"encoded")
        rig.tier.note_namespace(b"a" * 32, b"encoded")
        rig.tier.note_namespace(b"short", b"encoded")
    assert [path.read_bytes() for path in rig.paths.namespaces.iterdir()] == [b"encoded"]
    with rig.opened() as driver:
        assert driver.value("namespaces") == 1
        assert driver.value("bytes") == rig.usage()


def test_two_hundred_thousand_chunks_start_in_under_two_seconds(rig: FsRig, tmp_path: Path) -> None:
    paths = Paths(rig.directory)
    make_folders(paths)
    lock = lock_directory(paths)
    marker = State(rig.directory / ".state", directory_id(lock, paths))
    marker.open(rebuild=False)
    options = FsOptions(directory=str(rig.directory), quota_bytes=100 << 30)
    manifest = Manifest(marker.manifest, options.map_bytes)
    count = 200_000
    keys = [os.urandom(32) for _ in range(count)]
    with manifest._writing() as txn:
        for i, key in enumerate(keys):
            record = Record(keys[i - 1], b"n" * 32, bytes(8), 0, 256, 4096, 1 << 20, 1 << 18, 0, False)
            manifest._commit(txn, ChunkId(0, key), record, found=False)
    manifest.close()
    marker.close()
    os.close(lock)
    began = time.monotonic()
    tier = FsTier("f", {"directory": str(rig.directory), "quota_bytes": 100 << 30})
    took = time.monotonic() - began
    found = tier.lookup([Query(0, key, b"p" * 32, b"") for key in keys[:1000]])
    began = time.monotonic()
    tier.lookup([Query(0, key, b"p" * 32, b"") for key in keys[:1000]])
    lookups = time.monotonic() - began
    tier.close()
    assert took < 2.0, f"start took {took:.2f} s"
    assert {result.outcome for result in found} == {"hit"}
    assert lookups < 1.0, f"1,000 lookups took {lookups:.3f} s"


def test_a_store_serves_long_before_it_has_seen_all_files(tmp_path: Path) -> None:
    found = measure(tmp_path, 20_000, whole=False)  # long: python -m tests.tiers.many_files
    print(found)
    assert found.chunks == 20_004
    assert found.walked < 20_000, "it has waited for the walk"
