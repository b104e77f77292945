"""The Triton that the kernels are tested with is the one that the project asks for."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def test_triton_is_of_a_version_that_the_extra_allows() -> None:
    pytest.importorskip("triton", reason="no test of a Triton kernel can run: pip install 'forebay[triton]'")
    extras = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (wanted,) = map(Requirement, extras["triton"])
    assert wanted.specifier.contains(version("triton"))
