"""The index of sparse attention: scores of all keys that a row sees, and the columns with the best of them.

Both wait for no decision of the host. The threshold is found by bisection over the scores' bits, whose order as
integers is theirs as numbers: 32 passes over a row, no sort. Scores equal to it are counted from the first position on.
"""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu.attend import PAGE, ROWS_MIN
from forebay.kernels.gpu.choose import rank_of

KEYS = 64
"""Of a tile of scores."""

COLUMNS = 1024
"""Of a row that are looked at at a time."""


@triton.jit
def widen(byte):
    """fp32 of float8_e4m3fn bytes, by their bits: not every device has this FP8."""
    exponent, mantissa = ((byte >> 3) & 15).to(tl.int32), (byte & 7).to(tl.int32)
    normal = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    return tl.where(byte >= 128, -size, size)


@triton.jit
def score_kernel(
    q, weights, pool, scales, tables, sequences, ends, out, n, table_row, layers, layer,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """q [rows, HEADS, DIM], weights fp32 [rows, HEADS] -> out fp32 [rows, n]; -inf from a row's end on. One program a
    row and BLOCK_N keys. SCALED: the pool has bytes, and `scales` is the same memory as fp32."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N
    end, sequence = tl.load(ends + row), tl.load(sequences + row)
    token, h, d = first + tl.arange(0, BLOCK_N), tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    block = tl.load(tables + sequence * table_row + token // PAGE, mask=token < end, other=-1)
    there = block >= 0
    at = (block * layers + layer) * PAGE + token % PAGE
    inside = there[:, None] & (d[None, :] < DIM)
    keys = tl.load(pool + at[:, None] * WIDTH + d[None, :], mask=inside, other=0)
    queries = tl.load(
        q + (row * HEADS + h[:, None]) * DIM + d[None, :], mask=(h[:, None] < HEADS) & (d[None, :] < DIM), other=0.0
    )
    if SCALED:
        keys = widen(keys).to(queries.dtype)
    products = tl.maximum(tl.dot(keys, tl.trans(queries), input_precision="ieee"), 0.0)
    worth = tl.load(weights + row * HEADS + h, mask=h < HEADS, other=0.0)
    scores = tl.sum(products * worth[None, :], 1)
    if SCALED:  # powers of two, which are more than zero
        scores *= tl.load(scales + at * (WIDTH // 4) + DIM // 4, mask=there, other=0.0)
    tl.store(out + row * n + token, tl.where(there, scores, float("-inf")), mask=token < n)


@triton.jit
def ranks(row, n, first, BLOCK: tl.constexpr):
    """Columns from `first` on, and the ranks of their scores; -1 for none. Both zeros are one."""
    at = first + tl.arange(0, BLOCK)
    scores = tl.load(row + at, mask=at < n, other=float("-inf"))
    scores = tl.where(scores == 0.0, 0.0, scores)
    return at, tl.where(scores > float("-inf"), rank_of(scores), -1)


@triton.jit
def at_least(row, n, least, BLOCK: tl.constexpr):
    """How many of a row's scores have a rank of at least `least`."""
    found = tl.zeros((), tl.int32)
    for first in range(0, n, BLOCK):
        _at, rank = ranks(row, n, first, BLOCK)
        found += tl.sum((rank >= least).to(tl.int32), 0)
    return found


@triton.jit
def pick_kernel(scores, out, n, count, BLOCK: tl.constexpr):
    """scores fp32 [rows, n] -> out int64 [rows, count]: the columns of the best, ascending; of equal ones the first.
    What is left of `out` isn't touched. One program a row."""
    index = tl.program_id(0).to(tl.int64)
    row = scores + index * n
    least = tl.zeros((), tl.int64)
    for step in range(32):
        tried = least + (tl.full((), 1, tl.int64) << (31 - step))
        least = tl.where(at_least(row, n, tried, BLOCK) >= count, tried, least)
    room = count - at_least(row, n, least + 1, BLOCK)
    placed, tied = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in range(0, n, BLOCK):
        at, rank = ranks(row, n, first, BLOCK)
        equal = (rank == least).to(tl.int32)
        kept = ((rank > least) | ((equal > 0) & (tied + tl.cumsum(equal, 0) <= room))).to(tl.int32)
        tl.store(out + index * count + placed + tl.cumsum(kept, 0) - kept, at.to(tl.int64), mask=kept > 0)
        placed += tl.sum(kept, 0)
        tied += tl.sum(equal, 0)


def score_keys(
    q: Tensor, weights: Tensor, pool: Tensor, layer: int, tables: Tensor, sequences: Tensor, ends: Tensor, n: int
) -> Tensor:
    """Scores fp32 [R, n] of positions 0 to n by `forebay.kernels.indexer.index_scores`; -inf for what a row doesn't
    see, from `ends` int64 [R] on. `q` [R, heads, dim] is in the pool's dtype, or in the model's where that has bytes:
    what these mean, any float has. All are contiguous."""
    rows, heads, dim = q.shape
    scaled, width = pool.dtype == torch.uint8, pool.shape[-1]
    assert not scaled or dim % 4 == 0, dim
    out = torch.empty(rows, n, dtype=torch.float32, device=q.device)
    if rows:
        score_kernel[(rows, triton.cdiv(n, KEYS))](
            q, weights, pool, pool.view(torch.float32) if scaled else pool, tables, sequences, ends, out, n,
            tables.stride(0), pool.shape[1], layer,
            HEADS=heads, HEADS_PAD=max(ROWS_MIN, triton.next_power_of_2(heads)),
            DIM=dim, DIM_PAD=max(ROWS_MIN, triton.next_power_of_2(dim)), WIDTH=width, BLOCK_N=KEYS, SCALED=scaled,
            num_warps=4,
        )  # fmt: skip
    return out


def pick_columns(scores: Tensor, count: int, *, block: int = COLUMNS) -> Tensor:
    """int64 [R, count]: as `forebay.kernels.chosen.best_columns`, but -1 behind those that are there."""
    rows, n = scores.shape
    assert scores.is_contiguous() and scores.dtype == torch.float32, (scores.stride(), scores.dtype)
    out = torch.full((rows, count), -1, dtype=torch.int64, device=scores.device)
    if rows:
        pick_kernel[(rows,)](scores, out, n, count, BLOCK=min(block, triton.next_power_of_2(n)), num_warps=8)
    return out
