"""What is kept of scores that come part by part is what sorting all of them gives, of equal ones the lower positions;
and nearly nothing is sorted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kernels import best as module
from forebay.kernels.best import RUN, Best
from forebay.kernels.chosen import NONE, best_columns
from forebay.kernels.indexer import choose_reference

pytestmark = pytest.mark.usefixtures("one_thread")


def noise(rows: int, n: int, seed: int, values: int) -> torch.Tensor:
    """Of few different values, so that many are equal; the lowest is none."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randint(-1, values, (rows, n), generator=rng).double()
    return scores.masked_fill_(scores < 0, -math.inf)


def check(found: torch.Tensor, scores: torch.Tensor, count: int) -> None:
    for row, positions in zip(scores, found.tolist(), strict=True):
        wanted = [at for at in choose_reference(row, count) if row[at] > -math.inf]
        assert [at for at in positions if at != NONE] == wanted
        assert positions == wanted + [NONE] * (len(positions) - len(wanted)), "what is none is behind"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**31), st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 3 * RUN), st.booleans()), min_size=1, max_size=8),
)  # fmt: skip
def test_parts_taken_or_sifted_keep_what_sorting_all_gives(
    rows: int, count: int, seed: int, values: int, parts: list[tuple[int, bool]]
) -> None:
    scores = noise(rows, sum(size for size, _ in parts), seed, values)
    best, first = Best(rows, count, scores), 0
    for size, whole in parts:
        part = scores[:, first : first + size].clone()
        (best.take if whole else best.sift)(part, first)
        first += size
    check(best.positions(), scores, count)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 2 * RUN))
def test_rows_that_see_more_and_more_of_the_last_part(count: int, seed: int, values: int, behind: int) -> None:
    """Row r sees r positions of it: a causal border. Some see fewer than are wanted of all."""
    rows = behind + 1
    scores = noise(rows, behind + behind, seed, values)
    scores.masked_fill_(torch.arange(2 * behind) >= behind + torch.arange(rows)[:, None], -math.inf)
    best = Best(rows, count, scores)
    best.sift(scores[:, :behind].clone(), 0)
    best.sift(scores[:, behind:].clone(), behind)
    check(best.positions(), scores, count)


@pytest.mark.parametrize("rising", [True, False])
def test_the_order_of_scores_does_not_matter(rising: bool) -> None:
    """Where every later one is better, all of them pass the floor, and are sorted in time."""
    scores = torch.arange(4096.0).expand(3, -1).clone()
    scores = scores if rising else scores.flip(1)
    best = Best(3, 5, scores)
    for first in range(0, 4096, 256):
        best.sift(scores[:, first : first + 256].clone(), first)
    wanted = range(4095, 4090, -1) if rising else range(5)
    assert best.positions().tolist() == [list(wanted)] * 3


def test_of_a_long_context_nearly_nothing_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, count, n, size = 8, 4, 1 << 16, 512
    scores = torch.randn(rows, n, generator=torch.Generator().manual_seed(3))
    widths: list[int] = []

    def counted(table: torch.Tensor, most: int) -> torch.Tensor:
        widths.append(table.shape[1])
        return best_columns(table, most)

    monkeypatch.setattr(module, "best_columns", counted)
    best = Best(rows, count, scores)
    for first in range(0, n, size):
        part = scores[:, first : first + size].clone()
        (best.take if best.dense(first) else best.sift)(part, first)
    check(best.positions(), scores, count)
    assert sum(widths) < n // 32
