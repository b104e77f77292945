"""Attention over the paged pool. The query heads that share a KV head, of several rows, are the rows of one product,
so K and V are read once for all of them; tiles of keys don't depend on the size of a block; long contexts of few rows
are split over programs, whose results are merged by their LSE.

All offsets into the pool are int64: a block's number times its elements passes 2^31 in any real pool.
"""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu.merge import merge
from forebay.kernels.lse import Lse, Partial
from forebay.kernels.paged import Scores
from forebay.kernels.ragged import Ragged

LOG2_E = math.log2(math.e)
PAGE = tl.constexpr(16)
ROWS_MIN = 16
"""What a product of matrices has at least."""


@triton.jit
def soften(scores, cap, factor):
    """cap * tanh(scores / cap) * factor, for any scores."""
    grown = tl.exp2(scores * (2.8853900817779268 / cap))  # e^(2x): infinite is fine
    return cap * (1.0 - 2.0 / (grown + 1.0)) * factor


@triton.jit
def absorb(scores, highest, total):
    """The running softmax to base 2: (weights, what older sums shrink by, new highest, new total)."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen nothing yet stays at -inf; it must not give nan.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    return weights, shrink, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def share(low, high, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Split `split` of SPLITS of [low, high), in whole tiles: its first and last position."""
    tiles = tl.cdiv(tl.maximum(high - low, 0), BLOCK_N)
    each = tl.cdiv(tiles, SPLITS)
    first = low + tl.minimum(split * each, tiles) * BLOCK_N
    last = low + tl.minimum((split + 1) * each, tiles) * BLOCK_N
    return first, last


@triton.jit
def finish(out, lse, acc, highest, total, at_out, at_lse, mask, mask_rows, factor):
    """Store what a program has summed: normalised, with the LSE to base 2."""
    seen = total > 0.0
    mixed = acc * (factor / tl.where(seen, total, 1.0))[:, None]
    tl.store(out + at_out, mixed.to(out.dtype.element_ty), mask=mask)
    found = tl.where(seen, highest + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse + at_lse, found, mask=mask_rows)


@triton.jit
def attend_kernel(
    q, pool, out, lse, pieces, starts, contexts, lengths, tables, sinks, k_scale, v_scale,
    rows, q_row, table_row, block_row, layer_at, scale, cap, window,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """q [rows, heads, DIM] -> out [SPLITS, rows, heads, DIM], lse [SPLITS, rows, heads] to base 2.

    One program a piece of BLOCK_Q rows, KV head and split. `scale` has log2(e) in it, unless CAPPED.
    """
    piece, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
    start, context, length = tl.load(starts + sequence), tl.load(contexts + sequence), tl.load(lengths + sequence)
    count = tl.load(starts + sequence + 1) - start
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, DIM_PAD)
    row, head = first + m // SHARED, kv * SHARED + m % SHARED
    mine = (m < BLOCK_Q * SHARED) & (row < count)
    position = context + row
    end = tl.minimum(length, position + 1) if CAUSAL else length + position * 0
    begin = tl.maximum(position - window + 1, 0) if WINDOWED else position * 0
    high = tl.minimum(length, context + tl.minimum(first + BLOCK_Q, count)) if CAUSAL else length
    low = tl.maximum(context + first - window + 1, 0) if WINDOWED else 0
    at_q = (start + row).to(tl.int64)
    queries = tl.load(
        q + at_q[:, None] * q_row + head[:, None] * DIM + d[None, :], mask=mine[:, None] & (d[None, :] < DIM), other=0.0
    )
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:  # of all splits the first one sees them
        sink = tl.load(sinks + head, mask=mine, other=0.0).to(tl.float32) * 1.4426950408889634
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, total + 1.0, total)
    acc = tl.zeros((BLOCK_M, DIM_PAD), tl.float32)
    k_factor = tl.load(k_scale + kv) * scale if SCALED else scale
    v_factor = tl.load(v_scale + kv) if SCALED else 1.0
    begin_at, end_at = share(low // PAGE * PAGE, high, split, SPLITS, BLOCK_N)
    for at in range(begin_at, end_at, BLOCK_N):
        token = at + tl.arange(0, BLOCK_N)
        block = tl.load(tables + sequence.to(tl.int64) * table_row + token // PAGE, mask=token < high, other=-1)
        # What no row of the piece sees may be anything: also as a value times zero.
        there = (block >= 0) & (token >= low)
        base = block * block_row + layer_at + (kv * PAGE + token % PAGE) * DIM
        where = base[:, None] + d[None, :]
        inside = there[:, None] & (d[None, :] < DIM)
        keys = tl.load(pool + where, mask=inside, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * k_factor
        if CAPPED:
            scores = soften(scores, cap, 1.4426950408889634)
        visible = there[None, :] & (token[None, :] < end[:, None]) & (token[None, :] >= begin[:, None])
        weights, shrink, highest, total = absorb(tl.where(visible, scores, float("-inf")), highest, total)
        values = tl.load(pool + where + KV_HEADS * PAGE * DIM, mask=inside, other=0.0).to(queries.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
    result = (split.to(tl.int64) * rows + at_q) * (KV_HEADS * SHARED) + head
    finish(
        out, lse, acc, highest, total, result[:, None] * DIM + d[None, :], result,
        mine[:, None] & (d[None, :] < DIM), mine, v_factor,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a launch: `rows` of a product (queries times the heads that share), `keys` of a tile, `splits` of a
    context, warps and stages. What a tuning table chooses."""

    rows: int = 64
    keys: int = 64
    splits: int = 1
    warps: int = 4
    stages: int = 2


def attend(q: Tensor, pool: Tensor, layer: int, where: Ragged, scores: Scores, tiling: Tiling) -> Partial:
    """See `forebay.kernels.paged.attend`: out in the dtype of `q`, LSE in fp32 to base e. Mutates nothing.

    `q` may be a slice of wider rows. `pool` is contiguous.
    """
    assert pool.is_contiguous() and q.stride()[1:] == (q.shape[2], 1), (pool.stride(), q.stride())
    (rows, heads, dim), kv_heads = q.shape, pool.shape[3]
    shared, splits = heads // kv_heads, tiling.splits
    block_m = max(ROWS_MIN, tiling.rows, triton.next_power_of_2(shared))
    block_q = block_m // shared
    pieces = where.pieces(block_q)
    out = torch.empty(splits, rows, heads, dim, dtype=q.dtype if splits == 1 else torch.float32, device=q.device)
    lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    capped = scores.cap is not None
    if len(pieces):
        attend_kernel[(len(pieces), kv_heads, splits)](
            q, pool, out, lse, pieces, where.starts, where.contexts, where.lengths, where.tables,
            scores.sinks, scores.k_scale, scores.v_scale,
            rows, q.stride(0), where.tables.stride(0), pool.stride(0), layer * pool.stride(1),
            scores.scale if capped else scores.scale * LOG2_E, scores.cap or 0.0, scores.window or 0,
            KV_HEADS=kv_heads, SHARED=shared, DIM=dim, DIM_PAD=max(ROWS_MIN, triton.next_power_of_2(dim)),
            BLOCK_Q=block_q, BLOCK_M=block_m, BLOCK_N=tiling.keys, SPLITS=splits,
            CAUSAL=where.causal, WINDOWED=scores.window is not None, CAPPED=capped,
            SINKS=scores.sinks is not None, SCALED=scores.k_scale is not None,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    return merged(out, lse, q.dtype)


def merged(out: Tensor, lse: Tensor, dtype: torch.dtype) -> Partial:
    """The splits' results [splits, ...] as one."""
    if out.shape[0] == 1:
        return Partial(out[0], Lse(lse[0], "2").to("e"))
    return merge(out, Lse(lse, "2"), dtype)
