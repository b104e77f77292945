"""KV in FP8 is widened to exactly the numbers that its codes are."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels.narrow import PIECE, KvScales, narrow, widen_rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("narrow_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=["ocp", "fnuz"])
def test_every_code_is_widened_to_its_number(narrow_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """In either place of a pair, and behind the pieces that are widened at a time."""
    codes = torch.arange(256, dtype=torch.uint8)
    source = torch.stack((codes, codes.flip(0), codes.roll(1))).view(narrow_dtype)
    rows = torch.tensor([2, 0, 1, 1] * (PIECE // 256))
    found = widen_rows(source, rows, dtype)
    assert len(rows) * 128 > PIECE and found.dtype == dtype
    torch.testing.assert_close(found, source.to(dtype)[rows], rtol=0, atol=0, equal_nan=True)


def test_what_isn_t_in_fp8_is_gathered_as_it_is() -> None:
    source = torch.randn(5, 32)
    assert torch.equal(widen_rows(source, torch.tensor([3, 1]), torch.float32), source[[3, 1]])


def test_scales_are_those_of_keys_then_of_values() -> None:
    scales = KvScales(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0]))
    stored = narrow(torch.full((3, 4, 2), 16.0), scales.both, torch.float8_e4m3fn)
    assert stored.float()[0, :, 0].tolist() == [16.0, 8.0, 4.0, 2.0]
