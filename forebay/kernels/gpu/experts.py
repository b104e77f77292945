"""Products of experts' weights in one launch, over choices that are sorted by expert; activations; the sum of choices.

Weights are plain, FP8 with a scale for each block of 128 x 128, or MXFP4. FP8 meets activations that are FP8 too, with
a scale for each 128 of a row, or wider ones, to whose dtype it is widened. MXFP4 is unpacked here, or, with
activations in MXFP8, goes to the tensor cores as it is where they take it (sm_100 and gfx950).
"""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.experts import Activation, Kind, Sorted, Stack
from forebay.kernels.formats import Scaled
from forebay.kernels.gpu.route import sort_choices
from forebay.kernels.moe import Routes

PLAIN, FP8, FP8_BOTH, MXFP4, MXFP4_NATIVE = (tl.constexpr(form) for form in range(5))
SCALE_BLOCK = tl.constexpr(128)
ROW_BLOCK = 1024
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Of activations, as the kernel numbers them."""


@triton.jit
def nibbles(codes, scales, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """fp32 [BLOCK_N, BLOCK_K] from e2m1 codes [BLOCK_N, BLOCK_K / 2] and e8m0 scales [BLOCK_N, BLOCK_K / 32], uint8.

    By bits: an fp32's exponent is the scale's, so nothing is looked up.
    """
    wide = codes.to(tl.int32)
    code = tl.interleave(wide & 15, wide >> 4)
    exponent, half = (code >> 1) & 3, code & 1
    normal = ((exponent + 126) << 23) | (half << 22)
    bits = tl.where(exponent == 0, half * (126 << 23), normal) | ((code >> 3) << 31)
    step = scales.to(tl.int32)
    # 0 stands for 2^-127, which has no exponent of its own in fp32; 255 is no number.
    power = tl.where(step == 0, 0x00400000, tl.where(step == 255, 0x7FC00000, step << 23))
    values = tl.reshape(bits.to(tl.float32, bitcast=True), (BLOCK_N, BLOCK_K // 32, 32))
    return tl.reshape(values * power.to(tl.float32, bitcast=True)[:, :, None], (BLOCK_N, BLOCK_K))


@triton.jit
def plain_step(acc, x, w, n, k, ROWS_IN, N, K, mask_m, SAME: tl.constexpr):
    """acc += x @ w.T over one block of k."""
    left = tl.load(x + ROWS_IN[:, None] * K + k[None, :], mask=mask_m[:, None] & (k[None, :] < K), other=0.0)
    right = tl.load(w + n[:, None].to(tl.int64) * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
    if not SAME:
        right = right.to(left.dtype)
    return tl.dot(left, tl.trans(right), acc, input_precision="ieee")


@triton.jit
def fp8_step(acc, x, x_scale, w, w_scale, n, k, first, ROWS_IN, N, K, mask_m, BOTH: tl.constexpr):
    """The same over one block of 128 of k, whose product is scaled in fp32."""
    per_row = tl.cdiv(K, SCALE_BLOCK)
    part = plain_step(tl.zeros_like(acc), x, w, n, k, ROWS_IN, N, K, mask_m, BOTH)
    scale = tl.load(w_scale + (n // SCALE_BLOCK) * per_row + first // SCALE_BLOCK, mask=n < N, other=0.0)
    part = part * scale[None, :]
    if BOTH:
        part = part * tl.load(x_scale + ROWS_IN * per_row + first // SCALE_BLOCK, mask=mask_m, other=0.0)[:, None]
    return acc + part


@triton.jit
def mxfp4_step(
    acc, x, x_scale, w, w_scale, n, first, ROWS_IN, N, K, mask_m, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The same for packed weights. K is a multiple of 32."""
    k, packed = first + tl.arange(0, BLOCK_K), first // 2 + tl.arange(0, BLOCK_K // 2)
    group = first // 32 + tl.arange(0, BLOCK_K // 32)
    left = tl.load(x + ROWS_IN[:, None] * K + k[None, :], mask=mask_m[:, None] & (k[None, :] < K), other=0.0)
    inside = n[:, None] < N
    far = n[:, None].to(tl.int64)
    codes = tl.load(w + far * (K // 2) + packed[None, :], mask=inside & (packed[None, :] < K // 2), other=0)
    scales = tl.load(w_scale + far * (K // 32) + group[None, :], mask=inside & (group[None, :] < K // 32), other=127)
    if NATIVE:
        at = ROWS_IN[:, None] * (K // 32) + group[None, :]
        powers = tl.load(x_scale + at, mask=mask_m[:, None] & (group[None, :] < K // 32), other=127)
        return tl.dot_scaled(left, powers, "e4m3", tl.trans(codes), scales, "e2m1", acc)
    right = nibbles(codes, scales, BLOCK_N, BLOCK_K).to(left.dtype)
    return tl.dot(left, tl.trans(right), acc, input_precision="ieee")


@triton.jit
def products_kernel(
    x, x_scale, w, w_scale, bias, weights, out, choices, owners, padded_total, numel, N, K, w_row, scale_row,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORM: tl.constexpr,
    BIASED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """out[choice] [numel, N] = w[expert of choice] @ x[choice // SHARE], plus bias, times weight. One program BLOCK_M
    sorted choices, which are one expert's, and BLOCK_N of N."""
    block = tl.program_id(0)
    if block * BLOCK_M >= tl.load(padded_total):
        return
    expert = tl.load(owners + block).to(tl.int64)
    choice = tl.load(choices + block * BLOCK_M + tl.arange(0, BLOCK_M))
    mine = choice < numel
    row = (choice // SHARE).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w += expert * w_row
    if FORM != PLAIN:
        w_scale += expert * scale_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        if FORM == PLAIN:
            acc = plain_step(acc, x, w, n, k, row, N, K, mine, True)
        elif FORM <= FP8_BOTH:
            acc = fp8_step(acc, x, x_scale, w, w_scale, n, k, first, row, N, K, mine, FORM == FP8_BOTH)
        else:
            native: tl.constexpr = FORM == MXFP4_NATIVE
            acc = mxfp4_step(acc, x, x_scale, w, w_scale, n, first, row, N, K, mine, BLOCK_N, BLOCK_K, native)
    if BIASED:
        acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if WEIGHTED:
        acc *= tl.load(weights + choice, mask=mine, other=0.0)[:, None]
    at = choice.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mine[:, None] & (n[None, :] < N))


@triton.jit
def activate_kernel(gate_up, out, width, alpha, limit, beta, linear, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """gate_up [rows, 2 * width] -> out [rows, width]. KIND: 0 swiglu, 1 clamped, 2 situ, 3 geglu. A program a row and
    BLOCK."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    start = gate_up + row * 2 * width
    gate = tl.load(start + (2 * at if KIND == 1 else at), mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + (2 * at + 1 if KIND == 1 else width + at), mask=inside, other=0.0).to(tl.float32)
    if KIND == 1:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gate = gate / (1.0 + tl.exp(-gate * alpha))
    elif KIND == 2:
        soft = 1.0 / (1.0 + tl.exp(-gate))
        gate = beta * (1.0 - 2.0 / (tl.exp(2.0 * gate / beta) + 1.0)) * soft
        up = linear * (1.0 - 2.0 / (tl.exp(2.0 * up / linear) + 1.0))
    elif KIND == 3:
        # x * (1 + tanh(y)) / 2 is x / (1 + e^(-2y)).
        gate = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * width + at, (gate * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(given, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, width] = the sum of given [T, TOP_K, width], in the order of the choices."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        total += tl.load(given + (token * TOP_K + rank) * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a launch: `rows`, `columns` and `depth` of a tile, warps and stages. FP8 has a depth of 128."""

    rows: int = 16
    columns: int = 64
    depth: int = 64
    warps: int = 4
    stages: int = 3


def expert_products(
    x: Tensor | Scaled, stack: Stack, chosen: Tensor, order: Sorted, sizes: Sizes, *, dtype: torch.dtype,
    weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `forebay.kernels.experts.expert_products`; `order` is of `chosen`, its block `sizes.rows`. `dtype` is the
    result's. Scaled `x` goes with FP8 weights, and with MXFP4 if its scales are MX's."""
    values, x_scale = (x.values, x.scales) if isinstance(x, Scaled) else (x, None)
    assert values.is_contiguous() and stack.values.is_contiguous() and order.block == sizes.rows
    numel, n, k = chosen.numel(), stack.out_features, stack.in_features
    assert values.shape[1] == k and (not len(values) or numel % len(values) == 0), (values.shape, k, numel)
    out = torch.zeros(numel, n, dtype=dtype, device=values.device)
    scaled = x_scale is not None
    form = {"plain": PLAIN, "fp8": FP8_BOTH if scaled else FP8, "mxfp4": MXFP4_NATIVE if scaled else MXFP4}
    scales = stack.scales
    if numel:
        products_kernel[(len(order.experts), triton.cdiv(n, sizes.columns))](
            values, x_scale, stack.values, scales, stack.bias, weights, out, order.choices, order.experts, order.total,
            numel, n, k, stack.values.stride(0), 0 if scales is None else scales.stride(0),
            SHARE=numel // len(values), BLOCK_M=sizes.rows, BLOCK_N=sizes.columns,
            BLOCK_K=128 if stack.form == "fp8" else sizes.depth, FORM=form[stack.form].value,
            BIASED=stack.bias is not None, WEIGHTED=weights is not None,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    return out


def activate(gate_up: Tensor, act: Activation) -> Tensor:
    """See `forebay.kernels.experts.Activation`. `gate_up` is contiguous."""
    assert gate_up.is_contiguous(), gate_up.stride()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        activate_kernel[(rows, triton.cdiv(width, ROW_BLOCK))](
            gate_up, out, width, act.alpha, act.limit, act.beta, act.linear,
            KIND=KINDS.index(act.kind), BLOCK=min(ROW_BLOCK, triton.next_power_of_2(width)),
        )  # fmt: skip
    return out


def sum_choices(given: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """[T, n] from [T * top_k, n]."""
    tokens, width = given.shape[0] // top_k, given.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=given.device)
    if tokens:
        sum_kernel[(tokens, triton.cdiv(width, ROW_BLOCK))](
            given, out, width, TOP_K=top_k, BLOCK=min(ROW_BLOCK, triton.next_power_of_2(width))
        )
    return out


def mix(x: Tensor, routes: Routes, up: Stack, down: Stack, act: Activation, sizes: Sizes) -> Tensor:
    """See `forebay.kernels.experts.mix`: [T, n] in fp32, activations between in the dtype of `x`."""
    chosen = routes.experts.contiguous()
    order = sort_choices(chosen, up.values.shape[0], sizes.rows)
    raised = expert_products(x, up, chosen, order, sizes, dtype=x.dtype)
    weights = routes.weights.float().contiguous()
    active = activate(raised, act)
    given = expert_products(active, down, chosen, order, sizes, dtype=torch.float32, weights=weights)
    return sum_choices(given, chosen.shape[1], torch.float32)
