"""bf16 on a CPU that doesn't multiply in it: what is widened gives what bf16 gives, within its rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from forebay.kernels import products
from forebay.kernels.narrow import widen_rows
from forebay.kernels.products import BLOCK, ROWS_MIN, multiply, product_dtype
from forebay.models.layers import Linear


@pytest.fixture(params=[True, False], ids=["multiplies bf16", "widens"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both kinds of CPU, as far as the choice goes."""
    monkeypatch.setattr(products, "multiplies_bf16", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("rows", [0, 1, ROWS_MIN - 1, ROWS_MIN, 40])
@pytest.mark.parametrize("out", [1, 48, BLOCK, BLOCK + 1, 2 * BLOCK + 48])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_in_bf16_is_the_exact_one_rounded(cpu: bool, rows: int, out: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 7 + out)
    x, weight = (torch.randn(n, 96, generator=generator).bfloat16() for n in (rows, out))
    bias = torch.randn(out, generator=generator).bfloat16() if biased else None
    found = multiply(x, weight, bias)
    assert found.dtype == torch.bfloat16
    assert found.shape == (rows, out)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-7 * 10)


def test_a_widened_product_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiplies_bf16", lambda: False)
    x, weight = torch.randn(ROWS_MIN, 64).bfloat16(), torch.randn(BLOCK + 8, 64).bfloat16()
    wide = F.linear(x.float(), weight.float())
    torch.testing.assert_close(multiply(x, weight), wide.bfloat16(), rtol=2**-7, atol=1e-6)


def test_only_bf16_is_widened_and_only_where_it_has_to_be(cpu: bool) -> None:
    assert product_dtype(torch.zeros(1, dtype=torch.bfloat16)) == (torch.bfloat16 if cpu else torch.float32)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert product_dtype(torch.zeros(1, dtype=dtype)) == dtype
    assert product_dtype(torch.zeros(1, dtype=torch.bfloat16, device="meta")) == torch.bfloat16


def test_a_layer_multiplies_alike_on_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(200, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    plain = Linear(weight)(x)
    monkeypatch.setattr(products, "multiplies_bf16", lambda: False)
    torch.testing.assert_close(multiply(x, weight), plain, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_gathered_in_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    source, at = torch.randn(32, 16).bfloat16(), torch.tensor([3, 3, 31, 0])
    found = widen_rows(source, at, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, source[at].to(dtype))
