"""The index of sparse attention (DSA): scores of cached keys for each query, and the positions with the best of them.

    score(t) = sum over heads h of w_h * max(0, q_h . k_t)

A token has one key for all heads; keys are a cache group of their own, [blocks, layers, 1, 1, 16, width]. They are
stored in the model's dtype, or *scaled*: as float8_e4m3fn bytes with an fp32 power of two behind them, so that
multiplying is exact. Before that, a key and its queries may be turned by a Hadamard matrix, which changes no product,
and leaves no value of a key much larger than the others.

Scores are fp32 or better whatever the keys are. Zeros are frequent, and equal: the lower position wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, Batch
from forebay.kernels.best import Best
from forebay.kernels.chosen import NONE, Selection, physical_rows, sequence_of_rows
from forebay.kernels.dispatch import dispatch
from forebay.kernels.scratch import gather_rows

FP8_MAX = 448.0
FP8_NAN = 0x7F
FP16_BITS = -0x4080
"""Those of sign, exponent and mantissa that come from FP8."""

SMALLEST_SCALE = 2.0**-60
"""A key all of whose values are smaller still is zero."""

KEY_BLOCKS = 256
"""Blocks of keys that are decoded at a time. What is best so far is kept from one part to the next."""

STRETCH = 512
"""Keys that are scored at a time, for all rows of a tile."""

SCORE_BYTES = 8 * 2**20
"""The most that scores of all heads of a tile of queries take for a stretch, and those of all queries for a part."""


# --- stored keys ---------------------------------------------------------------------------------------------


def hadamard(x: Tensor) -> Tensor:
    """`x` [..., n] times the symmetric orthogonal matrix of +-n**-0.5; n is a power of two."""
    n = x.shape[-1]
    assert n & (n - 1) == 0, n
    flat = x.reshape(-1, n)
    step = 1
    while step < n:
        left, right = flat.view(-1, n // (2 * step), 2, step).unbind(2)
        flat = torch.stack((left + right, left - right), dim=2).view(-1, n)
        step *= 2
    return (flat * n**-0.5).view(x.shape)


def scale_keys(keys: Tensor) -> Tensor:
    """uint8 [T, dim + 4]: `keys` [T, dim] as float8_e4m3fn, each row with its scale behind it."""
    exact = keys.to(torch.float32)
    largest = exact.abs().amax(dim=1, keepdim=True)
    # The least power of two with which the largest value fits: exponents alone, so that no rounding has a say.
    mantissa, exponent = torch.frexp(largest / FP8_MAX)
    scales = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).to(exponent.dtype))
    scales = scales.clamp_min(SMALLEST_SCALE)
    values = (exact / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((values, scales.view(torch.uint8)), dim=1)


def unscale_keys(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, but for rounding: [n, dim] in `dtype` of uint8 [n, dim + 4]."""
    scales = stored[:, -4:].contiguous().view(torch.float32).to(dtype)
    if stored.device.type != "cpu":
        return stored[:, :-4].contiguous().view(torch.float8_e4m3fn).to(dtype) * scales
    # The bits of an FP8 number, exponent and mantissa moved to where FP16 has them, are that number times 2^-8. Torch
    # converts FP16 several times as fast as FP8. Only what is no number would become one.
    bits = stored[:, :-4].contiguous().view(torch.int8)
    if len(bits) and int(bits.bitwise_and(FP8_NAN).amax()) == FP8_NAN:
        return bits.view(torch.float8_e4m3fn).to(dtype) * scales
    halves = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(FP16_BITS).view(torch.float16)
    return halves.to(dtype).mul_(2.0**8).mul_(scales)


def write_keys(pool: Tensor, layer_in_group: int, slots: Tensor, keys: Tensor) -> None:
    """Store `keys` [T, dim] of one layer at `slots` int64 [T]. Mutates `pool`, whose dtype says in which form."""
    rows = scale_keys(keys) if pool.dtype == torch.uint8 else keys.to(pool.dtype)
    at = physical_rows(slots, pool.shape[1], layer_in_group)
    pool.view(-1, pool.shape[-1]).index_copy_(0, at, rows)


def _read_keys(pool: Tensor, layer_in_group: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys [n * 16, dim] of `blocks` int64 [n], in `dtype`; perhaps valid until the next gather only."""
    _, layers, _, _, _, width = pool.shape
    found = gather_rows(pool.view(-1, BLOCK_TOKENS * width), blocks * layers + layer_in_group).view(-1, width)
    return unscale_keys(found, dtype) if pool.dtype == torch.uint8 else found.to(dtype)


# --- choosing ------------------------------------------------------------------------------------------------


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[R, n] of queries `q` [R, heads, dim] with `weights` [R, heads] and `keys` [n, dim], all in one dtype."""
    rows, heads, dim = q.shape
    products = (q.reshape(rows * heads, dim) @ keys.T).relu_().view(rows, heads, -1)
    return torch.bmm(weights[:, None], products)[:, 0]


def choose_positions(
    q: Tensor, weights: Tensor, pool: Tensor, layer_in_group: int, batch: Batch, group: str, top_k: int,
    rows: Tensor | None = None,
) -> Selection:  # fmt: skip
    """For each row of the batch, or for `rows` int64 alone, which ascend, the `top_k` best of its own sequence's
    positions up to itself.

    `q` [R, heads, dim] and `weights` [R, heads] are these rows'; scores are computed in the dtype of `weights`, fp32 or
    fp64. The batch's own keys must have been written. Mutates nothing. Blocks.
    """
    sequences = sequence_of_rows(batch)
    rows = torch.arange(len(sequences), device=sequences.device) if rows is None else rows
    sequences = sequences.index_select(0, rows)
    longest = max(span.total_len for span in batch.spans)
    width = min(top_k, longest)
    if dispatch().choose("index", weights, pool) == "triton":
        from forebay.kernels import forms

        tables, ends = batch.groups[group].block_tables, batch.positions.index_select(0, rows) + 1
        args = (q, weights, pool, layer_in_group, tables, sequences, ends, longest, width)
        return Selection(rows, sequences, forms.choose_positions(*args))
    out = torch.full((len(rows), width), NONE, dtype=torch.int64, device=rows.device)
    begin = 0
    for index, count in enumerate(torch.bincount(sequences, minlength=len(batch.spans)).tolist()):
        if not count:
            continue
        part, span = slice(begin, begin + count), batch.spans[index]
        blocks = batch.groups[group].block_tables[index, : (span.total_len - 1) // BLOCK_TOKENS + 1]
        ends = batch.positions.index_select(0, rows[part]) + 1
        keys = Keys(pool, layer_in_group, blocks, weights.dtype)
        _choose(q[part].to(weights.dtype), weights[part], keys, ends, out[part])
        begin += count
    return Selection(rows, sequences, out)


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """One sequence's keys, which lie in `blocks` [n], in `dtype`. What is given is perhaps valid until the next gather
    only."""

    pool: Tensor
    layer_in_group: int
    blocks: Tensor
    dtype: torch.dtype

    def part(self, first: int) -> Tensor:
        """From position `first` on, which begins a block, `KEY_BLOCKS` blocks of them."""
        start = first // BLOCK_TOKENS
        return _read_keys(self.pool, self.layer_in_group, self.blocks[start : start + KEY_BLOCKS], self.dtype)

    def all(self) -> Tensor:
        """All of them [n * 16, dim], those behind the sequence's end included."""
        return _read_keys(self.pool, self.layer_in_group, self.blocks, self.dtype)


def _choose(q: Tensor, weights: Tensor, keys: Keys, ends: Tensor, out: Tensor) -> None:
    """One sequence's rows, the first of which sees `ends[0]` positions, and so on: ascending."""
    longest = min(KEY_BLOCKS, len(keys.blocks)) * BLOCK_TOKENS
    widest = max(longest, q.shape[1] * min(STRETCH, longest))
    tile = max(1, SCORE_BYTES // (widest * q.element_size()))
    # Without a weight above zero no score is: such rows go together, as they need nothing more after enough zeros.
    hopeful = (weights > 0).any(dim=1)
    for group, most in ((hopeful, math.inf), (~hopeful, 0.0)):
        for rows in group.nonzero()[:, 0].split(tile):
            if len(rows):
                chosen = _choose_tile(q[rows], weights[rows], keys, ends[rows], out.shape[1], most)
                out[rows, : chosen.shape[1]] = chosen


def _choose_tile(q: Tensor, weights: Tensor, keys: Keys, ends: Tensor, count: int, most: float) -> Tensor:
    """int64 [r, at most count], NONE behind the last. No score exceeds `most`."""
    best, scorer = Best(len(q), count, q), Scorer(q, weights)
    first_end, last = int(ends[0]), int(ends[-1])
    for first in range(0, last, KEY_BLOCKS * BLOCK_TOKENS):
        if best.reach(most):
            break
        part = keys.part(first)[: last - first]
        size = len(part) if best.dense(first) else STRETCH
        for at in range(first, first + len(part), size):
            scores = scorer.scores(part[at - first : at - first + size])
            if at + scores.shape[1] > first_end:  # else everybody sees all of it
                seen = torch.arange(at, at + scores.shape[1], device=q.device) < ends[:, None]
                scores.masked_fill_(~seen, -math.inf)
            (best.take if best.dense(first) else best.sift)(scores, at)
    return best.positions()


class Scorer:
    """`index_scores` of the same queries again and again, a stretch of keys at a time, in memory that is kept: products
    stay in the cache, and fresh memory costs more than all else."""

    def __init__(self, q: Tensor, weights: Tensor) -> None:
        self._q, self._weights = q.flatten(0, 1).contiguous(), weights[:, None].contiguous()
        self._products, self._scores = q.new_empty(0), q.new_empty(0)

    def scores(self, keys: Tensor) -> Tensor:
        """[R, n] of `keys` [n, dim]; valid until the next call, and the caller's to change."""
        rows, n = len(self._weights), len(keys)
        if len(self._scores) < rows * n:
            self._scores = self._q.new_empty(rows * n)
        scores = self._scores[: rows * n].view(rows, 1, n)
        for begin in range(0, n, STRETCH):
            self._score(keys[begin : begin + STRETCH], scores[..., begin : begin + STRETCH])
        return scores[:, 0]

    def _score(self, keys: Tensor, out: Tensor) -> None:
        rows, heads, n = len(self._weights), self._weights.shape[2], len(keys)
        if not len(self._products):
            self._products = self._q.new_empty(rows * heads * STRETCH)
        products = self._products[: rows * heads * n].view(rows * heads, n)
        torch.mm(self._q, keys.T, out=products).relu_()
        torch.bmm(self._weights, products.view(rows, heads, n), out=out)


# --- the oracle ----------------------------------------------------------------------------------------------


def choose_reference(scores: Tensor, top_k: int) -> list[int]:
    """What must be chosen of positions with `scores` [n]: sorted one by one. Slow: for tests."""
    return sorted(range(len(scores)), key=lambda at: (-float(scores[at]), at))[:top_k]
