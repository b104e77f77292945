"""Which experts a token goes to, and the choices sorted by expert. Everything is stable: of equal scores the lower
expert comes first, and inside of an expert choices keep their order, so sums don't depend on who was faster.
"""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.experts import Sorted
from forebay.kernels.moe import Routes, Routing

SCAN = 1024
"""Choices that a program looks at at a time."""

NEG = tl.constexpr(float("-inf"))


@triton.jit
def keep_best_groups(
    worth, e, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS_PAD: tl.constexpr,
    TOP2: tl.constexpr,
):  # fmt: skip
    """-inf for the experts of all but the KEPT best groups."""
    size: tl.constexpr = EXPERTS // GROUPS
    g = tl.arange(0, GROUPS_PAD)
    of_group = tl.full((GROUPS_PAD,), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        inside = tl.where(e // size == group, worth, float("-inf"))
        best = tl.max(inside, 0)
        if TOP2:
            first = tl.argmax(inside, 0, tie_break_left=True)
            best += tl.max(tl.where(e == first, float("-inf"), inside), 0)
        of_group = tl.where(g == group, best, of_group)
    kept = tl.zeros(worth.shape, tl.int32)
    for _ in tl.static_range(KEPT):
        group = tl.argmax(of_group, 0, tie_break_left=True)
        kept = tl.where(e // size == group, 1, kept)
        of_group = tl.where(g == group, float("-inf"), of_group)
    return tl.where(kept > 0, worth, float("-inf"))


@triton.jit
def route_kernel(
    logits, bias, experts_out, weights_out, scale,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, SCORE: tl.constexpr,
    BIASED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUPS_PAD: tl.constexpr, TOP2: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    """logits [T, EXPERTS] fp32 -> experts int64 and weights fp32 [T, TOP_K]. One program a token. SCORE: 0 softmax over
    all, 1 sigmoid, 2 softmax over the chosen ones."""
    token = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, PAD), tl.arange(0, K_PAD)
    there = e < EXPERTS
    scores = tl.load(logits + token * EXPERTS + e, mask=there, other=float("-inf"))
    if SCORE == 0:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    elif SCORE == 1:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    worth = scores
    if BIASED:
        worth += tl.load(bias + e, mask=there, other=0.0)
    worth = tl.where(there, worth, float("-inf"))
    if GROUPS > 1:
        worth = keep_best_groups(worth, e, EXPERTS, GROUPS, KEPT, GROUPS_PAD, TOP2)
    chosen = tl.zeros((K_PAD,), tl.int64)
    weights = tl.full((K_PAD,), float("-inf") if SCORE == 2 else 0.0, tl.float32)
    for rank in tl.static_range(TOP_K):
        best = tl.argmax(worth, 0, tie_break_left=True)
        chosen = tl.where(k == rank, best.to(tl.int64), chosen)
        weights = tl.where(k == rank, tl.sum(tl.where(e == best, scores, 0.0), 0), weights)
        worth = tl.where(e == best, float("-inf"), worth)
    if SCORE == 2:
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    if RENORMALISE:
        weights = weights / tl.maximum(tl.sum(weights, 0), 1e-20)
    tl.store(experts_out + token * TOP_K + k, chosen, mask=k < TOP_K)
    tl.store(weights_out + token * TOP_K + k, weights * scale, mask=k < TOP_K)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Routes:
    """See `forebay.kernels.moe.route`; `logits` and `bias` in fp32, finite."""
    assert logits.dtype == torch.float32 and logits.is_contiguous(), (logits.dtype, logits.stride())
    tokens, experts = logits.shape
    score = ("softmax", "sigmoid", "top_softmax").index(routing.score)
    chosen = torch.empty(tokens, routing.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            logits, bias, chosen, weights, routing.scale,
            EXPERTS=experts, PAD=triton.next_power_of_2(experts), TOP_K=routing.top_k,
            K_PAD=triton.next_power_of_2(routing.top_k), SCORE=score,
            BIASED=bias is not None, GROUPS=routing.groups, KEPT=routing.kept_groups,
            GROUPS_PAD=triton.next_power_of_2(routing.groups), TOP2=routing.group_worth == "top2",
            RENORMALISE=routing.renormalise, num_warps=1,
        )  # fmt: skip
    return Routes(chosen, weights)


@triton.jit
def count_kernel(chosen, counts, total, SCAN: tl.constexpr):
    """counts[expert] = how many of `total` choices are that expert. One program an expert."""
    expert = tl.program_id(0)
    found = tl.zeros((), tl.int32)
    for first in range(0, total, SCAN):
        at = first + tl.arange(0, SCAN)
        found += tl.sum((tl.load(chosen + at, mask=at < total, other=-1) == expert).to(tl.int32), 0)
    tl.store(counts + expert, found)


@triton.jit
def place_kernel(
    chosen, counts, choices, owners, padded_total, total,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Each expert's choices, in order, at the place that the padded counts of those before it give. One program an
    expert."""
    expert = tl.program_id(0)
    e = tl.arange(0, PAD)
    blocks = (tl.load(counts + e, mask=e < EXPERTS, other=0) + BLOCK - 1) // BLOCK
    first_block = tl.sum(tl.where(e < expert, blocks, 0), 0)
    mine = tl.sum(tl.where(e == expert, blocks, 0), 0)
    if expert == 0:
        tl.store(padded_total, tl.sum(blocks, 0) * BLOCK)
    b = tl.arange(0, SCAN)
    for first in range(0, mine, SCAN):
        tl.store(owners + first_block + first + b, expert, mask=first + b < mine)
    place = first_block * BLOCK
    for first in range(0, total, SCAN):
        at = first + b
        hit = (tl.load(chosen + at, mask=at < total, other=-1) == expert).to(tl.int32)
        tl.store(choices + place + tl.cumsum(hit, 0) - 1, at, mask=hit > 0)
        place += tl.sum(hit, 0)
    pad = tl.arange(0, BLOCK)
    tl.store(choices + place + pad, total, mask=place + pad < (first_block + mine) * BLOCK)


def sort_choices(chosen: Tensor, experts: int, block: int) -> Sorted:
    """See `forebay.kernels.experts.sort_choices`. `block` is a power of two. What lies behind the total is garbage."""
    total = chosen.numel()
    blocks = min(total, (total + experts * (block - 1)) // block)
    device = chosen.device
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    choices = torch.empty(blocks * block, dtype=torch.int32, device=device)
    owners = torch.empty(blocks, dtype=torch.int32, device=device)
    padded_total = torch.zeros(1, dtype=torch.int32, device=device)
    if total:
        flat = chosen.contiguous()
        count_kernel[(experts,)](flat, counts, total, SCAN=SCAN)
        place_kernel[(experts,)](
            flat, counts, choices, owners, padded_total, total,
            EXPERTS=experts, PAD=triton.next_power_of_2(experts), BLOCK=block, SCAN=SCAN,
        )  # fmt: skip
    return Sorted(choices, owners, padded_total, block)
