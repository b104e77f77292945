"""The attention kernel, interpreted, gives what its definition gives: out and LSE."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kernels.gpu.attend import Tiling, attend
from forebay.kernels.paged import Scores
from forebay.kernels.paged import attend as reference
from tests.kernels.gpu.cases import Case, make_case

SMALL = Tiling(rows=32, keys=32)
SPLIT = Tiling(rows=16, keys=16, splits=3)
RAGGED = [(1, 3), (20, 0), (1, 70), (1, 0), (3, 30)]


def assert_as_defined(case: Case, scores: Scores, tiling: Tiling = SMALL, within: float = 2e-5) -> None:
    layer = case.pool.shape[1] - 1
    found = attend(case.q, case.pool, layer, case.where, scores, tiling)
    wanted = reference(case.q, case.pool, layer, case.where, scores)
    assert found.lse.base == "e" and found.out.dtype == case.q.dtype
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=0, atol=within)
    torch.testing.assert_close(found.lse.values.double(), wanted.lse.values, rtol=0, atol=within)


@pytest.mark.parametrize("tiling", [SMALL, SPLIT])
@pytest.mark.parametrize("window", [None, 24])
def test_prefill_chunks_and_decodes_in_one_batch(window: int | None, tiling: Tiling) -> None:
    assert_as_defined(make_case(RAGGED, window=window), Scores(0.3, window=window), tiling)


@pytest.mark.parametrize("window", [15, 16, 17, 1])
def test_contexts_around_the_window(window: int) -> None:
    sequences = [(1, window - 1), (1, window), (1, window + 1), (3, window)]
    assert_as_defined(make_case(sequences, window=window), Scores(0.3, window=window))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 16), (2, 2, 24), (10, 2, 32)])
def test_any_ratio_of_heads_and_any_dim(heads: int, kv_heads: int, dim: int) -> None:
    case = make_case([(9, 30), (1, 44)], heads=heads, kv_heads=kv_heads, dim=dim)
    assert_as_defined(case, Scores(0.3), SPLIT)


@pytest.mark.parametrize("tiling", [SMALL, SPLIT])
def test_sinks_count_once_and_caps_bend(tiling: Tiling) -> None:
    sinks = torch.tensor([0.5, -2.0, 3.0, -math.inf])
    case = make_case([(5, 30), (1, 70), (1, 0)])
    assert_as_defined(case, Scores(0.3, sinks=sinks), tiling)
    assert_as_defined(case, Scores(1.0, cap=1.5), tiling)
    assert_as_defined(case, Scores(1.0, cap=0.01, window=20, sinks=sinks), tiling)


@pytest.mark.parametrize("tiling", [SMALL, SPLIT])
def test_rows_that_see_nothing_give_zero_and_minus_infinity(tiling: Tiling) -> None:
    """A rank that owns none of a sequence's tokens, and a table of holes."""
    case = make_case([(1, 40), (1, 30), (2, 20)], lengths=[0, 17, 40], causal=False)
    case.where.tables[2] = -1
    case.pool.view(-1)[::7] = math.nan
    case.pool[case.where.tables[1, :2]] = 1.0
    found = attend(case.q, case.pool, 0, case.where, Scores(0.3), tiling)
    assert torch.equal(found.out[[0, 2, 3]], torch.zeros(3, 4, 16))
    assert bool((found.lse.values[[0, 2, 3]] == -math.inf).all())
    torch.testing.assert_close(found.out[1], torch.ones(4, 16))


def test_what_lies_behind_the_end_and_before_the_window_has_no_influence() -> None:
    case = make_case([(1, 70), (30, 80)], window=24)
    before = attend(case.q, case.pool, 0, case.where, Scores(1.0, window=24), SMALL)
    seen = torch.zeros(case.pool.shape[0], 16, dtype=torch.bool)
    for table, first, end in ((case.where.tables[0], 47, 71), (case.where.tables[1], 57, 110)):
        for position in range(first, end):
            seen[table[position // 16], position % 16] = True
    case.pool.masked_fill_(~seen[:, None, None, None, :, None], math.nan)
    after = attend(case.q, case.pool, 0, case.where, Scores(1.0, window=24), SMALL)
    assert torch.equal(before.out, after.out) and torch.equal(before.lse.values, after.lse.values)


def test_fp16_within_its_precision() -> None:
    assert_as_defined(make_case(RAGGED, dtype=torch.float16), Scores(0.3), within=2e-3)


@pytest.mark.parametrize("tiling", [SMALL, SPLIT])
def test_fp8_is_scaled_once_for_each_kv_head(tiling: Tiling) -> None:
    case = make_case([(5, 30), (1, 70)])
    stored = Case(case.q, case.pool.to(torch.float8_e4m3fn), case.where)
    scores = Scores(0.3, k_scale=torch.tensor([0.5, 2.0]), v_scale=torch.tensor([3.0, 0.25]))
    assert_as_defined(stored, scores, tiling)


def test_offsets_pass_two_to_the_31() -> None:
    """A pool whose last block lies beyond what 32 bits can address: of memory only that block is touched."""
    case = make_case([(1, 15)], layers=1)
    block = case.pool[0].numel()
    number = 2**31 // block + 5
    far = torch.empty((number + 1) * block, dtype=torch.float32).view(number + 1, *case.pool.shape[1:])
    far[number] = case.pool[0]
    case.where.tables[0, 0] = 0
    near = attend(case.q, case.pool, 0, case.where, Scores(0.3), SMALL)
    case.where.tables[0, 0] = number
    found = attend(case.q, far, 0, case.where, Scores(0.3), SMALL)
    assert torch.equal(found.out, near.out)


def test_queries_may_be_a_slice_of_wider_rows() -> None:
    case = make_case([(7, 9)])
    wide = torch.cat((case.q, torch.full((7, 4, 16), math.nan)), dim=1)
    found = attend(wide[:, :4], case.pool, 0, case.where, Scores(0.3), SMALL)
    assert torch.equal(found.out, attend(case.q, case.pool, 0, case.where, Scores(0.3), SMALL).out)


def test_an_empty_batch_is_answered() -> None:
    case = make_case([(1, 3)])
    none = make_case([(0, 3)])
    found = attend(case.q[:0], case.pool, 0, none.where, Scores(0.3), SPLIT)
    assert found.out.shape == (0, 4, 16) and found.lse.values.shape == (0, 4)


@settings(max_examples=12)
@given(
    sequences=st.lists(st.tuples(st.sampled_from([0, 1, 1, 5]), st.integers(0, 50)), min_size=1, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 40)),
    shared=st.integers(1, 3),
    splits=st.integers(1, 3),
    holes=st.booleans(),
)
def test_any_batch(
    sequences: list[tuple[int, int]], window: int | None, shared: int, splits: int, holes: bool
) -> None:
    case = make_case(sequences, heads=shared, kv_heads=1, window=window)
    if holes:
        case.where.tables[:, ::2] = -1
    assert_as_defined(case, Scores(0.3, window=window), Tiling(16, 32, splits))
