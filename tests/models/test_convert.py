"""A conversion is done once, published whole, and survives rivals, crashes and full disks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.errors import NoSpace, NotWritable
from forebay.models.convert import convert_gguf, converted_directory
from forebay.models.loading import fingerprint_weights
from tests import checkpoints
from tests.models.gguf_files import write_gguf

CONVERT = """
import sys
from pathlib import Path
from forebay.models.convert import convert_gguf
steps = []
convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda *step: steps.append(step))
print("converted" if steps else "found")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(checkpoints.tiny_llama(tmp_path / "hf"), tmp_path / "model.gguf")


def test_a_second_conversion_finds_the_first(file: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    first = convert_gguf(file, tmp_path / "cache", lambda *step: steps.append(step))
    assert {stage for stage, _, _ in steps} == {"converting weights", "converting tokenizer"}
    assert all(0 <= done <= total for _, done, total in steps)
    steps.clear()
    assert convert_gguf(file, tmp_path / "cache", lambda *step: steps.append(step)) == first
    assert not steps


def test_two_processes_at_once_convert_once(file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONVERT, str(file), str(tmp_path / "cache")]
    rivals = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [rival.communicate(timeout=120)[0].strip() for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0]
    assert sorted(said) == ["converted", "found"]


def test_a_changed_file_is_converted_again_and_the_old_conversion_goes(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = convert_gguf(file, cache)
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = convert_gguf(file, cache)
    assert second != first
    assert second.is_dir()
    assert not first.exists()


def test_another_files_conversion_stays(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes())
    kept = convert_gguf(other, tmp_path / "cache")
    convert_gguf(file, tmp_path / "cache")
    assert kept.is_dir()


def test_what_a_dead_process_left_is_removed(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / ".part-dead").mkdir(parents=True)
    (cache / ".part-dead" / "model-00001.safetensors").write_bytes(b"half")
    (cache / ".part-file").write_bytes(b"half")
    convert_gguf(file, cache)
    assert not list(cache.glob(".part-*"))


def test_an_interrupted_conversion_publishes_nothing(file: Path, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(file, tmp_path / "cache", stop)
    assert not converted_directory(file, tmp_path / "cache").exists()
    assert not list((tmp_path / "cache").glob(".part-*"))


def test_a_full_disk_is_said_plainly(file: Path, tmp_path: Path) -> None:
    limited = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
from pathlib import Path
from forebay.errors import NoSpace
from forebay.models.convert import convert_gguf
try:
    convert_gguf(Path({str(file)!r}), Path({str(tmp_path / "cache")!r}))
except NoSpace as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=120)
    assert "no space left" in done.stdout, done
    assert not converted_directory(file, tmp_path / "cache").exists()
    assert NoSpace.exit_code == 4


def test_a_cache_that_is_no_directory_is_said_plainly(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(NotWritable, match="choose another"):
        convert_gguf(file, tmp_path / "cache")


def test_a_conversion_has_the_fingerprint_of_its_contents(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    found = fingerprint_weights(file, tmp_path / "one")
    assert fingerprint_weights(copy, tmp_path / "two") == found
