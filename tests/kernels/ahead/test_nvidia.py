"""Every kernel compiles for NVIDIA's devices, within budget. All configurations: `compile --check docs/kernels.md`."""

from __future__ import annotations

import pytest

from tests.kernels.ahead.compiling import assert_within_budget

pytest.importorskip("triton", reason="the package triton isn't installed: pip install 'forebay[triton]'")


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_every_kernel_stays_within_its_budget(target: str) -> None:
    assert_within_budget(target)
