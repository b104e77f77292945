"""Paged attention gives what the definition gives, whatever the batch is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kernels import attention
from forebay.kernels.attention import attention_reference, paged_attention
from forebay.kernels.batch import BLOCK_TOKENS, NO_BLOCK, Batch, pack_batch

LAYERS = 2


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8


@dataclass(frozen=True)
class Case:
    """A batch over a pool that is filled with noise."""

    batch: Batch
    pool: torch.Tensor
    q: torch.Tensor


def make_case(
    sequences: Sequence[tuple[int, int]],
    shape: Shape = Shape(),
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """`sequences` are (query length, context length). Blocks are permuted; those out of the window are gone."""
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-(new + context) // BLOCK_TOKENS) for new, context in sequences]
    free = torch.randperm(sum(needed) + 3, generator=rng).tolist()
    tables = []
    for (_, context), count in zip(sequences, needed, strict=True):
        row = [free.pop() for _ in range(count)]
        if window is not None:
            gone = max(0, context - window + 1) // BLOCK_TOKENS
            row[:gone] = [NO_BLOCK] * gone
        tables.append(row)
    batch = pack_batch([([0] * new, context) for new, context in sequences], {"g": tables})
    size = (sum(needed) + 3, LAYERS, 2, shape.kv_heads, BLOCK_TOKENS, shape.dim)
    pool = torch.randn(size, generator=rng, dtype=torch.float64).to(dtype)
    q = torch.randn(batch.num_tokens, shape.heads, shape.dim, generator=rng, dtype=torch.float64)
    return Case(batch, pool, q.to(dtype))


def assert_as_defined(
    case: Case, *, window: int | None = None, softcap: float | None = None, within: float = 1e-12
) -> None:
    for layer in range(LAYERS):
        args = (case.q, case.pool, layer, case.batch, "g")
        found = paged_attention(*args, scale=0.3, window=window, softcap=softcap)
        wanted = attention_reference(*args, scale=0.3, window=window, softcap=softcap)
        torch.testing.assert_close(found, wanted, rtol=0, atol=within)


def leave_junk(case: Case) -> None:
    """Fill all of the pool with nan but what the sequences have written. Mutates it."""
    written = torch.zeros(case.pool.shape[0], BLOCK_TOKENS, dtype=torch.bool)
    for span, table in zip(case.batch.spans, case.batch.groups["g"].block_tables.tolist(), strict=True):
        for position in range(span.total_len):
            if table[position // BLOCK_TOKENS] != NO_BLOCK:
                written[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = True
    case.pool.masked_fill_(~written[:, None, None, None, :, None], math.nan)


@pytest.mark.parametrize("window", [None, 10, 24])
@pytest.mark.parametrize(
    "sequences", [[(1, 3), (1, 7)], [(1, 20), (1, 30), (1, 40), (1, 47)], [(1, 5), (9, 14), (1, 17)]]
)
def test_what_others_have_left_in_blocks_counts_for_nothing(
    sequences: list[tuple[int, int]], window: int | None
) -> None:
    """A block isn't wiped when it changes hands, and 0 times what is no number is none."""
    case = make_case(sequences, window=window)
    leave_junk(case)
    assert_as_defined(case, window=window)


@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("sequences", [[(7, 0)], [(1, 0)], [(1, 33)], [(70, 50)], [(5, 100)]])
def test_one_sequence(sequences: list[tuple[int, int]], window: int | None) -> None:
    assert_as_defined(make_case(sequences, window=window), window=window)


@pytest.mark.parametrize("window", [None, 24])
def test_prefill_chunks_and_decodes_in_one_batch(window: int | None) -> None:
    sequences = [(1, 3), (20, 0), (1, 90), (33, 17), (1, 88), (1, 0), (2, 64)]
    assert_as_defined(make_case(sequences, window=window), window=window)


@pytest.mark.parametrize("shape", [Shape(3, 1, 8), Shape(2, 2, 5), Shape(6, 2, 16), Shape(1, 1, 4)])
@pytest.mark.parametrize("window", [None, 24])
def test_any_ratio_of_heads(shape: Shape, window: int | None) -> None:
    case = make_case([(19, 30), (1, 40), (1, 44)], shape, window=window)
    assert_as_defined(case, window=window)


@pytest.mark.parametrize("window", [None, 24])
def test_softcap(window: int | None) -> None:
    case = make_case([(19, 30), (1, 40), (1, 44)], window=window)
    assert_as_defined(case, window=window, softcap=1.5)


@pytest.mark.parametrize("window", [None, 50, 100, 200])
def test_tiles_meet_without_a_seam(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_QUERIES", 32)
    assert_as_defined(make_case([(100, 21), (65, 0)], window=window), window=window)


def test_decodes_are_split_when_a_gather_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "DECODE_GATHER_BYTES", 1)
    assert_as_defined(make_case([(1, 40), (1, 41), (1, 300)]))


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("window", [None, 24])
def test_every_dtype(dtype: torch.dtype, within: float, window: int | None) -> None:
    case = make_case([(40, 30), (1, 40), (1, 44)], window=window, dtype=dtype)
    assert_as_defined(case, window=window, within=within)


def test_bytes_outside_the_window_and_past_the_end_have_no_influence() -> None:
    case = make_case([(1, 70), (1, 40), (30, 80)], window=24)
    before = paged_attention(case.q, case.pool, 0, case.batch, "g", scale=1.0, window=24)
    visible = torch.zeros(case.pool.shape[0], BLOCK_TOKENS, dtype=torch.bool)
    for row, span in zip(case.batch.groups["g"].block_tables.tolist(), case.batch.spans, strict=True):
        for position in range(max(0, span.context_len - 23), span.total_len):
            visible[row[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = True
    hidden = ~visible[:, None, None, None, :, None]
    changed = torch.where(hidden, torch.tensor(1e6, dtype=case.pool.dtype), case.pool)
    after = paged_attention(case.q, changed, 0, case.batch, "g", scale=1.0, window=24)
    torch.testing.assert_close(before, after, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 15, 16, 17, 40]), st.integers(0, 100)), min_size=1, max_size=5
    ),
    window=st.one_of(st.none(), st.integers(1, 80)),
    shared=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
)
def test_any_batch(sequences: list[tuple[int, int]], window: int | None, shared: int, kv_heads: int) -> None:
    shape = Shape(shared * kv_heads, kv_heads, 4)
    assert_as_defined(make_case(sequences, shape, window=window), window=window)
