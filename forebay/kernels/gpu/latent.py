"""Absorbed latent attention (MLA) over the paged pool: all heads share one row a token, which is key and value at once.

A program takes BLOCK_H heads of one row and one split of its context, and reads each latent once for scores and sum.
For decodes and short runs of rows; long prefills do less work with keys and values expanded.
"""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu.attend import LOG2_E, PAGE, ROWS_MIN, Tiling, absorb, finish, merged, share
from forebay.kernels.lse import Partial
from forebay.kernels.paged import Scores
from forebay.kernels.ragged import Ragged


@triton.jit
def latent_kernel(
    q, pool, out, lse, pieces, starts, contexts, lengths, tables, k_scale,
    rows, heads, table_row, block_row, layer_at, scale,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """q [rows, heads, RANK + ROPE] -> out [SPLITS, rows, heads, RANK], lse [SPLITS, rows, heads] to base 2.

    One program a row, BLOCK_H heads and a split. `scale` has log2(e) in it.
    """
    piece, split = tl.program_id(0), tl.program_id(2)
    sequence, row = tl.load(pieces + 2 * piece), tl.load(pieces + 2 * piece + 1)
    context, length = tl.load(contexts + sequence), tl.load(lengths + sequence)
    at_row = (tl.load(starts + sequence) + row).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c, r = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    mine = head < heads
    width: tl.constexpr = RANK + ROPE
    at_q = (at_row * heads + head) * width
    latent = tl.load(q + at_q[:, None] + c[None, :], mask=mine[:, None] & (c[None, :] < RANK), other=0.0)
    turned = tl.load(q + at_q[:, None] + RANK + r[None, :], mask=mine[:, None] & (r[None, :] < ROPE), other=0.0)
    high = tl.minimum(length, context + row + 1) if CAUSAL else length
    factor = tl.load(k_scale) if SCALED else 1.0
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK_PAD), tl.float32)
    begin_at, end_at = share(0, high, split, SPLITS, BLOCK_N)
    for at in range(begin_at, end_at, BLOCK_N):
        token = at + tl.arange(0, BLOCK_N)
        block = tl.load(tables + sequence.to(tl.int64) * table_row + token // PAGE, mask=token < high, other=-1)
        there = block >= 0
        base = block * block_row + layer_at + (token % PAGE) * width
        rows_c = tl.load(pool + base[:, None] + c[None, :], mask=there[:, None] & (c[None, :] < RANK), other=0.0)
        rows_c = rows_c.to(latent.dtype)
        rows_r = tl.load(pool + base[:, None] + RANK + r[None, :], mask=there[:, None] & (r[None, :] < ROPE), other=0.0)
        scores = tl.dot(latent, tl.trans(rows_c), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(rows_r.to(latent.dtype)), scores, input_precision="ieee") * (scale * factor)
        scores = tl.where(there[None, :] & mine[:, None], scores, float("-inf"))
        weights, shrink, highest, total = absorb(scores, highest, total)
        acc = acc * shrink[:, None] + tl.dot(weights.to(latent.dtype), rows_c, input_precision="ieee")
    result = (split.to(tl.int64) * rows + at_row) * heads + head
    finish(
        out, lse, acc, highest, total, result[:, None] * RANK + c[None, :], result,
        mine[:, None] & (c[None, :] < RANK), mine, factor,
    )  # fmt: skip


def attend_latents(
    q: Tensor, pool: Tensor, layer: int, where: Ragged, scores: Scores, *, rank: int, tiling: Tiling
) -> Partial:
    """See `forebay.kernels.paged.attend_latents`: out in the dtype of `q`, LSE in fp32 to base e. Mutates nothing.

    There is no window, cap or sink. `q` and `pool` are contiguous.
    """
    assert pool.is_contiguous() and q.is_contiguous(), (pool.stride(), q.stride())
    assert scores.window is None and scores.cap is None and scores.sinks is None, scores
    (rows, heads, width), splits = q.shape, tiling.splits
    pieces = where.pieces(1)
    block_h = max(ROWS_MIN, min(tiling.rows, triton.next_power_of_2(heads)))
    out = torch.empty(splits, rows, heads, rank, dtype=q.dtype if splits == 1 else torch.float32, device=q.device)
    lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    if len(pieces):
        latent_kernel[(len(pieces), triton.cdiv(heads, block_h), splits)](
            q, pool, out, lse, pieces, where.starts, where.contexts, where.lengths, where.tables, scores.k_scale,
            rows, heads, where.tables.stride(0), pool.stride(0), layer * pool.stride(1), scores.scale * LOG2_E,
            RANK=rank, RANK_PAD=max(ROWS_MIN, triton.next_power_of_2(rank)),
            ROPE=width - rank, ROPE_PAD=max(ROWS_MIN, triton.next_power_of_2(width - rank)),
            BLOCK_H=block_h, BLOCK_N=tiling.keys, SPLITS=splits, CAUSAL=where.causal,
            SCALED=scores.k_scale is not None, num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    return merged(out, lse, q.dtype)
