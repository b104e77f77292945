"""The Triton that the kernels are tested with is the one that the project asks for."""

from __future__ import annotations

from importlib.metadata import requires, version

import pytest
from packaging.requirements import Requirement


def test_triton_is_of_a_version_that_the_extra_allows() -> None:
    pytest.importorskip("triton", reason="no test of a Triton kernel can run: pip install 'forebay[triton]'")
    wanted = [found for line in requires("forebay") or [] if (found := Requirement(line)).name == "triton"]
    if not wanted:
        pytest.skip("forebay's installed metadata is older than its extra `triton`: pip install -e .")
    assert all(found.specifier.contains(version("triton")) for found in wanted)
