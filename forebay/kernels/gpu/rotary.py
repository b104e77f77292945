"""Norms of heads, rotation and cache write as one pass over a layer's queries, keys and values: a program a head."""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.narrow import LARGEST, KvScales
from forebay.kernels.rotary import HeadNorms, Turn

PAGE = tl.constexpr(16)


@triton.jit
def kept(values, scale, x, pool, MOST: tl.constexpr):
    """fp32 `values` as the pool keeps them, once they are rounded as those of `x` are: in FP8 divided by `scale` and
    cut to MOST."""
    rounded = values.to(x.dtype.element_ty)
    if MOST > 0:
        cut = tl.minimum(tl.maximum(rounded.to(tl.float32) / scale, -MOST), MOST)
        return cut.to(pool.dtype.element_ty)
    else:
        return rounded.to(pool.dtype.element_ty)


@triton.jit
def turn_kernel(
    x, cos, sin, q_weight, k_weight, pool, slots, k_scale, v_scale, x_row, block_row, layer_at, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, WRITE: tl.constexpr, MOST: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """x [rows, HEADS + 2 * KV_HEADS, DIM]: heads up to HEADS are rotated in place, the next KV_HEADS rotated into the
    pool's K, the last copied into its V. Without WRITE there are only the first. MOST: the largest number of a pool in
    FP8, 0 of others. One program a row and head."""
    row, head = tl.program_id(0), tl.program_id(1)
    start = x + row.to(tl.int64) * x_row + head * DIM
    i, rest = tl.arange(0, HALF_PAD), 2 * HALF + tl.arange(0, REST_PAD)
    turning, resting = i < HALF, rest < DIM
    at_left = 2 * i if PAIRS else i
    at_right = 2 * i + 1 if PAIRS else HALF + i
    left = tl.load(start + at_left, mask=turning, other=0.0).to(tl.float32)
    right = tl.load(start + at_right, mask=turning, other=0.0).to(tl.float32)
    still = tl.load(start + rest, mask=resting, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            squares = tl.sum(left * left, 0) + tl.sum(right * right, 0) + tl.sum(still * still, 0)
            scale = tl.rsqrt(squares / DIM + eps)
            weight = q_weight if head < HEADS else k_weight
            left *= scale * tl.load(weight + at_left, mask=turning, other=0.0)
            right *= scale * tl.load(weight + at_right, mask=turning, other=0.0)
            still *= scale * tl.load(weight + rest, mask=resting, other=0.0)
        c = tl.load(cos + row * HALF + i, mask=turning, other=0.0)
        s = tl.load(sin + row * HALF + i, mask=turning, other=0.0)
        turned = left * c - right * s
        right = right * c + left * s
        left = turned
    if head < HEADS:
        tl.store(start + at_left, left.to(x.dtype.element_ty), mask=turning)
        tl.store(start + at_right, right.to(x.dtype.element_ty), mask=turning)
        tl.store(start + rest, still.to(x.dtype.element_ty), mask=resting)
    elif WRITE:
        # Rounded as a product's result would be, whatever the pool holds.
        slot = tl.load(slots + row)
        if slot >= 0:
            vector = head - HEADS  # K heads, then V heads, as in a block
            target = pool + slot // PAGE * block_row + layer_at + (vector * PAGE + slot % PAGE) * DIM
            scale = 1.0
            if SCALED:
                scales = k_scale if vector < KV_HEADS else v_scale
                scale = tl.load(scales + vector % KV_HEADS)
            tl.store(target + at_left, kept(left, scale, x, pool, MOST), mask=turning)
            tl.store(target + at_right, kept(right, scale, x, pool, MOST), mask=turning)
            tl.store(target + rest, kept(still, scale, x, pool, MOST), mask=resting)


def rotate_(x: Tensor, turn: Turn) -> None:
    """Rotate x [T, heads, head_dim] in place; rows may be slices of wider ones. Angles in fp32."""
    _launch(x, turn, None, None, 0, None, x.shape[1], 0, None)


def norm_rotate_write(
    qkv: Tensor, turn: Turn, norms: HeadNorms | None, pool: Tensor, layer: int, slots: Tensor, heads: int,
    scales: KvScales | None = None,
) -> None:  # fmt: skip
    """See `forebay.kernels.rotary.norm_rotate_write`; angles and weights in fp32, all contiguous."""
    assert pool.is_contiguous(), pool.stride()
    _launch(qkv, turn, norms, pool, layer, slots, heads, pool.shape[3], scales)


def _launch(
    x: Tensor, turn: Turn, norms: HeadNorms | None, pool: Tensor | None, layer: int, slots: Tensor | None, heads: int,
    kv_heads: int, scales: KvScales | None,
) -> None:  # fmt: skip
    rows, vectors, dim = x.shape
    half = turn.cos.shape[1]
    assert x.stride()[1:] == (dim, 1) and vectors == heads + 2 * kv_heads, (x.shape, x.stride(), heads, kv_heads)
    assert turn.cos.is_contiguous() and turn.sin.is_contiguous() and 2 * half <= dim, (turn.cos.shape, dim)
    if not rows:
        return
    turn_kernel[(rows, vectors)](
        x, turn.cos, turn.sin, None if norms is None else norms.q, None if norms is None else norms.k, pool, slots,
        None if scales is None else scales.k, None if scales is None else scales.v,
        x.stride(0), 0 if pool is None else pool.stride(0), 0 if pool is None else layer * pool.stride(1),
        0.0 if norms is None else norms.eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=half, HALF_PAD=triton.next_power_of_2(half),
        REST_PAD=triton.next_power_of_2(max(1, dim - 2 * half)), PAIRS=turn.pairs, NORM=norms is not None,
        WRITE=pool is not None, MOST=0.0 if pool is None else LARGEST.get(pool.dtype, 0.0), SCALED=scales is not None,
        num_warps=1,
    )  # fmt: skip
