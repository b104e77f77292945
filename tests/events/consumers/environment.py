"""Where real consumers are: an interpreter that has their packages, made by `make test-consumers`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "FOREBAY_CONSUMERS"
FOLDER = Path(os.environ.get(VARIABLE, Path(__file__).resolve().parents[3] / ".venv-consumers"))

needs_consumers = pytest.mark.skipif(
    not (FOLDER / "bin" / "python").exists(),
    reason=f"no real consumers in {FOLDER}: `make test-consumers` installs them, or {VARIABLE} names an environment",
)


def program(name: str) -> str:
    return str(FOLDER / "bin" / name)
