"""Positions are chosen by their definition, the better score first and of equal ones the lower position, however the
context is cut; and keys stored in eight bits are near those that went in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kernels import indexer
from forebay.kernels.best import Best
from forebay.kernels.chosen import NONE, Selection, best_columns, in_order, resident_slots
from forebay.kernels.indexer import (
    choose_positions,
    choose_reference,
    hadamard,
    index_scores,
    scale_keys,
    unscale_keys,
    write_keys,
)
from tests.kernels.sparse_cases import LAYERS, Case, make_case, noise

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, DIM = 2, 6
MIXED = [(1, 3), (20, 0), (1, 90), (33, 17), (1, 0)]


def as_defined(case: Case, q: torch.Tensor, weights: torch.Tensor, layer: int, top_k: int) -> list[list[int]]:
    found = []
    for index, span in enumerate(case.batch.spans):
        keys = case.rows(layer, index)
        for row in range(span.query_start, span.query_end):
            seen = keys[: span.context_len + row - span.query_start + 1]
            scores = index_scores(q[row : row + 1], weights[row : row + 1], seen)[0]
            found.append(choose_reference(scores, top_k))
    return found


def chosen(case: Case, q: torch.Tensor, weights: torch.Tensor, layer: int, top_k: int) -> list[list[int]]:
    selection = choose_positions(q, weights, case.pool, layer, case.batch, "g", top_k)
    check_form(case, selection)
    return [[p for p in row if p != NONE] for row in selection.positions.tolist()]


def check_form(case: Case, selection: Selection) -> None:
    for row, sequence, positions in zip(
        selection.rows.tolist(), selection.sequences.tolist(), selection.positions.tolist(), strict=True
    ):
        span = case.batch.spans[sequence]
        assert span.query_start <= row < span.query_end
        there = [p for p in positions if p != NONE]
        assert positions == there + [NONE] * (len(positions) - len(there)), "what is none is behind"
        assert len(set(there)) == len(there) and min(there) >= 0
        assert max(there) <= span.context_len + row - span.query_start


def queries(rows: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return noise(rows, HEADS, DIM, seed=seed), noise(rows, HEADS, seed=seed + 1)


def test_a_score_is_the_heads_weighted_sum_of_products_above_zero() -> None:
    q, weights = queries(3)
    keys = noise(8, DIM, seed=9)
    found = index_scores(q, weights, keys)
    for row in range(3):
        for at in range(8):
            products = [sum(a * b for a, b in zip(head, keys[at].tolist(), strict=True)) for head in q[row].tolist()]
            wanted = sum(w * max(0.0, p) for w, p in zip(weights[row].tolist(), products, strict=True))
            assert float(found[row, at]) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("top_k", [1, 7, 24, 200])
def test_the_best_are_chosen(top_k: int) -> None:
    """With two heads, about every fourth score is exactly zero."""
    case = make_case(MIXED, DIM)
    q, weights = queries(case.batch.num_tokens)
    assert chosen(case, q, weights, 2, top_k) == as_defined(case, q, weights, 2, top_k)


def test_parts_and_tiles_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "KEY_BLOCKS", 2)
    monkeypatch.setattr(indexer, "STRETCH", 16)
    monkeypatch.setattr(indexer, "SCORE_BYTES", 3 * HEADS * 16 * 8)
    case = make_case(MIXED, DIM)
    q, weights = queries(case.batch.num_tokens)
    assert chosen(case, q, weights, 1, 9) == as_defined(case, q, weights, 1, 9)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_long_context_is_sifted_without_a_seam(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers, whose products are exact, so that many scores are equal. All but the first part is sifted."""
    monkeypatch.setattr(indexer, "KEY_BLOCKS", 8)
    monkeypatch.setattr(indexer, "STRETCH", 40)
    monkeypatch.setattr(indexer, "SCORE_BYTES", 5 * HEADS * 128 * 8)
    monkeypatch.setattr(Best, "dense", lambda self, seen: seen == 0)
    case = make_case([(23, 1000), (1, 700), (40, 0)], DIM + 2)
    rng = torch.Generator().manual_seed(7)
    whole = torch.randint(-2, 3, case.pool.shape, generator=rng).double()
    exact = Case(case.batch, whole)
    pool = scale_keys(whole.view(-1, DIM + 2)).view(*whole.shape[:-1], -1) if scaled else whole
    rows = case.batch.num_tokens
    q = torch.randint(-2, 3, (rows, HEADS, DIM + 2), generator=rng).double()
    weights = torch.randint(-1, 3, (rows, HEADS), generator=rng).double()
    wanted = as_defined(exact, q, weights, 1, 11)
    assert chosen(Case(case.batch, pool), q, weights, 1, 11) == wanted
    assert len({len(row) for row in wanted}) > 1, "some see fewer"


@pytest.mark.parametrize("zeros", [True, False])
def test_rows_without_a_weight_above_zero_stop_at_enough_zeros(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They choose the first zeros; where there are none, the least negative of all."""
    monkeypatch.setattr(indexer, "KEY_BLOCKS", 2)
    read: list[int] = []
    part = indexer.Keys.part
    monkeypatch.setattr(indexer.Keys, "part", lambda self, first: (read.append(first), part(self, first))[1])
    case = make_case([(6, 400)], DIM)
    q, weights = queries(6)
    weights[1::2] = -weights[1::2].abs()
    weights[::2] = weights[::2].abs()
    weights[3, 0] = 0
    if not zeros:
        case.pool.abs_()
        q.abs_()
    assert chosen(case, q, weights, 1, 9) == as_defined(case, q, weights, 1, 9)
    assert (read.count(384), read.count(32)) == ((1, 2) if zeros else (2, 2))


def test_of_equal_scores_the_first_positions_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "KEY_BLOCKS", 1)
    case = make_case([(4, 60)], DIM)
    q, weights = queries(4)
    assert chosen(case, q, torch.zeros_like(weights), 0, 5) == [[0, 1, 2, 3, 4]] * 4
    keys = case.pool[case.batch.groups["g"].block_tables[0], 0, 0, 0]
    keys[:] = 0
    keys[3, 12] = keys[3, 13] = q[3].sum(0) * 100  # positions 60 and 61, which the first row and the second one see
    case.pool[case.batch.groups["g"].block_tables[0], 0, 0, 0] = keys
    found = chosen(case, q, torch.ones_like(weights), 0, 3)
    assert found[3] == [60, 61, 0]


def test_only_the_rows_that_are_wanted() -> None:
    case = make_case(MIXED, DIM)
    q, weights = queries(case.batch.num_tokens)
    every = choose_positions(q, weights, case.pool, 1, case.batch, "g", 7)
    rows = torch.tensor([0, 4, 20, 21, 55])
    some = choose_positions(q[rows], weights[rows], case.pool, 1, case.batch, "g", 7, rows)
    of_every = every.only(rows)
    assert torch.equal(some.rows, rows)
    assert torch.equal(some.positions, of_every.positions) and torch.equal(some.sequences, of_every.sequences)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31), st.integers(1, 5))
def test_best_columns_are_those_that_sorting_gives(rows: int, n: int, count: int, seed: int, values: int) -> None:
    """Of few different values, so that many are equal; some are none."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randint(-1, values, (rows, n), generator=rng).double()
    scores[scores < 0] = -math.inf
    columns = best_columns(scores, count)
    found = in_order(scores.gather(1, columns), columns).tolist()
    for row, positions in zip(scores, found, strict=True):
        wanted = [at for at in choose_reference(row, count) if row[at] > -math.inf]
        assert positions == wanted + [NONE] * (min(count, n) - len(wanted))


def test_slots_are_where_the_tables_say() -> None:
    tables = torch.tensor([[4, 0, -1], [2, 3, 1]])
    positions = torch.tensor([[0, 17, 33, NONE], [47, 16, 15, NONE]])
    slots = resident_slots(tables, torch.tensor([0, 1]), positions)
    assert slots.tolist() == [[64, 1, NONE, NONE], [16 + 15, 48, 32 + 15, NONE]]


# --- stored keys ---------------------------------------------------------------------------------------------


def test_a_hadamard_matrix_is_its_own_inverse_and_keeps_products() -> None:
    x, y = noise(5, 32, seed=1), noise(5, 32, seed=2)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close((hadamard(x) * hadamard(y)).sum(1), (x * y).sum(1))
    spike = torch.zeros(1, 32)
    spike[0, 3] = 8.0
    torch.testing.assert_close(hadamard(spike).abs(), torch.full((1, 32), 8.0 * 32**-0.5))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.floats(-20, 20))
def test_scaled_keys_are_near_and_their_scales_are_powers_of_two(seed: int, size: float) -> None:
    keys = noise(4, 24, seed=seed, dtype=torch.float32) * 2.0**size
    stored = scale_keys(keys)
    assert stored.dtype == torch.uint8 and stored.shape == (4, 28)
    scales = stored[:, 24:].contiguous().view(torch.float32)[:, 0]
    mantissas, _ = torch.frexp(scales)
    assert torch.equal(mantissas, torch.full_like(mantissas, 0.5))
    largest = keys.abs().amax(1)
    assert bool((largest <= 448 * scales).all()) and bool((largest > 224 * scales).all()), "the least that fits"
    found = unscale_keys(stored, torch.float32)
    # Three bits behind the first one: half of a sixteenth, or half of the smallest step.
    assert bool(((found - keys).abs() <= torch.maximum(keys.abs() / 16, scales[:, None] * 2.0**-10)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [2.0**-60, 1.0, 2.0**118])
@pytest.mark.parametrize("numbers", [True, False])
def test_all_eight_bits_are_read_as_what_they_are(numbers: bool, scale: float, dtype: torch.dtype) -> None:
    """Two of the 256 are no numbers; keys that have neither take another way."""
    values = torch.arange(256, dtype=torch.uint8)
    values = values[values % 128 != 127] if numbers else values
    scales = torch.full((len(values), 1), scale).view(torch.uint8)
    found = unscale_keys(torch.cat((values[:, None], scales), dim=1), dtype)
    wanted = values[:, None].view(torch.float8_e4m3fn).to(dtype) * scale
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert bool(found.isnan().any()) is not numbers


def test_a_key_of_zeros_is_one() -> None:
    assert torch.equal(unscale_keys(scale_keys(torch.zeros(2, 8)), torch.float64), torch.zeros(2, 8).double())


def test_keys_are_stored_at_their_slots_in_either_form() -> None:
    keys, slots = noise(3, 8, dtype=torch.float32), torch.tensor([3 * 16 + 15, 0, 4 * 16])
    for pool in (torch.zeros(5, LAYERS, 1, 1, 16, 8), torch.zeros(5, LAYERS, 1, 1, 16, 12, dtype=torch.uint8)):
        write_keys(pool, 1, slots, keys)
        wanted = keys if pool.dtype == torch.float32 else scale_keys(keys)
        for slot, row in zip(slots.tolist(), wanted, strict=True):
            assert torch.equal(pool[slot // 16, 1, 0, 0, slot % 16], row)
        assert int((pool != 0).any(-1).sum()) == 3


def test_scaled_keys_choose_nearly_the_same() -> None:
    """And what they miss is hardly worse than what they take: the scores at the cut are near."""
    case = make_case([(8, 500)], 32, dtype=torch.float32)
    pool = torch.zeros((*case.pool.shape[:-1], 36), dtype=torch.uint8)
    pool.view(-1, 36).copy_(scale_keys(hadamard(case.pool.view(-1, 32).nan_to_num())))
    q, weights = noise(8, 4, 32, dtype=torch.float32, seed=3), noise(8, 4, dtype=torch.float32, seed=4)
    exact = choose_positions(q, weights, case.pool, 0, case.batch, "g", 100).positions
    rounded = choose_positions(hadamard(q), weights, pool, 0, case.batch, "g", 100).positions
    scores = index_scores(q, weights, case.rows(0, 0))
    shared, gaps = 0, []
    for row in range(8):
        both = set(exact[row].tolist()) & set(rounded[row].tolist())
        shared += len(both)
        spread = float(scores[row].max() - scores[row].min())
        worst = min(float(scores[row, p]) for p in rounded[row].tolist())
        gaps.append((float(scores[row, exact[row, -1]]) - worst) / spread)
    assert shared > 0.9 * 800
    assert max(gaps) < 0.02
