"""Choosing tokens: one program a row, in passes over the row's logits, which stay in the cache.

Which tokens `top_k` and `top_p` leave is found by bisection over the logits' bits, whose order as integers is theirs as
numbers: 32 passes each, no sort. Those at the threshold itself are counted from the smallest id on.
"""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.choose import Choices

BLOCK = 4096


@triton.jit
def rank_of(scores):
    """int64 that are ordered as the fp32 numbers are."""
    bits = scores.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def weigh(scores, highest, temperature):
    """fp64 weights of fp32 scores, the largest being 1."""
    return tl.exp((scores.to(tl.float64) - highest.to(tl.float64)) / temperature)


@triton.jit
def left(row, vocab, limit, ties, tied, first, BLOCK: tl.constexpr):
    """Of the tokens from `first` on: where they are, their scores and ranks, which have the rank `limit`, and which
    (limit, ties) leaves, after `tied` of that rank before them."""
    at = first + tl.arange(0, BLOCK)
    scores = tl.load(row + at, mask=at < vocab, other=float("-inf"))
    rank = rank_of(scores)
    equal = ((rank == limit) & (at < vocab)).to(tl.int32)
    kept = ((rank > limit) | ((equal > 0) & (tied + tl.cumsum(equal, 0) <= ties))) & (at < vocab)
    return at, scores, rank, equal, kept


@triton.jit
def above(row, vocab, limit, ties, highest, temperature, least, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How many (COUNT) or how much of the tokens that (limit, ties) leaves have a rank of at least `least`."""
    found = tl.zeros((), tl.float64)
    tied = tl.zeros((), tl.int32)
    for first in range(0, vocab, BLOCK):
        _at, scores, rank, equal, kept = left(row, vocab, limit, ties, tied, first, BLOCK)
        amount = 1.0 if COUNT else weigh(scores, highest, temperature)
        found += tl.sum(tl.where(kept & (rank >= least), amount, 0.0).to(tl.float64), 0)
        tied += tl.sum(equal, 0)
    return found


@triton.jit
def tighten(row, vocab, limit, ties, highest, temperature, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The highest rank from which on the tokens left are still `wanted`, and how many of that rank are needed."""
    least = tl.zeros((), tl.int64)
    for step in range(32):
        tried = least + (tl.full((), 1, tl.int64) << (31 - step))
        enough = above(row, vocab, limit, ties, highest, temperature, tried, COUNT, BLOCK) >= wanted
        least = tl.where(enough, tried, least)
    more = above(row, vocab, limit, ties, highest, temperature, least + 1, COUNT, BLOCK)
    bits = (least - 2147483648).to(tl.int32)
    score = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    each = 1.0 if COUNT else weigh(score, highest, temperature)
    needed = tl.maximum(tl.ceil((wanted - more) / each), 1.0).to(tl.int32)
    return least, tl.where(least == limit, tl.minimum(needed, ties), needed)


@triton.jit
def draw(row, vocab, limit, ties, highest, temperature, uniform, BLOCK: tl.constexpr):
    """The first token, of those left, whose cumulated weight passes `uniform` of the total; else the last one."""
    total = above(row, vocab, limit, ties, highest, temperature, limit, False, BLOCK)
    target, sum_before = total * uniform, tl.zeros((), tl.float64)
    chosen, last = tl.full((), 2147483647, tl.int32), tl.zeros((), tl.int32)
    tied = tl.zeros((), tl.int32)
    for first in range(0, vocab, BLOCK):
        at, scores, _rank, equal, kept = left(row, vocab, limit, ties, tied, first, BLOCK)
        weights = tl.where(kept, weigh(scores, highest, temperature), 0.0)
        passed = kept & (sum_before + tl.cumsum(weights, 0) > target)
        chosen = tl.minimum(chosen, tl.min(tl.where(passed, at, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(kept, at, 0), 0))
        sum_before += tl.sum(weights, 0)
        tied += tl.sum(equal, 0)
    return tl.minimum(chosen, last)


@triton.jit
def choose_kernel(logits, temperatures, top_ks, top_ps, uniforms, out, vocab, stride, BLOCK: tl.constexpr):
    """logits [rows, vocab] fp32 -> out int64 [rows]. One program a row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    temperature = tl.load(temperatures + index)
    highest = tl.full((), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.max(tl.load(row + at, mask=at < vocab, other=float("-inf")), 0))
    chosen = tl.full((), 2147483647, tl.int32)
    if temperature == 0.0:
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            scores = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            chosen = tl.minimum(chosen, tl.min(tl.where((scores == highest) & (at < vocab), at, 2147483647), 0))
    else:
        limit, ties = tl.full((), -1, tl.int64), tl.zeros((), tl.int32)
        top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
        if (top_k > 0) & (top_k < vocab):
            limit, ties = tighten(
                row, vocab, limit, ties, highest, temperature, top_k.to(tl.float64), True, BLOCK
            )  # fmt: skip
        if top_p < 1.0:
            total = above(row, vocab, limit, ties, highest, temperature, limit, False, BLOCK)
            limit, ties = tighten(row, vocab, limit, ties, highest, temperature, total * top_p, False, BLOCK)
        chosen = draw(row, vocab, limit, ties, highest, temperature, tl.load(uniforms + index), BLOCK)
    tl.store(out + index, chosen.to(tl.int64))


def choose(logits: Tensor, choices: Choices, *, block: int = BLOCK) -> Tensor:
    """See `forebay.kernels.choose.choose`; `logits` fp32, its rows contiguous."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        choose_kernel[(rows,)](
            logits, choices.temperature, choices.top_k, choices.top_p, choices.uniform, out, vocab, logits.stride(0),
            BLOCK=min(block, triton.next_power_of_2(vocab)), num_warps=8,
        )  # fmt: skip
    return out
