"""Checking and listing a directory from its files alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.errors import NotWritable
from forebay.tiers.fs.fsck import check_directory, list_directory
from tests.tiers.fs_rig import FsRig
from tests.tiers.support import Made, numbered


@pytest.fixture
def chunks(rig: FsRig) -> list[Made]:
    """Six stored chunks of odd sizes; the tier is closed."""
    made = [numbered(i, granule=1000 + 4096 * i) for i in range(6)]
    with rig.opened() as driver:
        for chunk in made:
            driver.store(chunk)
    return made


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_healthy_directory_is_clean(rig: FsRig, chunks: list[Made]) -> None:
    seen: list[tuple[int, int]] = []
    report = check_directory(rig.directory, repair=False, progress=lambda files, size: seen.append((files, size)))
    assert report.clean
    assert (report.files, report.chunks, report.problems) == (6, 6, [])
    assert (report.manifest, report.unindexed, report.vanished) == ("ok", 0, 0)
    assert report.bytes == sum(path.stat().st_blocks * 512 for path in rig.files())
    assert seen[-1] == (6, report.bytes)
    assert not report.in_use


def test_each_kind_of_damage_is_listed_with_its_reason(rig: FsRig, chunks: list[Made]) -> None:
    spoil(rig.file(chunks[0]), 60)
    spoil(rig.file(chunks[1]), 5000)
    os.truncate(rig.file(chunks[2]), 4500)
    rig.file(chunks[3]).write_bytes(rig.file(chunks[4]).read_bytes())
    (rig.file(chunks[5]).parent / "README").write_text("hello")
    report = check_directory(rig.directory, repair=False)
    assert not report.clean
    assert (report.files, report.chunks, report.problem_count) == (7, 2, 5)
    found = {Path(problem.path).name: problem.why for problem in report.problems}
    reasons = ("header checksum", "granule", "bytes, its header says", "another chunk")
    for chunk, words in zip(chunks, reasons, strict=False):
        assert words in found[rig.file(chunk).name]
    assert "no chunk's" in found["README"]
    assert len(rig.files()) == 7, "nothing was changed"


def test_a_file_in_the_wrong_folder_is_listed(rig: FsRig, chunks: list[Made]) -> None:
    path = rig.file(chunks[0])
    wrong = rig.paths.chunks / "zz"
    wrong.mkdir()
    path.rename(wrong / path.name)
    (problem,) = check_directory(rig.directory, repair=False).problems
    assert "wrong folder" in problem.why


def test_repair_moves_bad_files_aside_and_a_second_check_is_clean(rig: FsRig, chunks: list[Made]) -> None:
    for chunk in chunks[:3]:
        spoil(rig.file(chunk), 4096)
    (rig.paths.tmp / "99-1").write_bytes(b"unfinished")
    report = check_directory(rig.directory, repair=True)
    assert [problem.repaired for problem in report.problems] == [True] * 3
    assert len(report.leftovers) == 1
    again = check_directory(rig.directory, repair=True)
    assert again.clean
    assert (again.chunks, again.quarantined, again.vanished, again.leftovers) == (3, 3, 3, [])
    with rig.opened() as driver:
        assert [driver.serves(chunk) for chunk in chunks] == [False] * 3 + [True] * 3
        assert driver.value("bytes") == rig.usage()


def test_a_directory_in_use_can_be_checked_and_repaired(rig: FsRig, chunks: list[Made]) -> None:
    with rig.opened() as driver:
        spoil(rig.file(chunks[0]), 4096)
        (rig.paths.tmp / "someone-writes").write_bytes(b"")
        assert check_directory(rig.directory, repair=True).in_use
        assert (rig.paths.tmp / "someone-writes").exists(), "it may be in use"
        assert not driver.serves(chunks[0])
        assert all(driver.serves(chunk) for chunk in chunks[1:])


def test_the_manifest_of_a_running_store_can_be_read_from_another_process(rig: FsRig, chunks: list[Made]) -> None:
    code = "import sys; from pathlib import Path; from forebay.tiers.fs.fsck import check_directory as check; "
    code += "report = check(Path(sys.argv[1]), False); print(report.in_use, report.manifest, report.unindexed)"
    with rig.opened() as driver:
        done = subprocess.run(
            [sys.executable, "-c", code, str(rig.directory)], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.stdout.split() == ["True", "ok", "0"], done.stdout + done.stderr
        assert driver.serves(chunks[0])


def test_files_and_records_that_miss_each_other_are_counted(rig: FsRig, chunks: list[Made]) -> None:
    rig.file(chunks[0]).unlink()
    report = check_directory(rig.directory, repair=False)
    assert report.clean, "a store settles this by itself"
    assert (report.vanished, report.unindexed) == (1, 0)
    rig.lose_manifest()
    report = check_directory(rig.directory, repair=False)
    assert (report.manifest, report.unindexed) == ("absent", 0)


def test_a_manifest_that_cannot_be_read_does_not_stop_the_check(rig: FsRig, chunks: list[Made]) -> None:
    (rig.directory / ".state" / "manifest" / "data.mdb").write_bytes(b"garbage" * 5000)
    report = check_directory(rig.directory, repair=False)
    assert report.clean
    assert report.manifest.startswith("unreadable")
    assert report.chunks == 6


def test_the_listing_has_every_good_chunk_with_its_header(rig: FsRig, chunks: list[Made]) -> None:
    spoil(rig.file(chunks[0]), 60)
    listed = {item.header.key: item for item in list_directory(rig.directory)}
    assert set(listed) == {chunk.header.key for chunk in chunks[1:]}
    item = listed[chunks[3].header.key]
    assert item.header == chunks[3].header
    assert item.path == str(rig.file(chunks[3]))
    assert item.bytes == rig.file(chunks[3]).stat().st_blocks * 512


def test_what_is_no_file_tiers_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotWritable, match="no file tier's directory"):
        check_directory(tmp_path, repair=False)
