"""Compiles in a process of its own: this one may have a Triton that interprets."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "kernels.md"
KERNELS = 18


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m forebay.kernels ARGUMENTS`."""
    return module("forebay.kernels", *arguments)


def module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m ARGUMENTS`, with nothing compiled before and nothing left behind."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    line = [sys.executable, "-m", *arguments]
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)


def assert_within_budget(target: str) -> None:
    """One configuration of every kernel: no more registers and stack than allowed, no tensor instruction lost."""
    found = command("compile", "--target", target, "--first", "--check", str(PAGE))
    assert found.returncode == 0, found.stderr
    kernels = {line.split()[1] for line in found.stdout.splitlines() if line.startswith(target)}
    assert len(kernels) == KERNELS, found.stdout
