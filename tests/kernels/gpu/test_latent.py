"""The latent attention kernel, interpreted, gives what its definition gives: out and LSE."""

from __future__ import annotations

import math

import pytest
import torch

from forebay.kernels.gpu.attend import Tiling
from forebay.kernels.gpu.latent import attend_latents
from forebay.kernels.paged import Scores
from forebay.kernels.paged import attend_latents as reference
from tests.kernels.gpu.cases import Case, make_case

WHOLE = Tiling(rows=16, keys=32)
SPLIT = Tiling(rows=16, keys=16, splits=3)
RANK, ROPE = 32, 16


def latent_case(sequences: list[tuple[int, int]], heads: int = 5, rank: int = RANK, rope: int = ROPE, **rest) -> Case:
    return make_case(sequences, heads=heads, kv_heads=1, dim=rank + rope, planes=1, **rest)


def assert_as_defined(case: Case, tiling: Tiling, rank: int = RANK, within: float = 2e-5, **rest) -> None:
    found = attend_latents(case.q, case.pool, 1, case.where, Scores(0.1, **rest), rank=rank, tiling=tiling)
    wanted = reference(case.q, case.pool, 1, case.where, Scores(0.1, **rest), rank=rank)
    assert found.lse.base == "e" and found.out.dtype == case.q.dtype
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=0, atol=within)
    torch.testing.assert_close(found.lse.values.double(), wanted.lse.values, rtol=0, atol=within)


@pytest.mark.parametrize("tiling", [WHOLE, SPLIT])
def test_decodes_and_rows_of_a_draft(tiling: Tiling) -> None:
    assert_as_defined(latent_case([(1, 3), (1, 90), (3, 30), (1, 0)]), tiling)


@pytest.mark.parametrize(("heads", "rank", "rope"), [(20, 32, 16), (2, 40, 8), (16, 16, 16)])
def test_any_number_of_heads_and_any_widths(heads: int, rank: int, rope: int) -> None:
    assert_as_defined(latent_case([(1, 40), (1, 44)], heads, rank, rope), SPLIT, rank)


def test_the_published_widths() -> None:
    assert_as_defined(latent_case([(1, 33)], 16, 512, 64), WHOLE, 512)


@pytest.mark.parametrize("tiling", [WHOLE, SPLIT])
def test_a_rank_without_tokens_gives_zero_and_minus_infinity(tiling: Tiling) -> None:
    case = latent_case([(1, 40), (1, 30)], lengths=[0, 17], causal=False)
    case.pool[case.where.tables[1, 1], :, :, :, 1:] = math.nan  # behind the end
    found = attend_latents(case.q, case.pool, 1, case.where, Scores(0.1), rank=RANK, tiling=tiling)
    assert torch.equal(found.out[0], torch.zeros(5, RANK))
    assert bool((found.lse.values[0] == -math.inf).all()) and bool(found.out[1].isfinite().all())


def test_fp8_is_scaled_once() -> None:
    case = latent_case([(1, 40), (1, 44)])
    stored = Case(case.q, case.pool.to(torch.float8_e4m3fn), case.where)
    assert_as_defined(stored, SPLIT, k_scale=torch.tensor([0.5]))


def test_fp16_within_its_precision() -> None:
    assert_as_defined(latent_case([(1, 40), (2, 44)], dtype=torch.float16), SPLIT, within=2e-3)
