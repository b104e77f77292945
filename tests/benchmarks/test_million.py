"""The long context in its short form: 16,384 tokens through a device that holds half of them, killed in the middle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forebay.testing.cluster import wait_for

pytest.importorskip("transformers")

ANSWER = 6


class Command:
    """One run of the command. What it prints is read as it comes."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.popen = subprocess.Popen(
            [
                sys.executable, "-m", "benchmarks.million", str(folder), "--tokens", "16384", "--rows", str(rows),
                "--answer", str(ANSWER), "--dtype", "float64",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.said += line

    def kill(self) -> None:
        """This and every process that it has started, at once and without a word."""
        pids = [*_children(self.popen.pid), self.popen.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.popen.wait(30)
        wait_for("processes to be gone", lambda: not any(_runs(pid) for pid in pids))

    def answer(self) -> list[int]:
        """What it has answered, once it has ended."""
        assert self.popen.wait(240) == 0, self.said
        self._reader.join(10)
        found = re.search(r"answer: \[(.*)\]", self.said)
        assert found is not None, self.said
        return [int(token) for token in found[1].split(",")]

    def figure(self, pattern: str) -> int:
        """The last number that stands where `pattern` says."""
        return int(re.findall(pattern, self.said)[-1].replace(",", ""))


def _chunks(folder: Path) -> int:
    """Files of chunks, of which each chunk has one for rows and one for index keys."""
    return sum(1 for _, _, names in os.walk(folder) for name in names if len(name) >= 32)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_killed_in_the_middle_it_goes_on_from_what_is_stored(tmp_path: Path) -> None:
    """And answers as it does where everything is on the device."""
    first = Command(tmp_path / "hot", rows=4096)
    try:
        files = tmp_path / "hot" / "files"
        wait_for("a third to be stored", lambda: first.popen.poll() or _chunks(files) >= 12)
        assert first.popen.poll() is None, first.said
    finally:
        first.kill()
    again = Command(tmp_path / "hot", rows=4096)
    resumed = again.answer()
    assert 4096 <= again.figure(r"; ([\d,]+) tokens of the prompt were stored") < 16_384
    assert again.figure(r"([\d,]+) rows copied") > 0
    whole = Command(tmp_path / "whole", rows=16_384)
    assert resumed == whole.answer() and len(resumed) == ANSWER
    assert whole.figure(r"([\d,]+) rows copied") == 0
