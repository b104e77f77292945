"""Latent attention over chosen rows: as `latent.py`, but each query brings the slots of the rows that it reads.

A program takes BLOCK_H heads of one query and one split of its rows, in the order in which they were chosen.
"""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu.attend import LOG2_E, PAGE, ROWS_MIN, Tiling, absorb, finish, merged, share
from forebay.kernels.lse import Partial


@triton.jit
def sparse_kernel(
    q, pool, slots, out, lse, rows, heads, count, block_row, layer_at, scale,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """q [rows, heads, RANK + ROPE], slots int64 [rows, count] -> out [SPLITS, rows, heads, RANK], lse [SPLITS, rows,
    heads] to base 2. One program a row, BLOCK_H heads and a split. `scale` has log2(e) in it."""
    at_row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c, r = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    mine = head < heads
    width: tl.constexpr = RANK + ROPE
    at_q = (at_row * heads + head) * width
    latent = tl.load(q + at_q[:, None] + c[None, :], mask=mine[:, None] & (c[None, :] < RANK), other=0.0)
    turned = tl.load(q + at_q[:, None] + RANK + r[None, :], mask=mine[:, None] & (r[None, :] < ROPE), other=0.0)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK_PAD), tl.float32)
    begin_at, end_at = share(0, count, split, SPLITS, BLOCK_N)
    for at in range(begin_at, end_at, BLOCK_N):
        k = at + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + at_row * count + k, mask=k < count, other=-1)
        there = slot >= 0
        base = slot // PAGE * block_row + layer_at + (slot % PAGE) * width
        rows_c = tl.load(pool + base[:, None] + c[None, :], mask=there[:, None] & (c[None, :] < RANK), other=0.0)
        rows_r = tl.load(pool + base[:, None] + RANK + r[None, :], mask=there[:, None] & (r[None, :] < ROPE), other=0.0)
        scores = tl.dot(latent, tl.trans(rows_c), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(rows_r), scores, input_precision="ieee") * scale
        scores = tl.where(there[None, :] & mine[:, None], scores, float("-inf"))
        weights, shrink, highest, total = absorb(scores, highest, total)
        acc = acc * shrink[:, None] + tl.dot(weights.to(latent.dtype), rows_c, input_precision="ieee")
    result = (split.to(tl.int64) * rows + at_row) * heads + head
    finish(
        out, lse, acc, highest, total, result[:, None] * RANK + c[None, :], result,
        mine[:, None] & (c[None, :] < RANK), mine, 1.0,
    )  # fmt: skip


def attend_chosen(
    q: Tensor, pool: Tensor, layer: int, slots: Tensor, scale: float, *, rank: int, tiling: Tiling
) -> Partial:
    """See `forebay.kernels.sparse.sparse_latent_attention`: out in the dtype of `q`, LSE in fp32 to base e. Mutates
    nothing. All are contiguous, `pool` in the dtype of `q`."""
    assert pool.is_contiguous() and q.is_contiguous() and slots.is_contiguous(), (pool.stride(), q.stride())
    assert pool.dtype == q.dtype, (pool.dtype, q.dtype)
    (rows, heads, width), splits = q.shape, tiling.splits
    block_h = max(ROWS_MIN, min(tiling.rows, triton.next_power_of_2(heads)))
    out = torch.empty(splits, rows, heads, rank, dtype=q.dtype if splits == 1 else torch.float32, device=q.device)
    lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    if rows:
        sparse_kernel[(rows, triton.cdiv(heads, block_h), splits)](
            q, pool, slots, out, lse, rows, heads, slots.shape[1], pool.stride(0), layer * pool.stride(1),
            scale * LOG2_E,
            RANK=rank, RANK_PAD=max(ROWS_MIN, triton.next_power_of_2(rank)),
            ROPE=width - rank, ROPE_PAD=max(ROWS_MIN, triton.next_power_of_2(width - rank)),
            BLOCK_H=block_h, BLOCK_N=tiling.keys, SPLITS=splits, num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    return merged(out, lse, q.dtype)
