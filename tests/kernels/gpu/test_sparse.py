"""The kernels of sparse attention, interpreted: they choose what the definition chooses, and sum what was chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from forebay.kernels import forms
from forebay.kernels.chosen import best_columns
from forebay.kernels.dispatch import Dispatch, configure
from forebay.kernels.gpu.attend import Tiling
from forebay.kernels.gpu.indexer import pick_columns, score_keys
from forebay.kernels.gpu.sparse import attend_chosen
from forebay.kernels.indexer import choose_positions, index_scores, scale_keys, unscale_keys
from forebay.kernels.sparse import sparse_latent_attention, sparse_latent_attention_reference
from tests.kernels.sparse_cases import LAYERS, Case, make_case
from tests.kernels.sparse_cases import noise as any_noise
from tests.kernels.test_sparse import some_slots

MIXED = [(1, 3), (2, 0), (1, 60), (2, 41)]
HEADS, RANK, ROPE = 5, 32, 16


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    configure("auto")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return any_noise(*shape, seed=seed, dtype=torch.float32)


# --- attention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rank", "rope"), [(32, 16), (40, 8)])
def test_attention_over_chosen_rows(rank: int, rope: int, splits: int) -> None:
    """What lies behind sequences' ends, and in blocks that are nobody's, is no number."""
    case = make_case(MIXED, rank + rope, dtype=torch.float32)
    q, slots = noise(case.batch.num_tokens, HEADS, rank + rope, seed=3), some_slots(case, 20)
    slots[2] = -1
    tiling = Tiling(rows=16, keys=16, splits=splits)
    found = attend_chosen(q, case.pool, 1, slots, 0.3, rank=rank, tiling=tiling)
    wanted = sparse_latent_attention_reference(q, case.pool, 1, slots, scale=0.3, rank=rank)
    torch.testing.assert_close(found.out, wanted, rtol=0, atol=2e-5)
    assert bool((found.lse.values[2] == -math.inf).all()) and bool(found.out.isfinite().all())


# --- the index -----------------------------------------------------------------------------------------------


def scores_of(case: Case, q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    batch = case.batch
    sequences = torch.tensor([i for i, span in enumerate(batch.spans) for _ in range(span.query_len)])
    tables, ends = batch.groups["g"].block_tables, batch.positions + 1
    return score_keys(q, weights, pool, 2, tables, sequences, ends, max(span.total_len for span in batch.spans))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (20, 24)])
def test_scores_of_what_a_row_sees(heads: int, dim: int, scaled: bool) -> None:
    case = make_case(MIXED, dim, dtype=torch.float32)
    rows = case.batch.num_tokens
    q, weights, pool = noise(rows, heads, dim, seed=1), noise(rows, heads, seed=2), case.pool
    if scaled:
        stored = scale_keys(pool.view(-1, dim).nan_to_num())
        pool = stored.view(*pool.shape[:-1], -1).clone()
    found = scores_of(case, q, weights, pool)
    for index, span in enumerate(case.batch.spans):
        keys = case.rows(2, index)
        keys = unscale_keys(scale_keys(keys), torch.float32) if scaled else keys
        for row in range(span.query_start, span.query_end):
            end = span.context_len + row - span.query_start + 1
            wanted = index_scores(q[row : row + 1], weights[row : row + 1], keys[:end])[0]
            torch.testing.assert_close(found[row, :end], wanted, rtol=1e-5, atol=1e-5)
            assert bool((found[row, end:] == -math.inf).all())


@pytest.mark.parametrize(("count", "block"), [(1, 1024), (5, 16), (30, 1024)])
def test_the_best_columns_and_of_equals_the_first(count: int, block: int) -> None:
    """Few different scores, zeros of both signs, none, and fewer than are wanted."""
    rng = torch.Generator().manual_seed(count)
    scores = torch.randint(-2, 3, (5, 40), generator=rng).float() * 0.25
    scores[0] = torch.where(torch.arange(40) % 2 == 0, -0.0, 0.0)
    scores[1, 4:] = -math.inf
    scores[2] = -math.inf
    scores[3, :20] = torch.randn(20, generator=rng) * 1e-30
    found = pick_columns(scores, count, block=block)
    wanted = best_columns(scores, count)
    for row, there in enumerate((scores > -math.inf).sum(1).tolist()):
        columns = [c for c in wanted[row].tolist() if scores[row, c] > -math.inf]
        assert found[row].tolist() == columns + [-1] * (count - len(columns))
        assert len(columns) == min(count, there)


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("scaled", [False, True])
def test_both_forms_choose_the_same(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole numbers, whose products are exact, so that equal scores are. Rows go in several launches."""
    monkeypatch.setattr(forms, "SCORE_BYTES", 4 * 61 * 4)
    case = make_case(MIXED, 16, dtype=torch.float32)
    rows, keys = case.batch.num_tokens, integers(case.pool.numel() // 16, 16, seed=4)
    pool = (scale_keys(keys) if scaled else keys).view(*case.pool.shape[:-1], -1).clone()
    q, weights = integers(rows, 2, 16, seed=5), integers(rows, 2, seed=6)
    configure("torch")
    wanted = choose_positions(q, weights, pool, 2, case.batch, "g", 9)
    present = configure("triton")
    found = choose_positions(q, weights, pool, 2, case.batch, "g", 9)
    assert torch.equal(found.positions, wanted.positions) and torch.equal(found.sequences, wanted.sequences)
    assert executed(present, "index") == (1, 0)
    some = torch.tensor([0, 2, 5])
    assert torch.equal(
        choose_positions(q[some], weights[some], pool, 2, case.batch, "g", 9, some).positions, wanted.positions[some]
    )


def test_attention_runs_as_the_kernel_that_was_asked_for() -> None:
    case = make_case(MIXED, RANK + ROPE, dtype=torch.float32)
    q, slots = noise(case.batch.num_tokens, HEADS, RANK + ROPE, seed=3), some_slots(case, 20)
    present = configure("triton")
    found = sparse_latent_attention(q, case.pool, LAYERS - 1, slots, scale=0.3, rank=RANK)
    wanted = sparse_latent_attention_reference(q, case.pool, LAYERS - 1, slots, scale=0.3, rank=RANK)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert executed(present, "sparse") == (1, 0)


def executed(present: Dispatch, operation: str) -> tuple[float, float]:
    figures = present.figures()
    return (
        figures[f"kernels.{operation}.triton.executed"], figures[f"kernels.{operation}.torch.executed"]
    )  # fmt: skip
