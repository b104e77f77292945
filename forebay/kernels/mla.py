"""Latent attention over a paged pool, absorbed: all heads share one row a token, which is key and value at once.

A row is the latent (`rank` values, normed) and, behind it, the rotated part of the key that all heads share. The
projection from the latent to a head's key is applied to the query instead (into `rank` dimensions), the one to its
value after the sum. The pool is [num_blocks, layers, 1, 1, 16, width]: one plane, not K and V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, Batch, SequenceSpan
from forebay.kernels.dispatch import dispatch
from forebay.kernels.narrow import KvScales, is_narrow, narrow, widen_rows
from forebay.kernels.products import product_dtype

TILE_QUERIES = 128
"""Queries a prefill tile: its scores are heads x 128 x context."""

DECODE_GATHER_BYTES = 4 * 2**20
"""The most rows that one batch of decodes copies out of the pool at a time: they are still in the cache when used."""


def write_latents(
    pool: Tensor, layer_in_group: int, slots: Tensor, rows: Tensor, scales: KvScales | None = None
) -> None:
    """Store `rows` [T, width] of one layer at `slots` int64 [T]; in FP8, if the pool is, and then divided by the scale.
    Mutates `pool`."""
    _, layers, _, _, _, width = pool.shape
    block = slots // BLOCK_TOKENS
    at = (block * layers + layer_in_group) * BLOCK_TOKENS + slots % BLOCK_TOKENS
    flat = pool.view(-1, width)
    if is_narrow(pool.dtype):
        rows = narrow(rows, None if scales is None else scales.k, pool.dtype).view(torch.uint8)
        flat = flat.view(torch.uint8)
    flat.index_copy_(0, at, rows)


def latent_attention(
    q: Tensor, pool: Tensor, layer_in_group: int, batch: Batch, group: str, *, scale: float, rank: int,
    scales: KvScales | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of every row of the batch over its sequence's rows in `pool`, own rows included.

    `q` [T, heads, width] is the absorbed query and its rotated part. Returns [T, heads, rank], in the dtype of `q`:
    the weighted sum of latents, still to be projected to values. What is stored is multiplied by `scales`. The batch's
    own rows must have been written before.
    Mutates nothing (index tensors are kept in the batch).
    """
    if dispatch().choose("latent", q, pool) == "triton":
        from forebay.kernels import forms

        return forms.latent_attention(q, pool, layer_in_group, batch, group, scale, rank, scales)
    factor = 1.0 if scales is None else float(scales.k)
    own, q = q.dtype, q.to(product_dtype(q)) * (scale * factor)
    plan = batch.once(("latent attention", group), lambda: _plan(batch, group, pool, q.dtype))
    out = q.new_empty(q.shape[0], q.shape[1], rank)
    for span, blocks in plan.prefills:
        rows = _gather(pool, layer_in_group, blocks[None], q.dtype)[0]
        for begin in range(0, span.query_len, TILE_QUERIES):
            _attend_tile(q, rows, batch, span, begin, out)
    for decodes in plan.decodes:
        rows = _gather(pool, layer_in_group, decodes.blocks, q.dtype)
        rows.view(-1, rows.shape[2]).index_fill_(0, decodes.stale, 0)
        scores = torch.bmm(q.index_select(0, decodes.rows), rows.transpose(1, 2)).add_(decodes.mask)
        # Of whole rows: a batched product copies a factor that is a slice.
        mixed = torch.bmm(torch.softmax(scores, dim=-1), rows)[..., :rank]
        out.index_copy_(0, decodes.rows, mixed)
    return (out if factor == 1.0 else out.mul_(factor)).to(own)


@dataclass(frozen=True, slots=True, eq=False)
class _Decodes:
    """Sequences of one new token each, padded to a common number of blocks. `rows` [B] are theirs in the flat batch,
    `blocks` [B, n]; `mask` [B, 1, n * 16] is -inf behind each one's end. `stale`: those of the gathered rows that lie
    behind it. Whoever had the block before may have left anything there, and neither a mask nor a weight of 0 hides
    what is no number."""

    rows: Tensor
    blocks: Tensor
    mask: Tensor
    stale: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    prefills: tuple[tuple[SequenceSpan, Tensor], ...]
    decodes: tuple[_Decodes, ...]


def _plan(batch: Batch, group: str, pool: Tensor, dtype: torch.dtype) -> _Plan:
    tables = batch.groups[group].block_tables
    prefills = [(span, tables[index, : _blocks(span)]) for index, span in enumerate(batch.spans) if span.query_len > 1]
    singles = [index for index, span in enumerate(batch.spans) if span.query_len == 1]
    singles.sort(key=lambda index: _blocks(batch.spans[index]), reverse=True)
    decodes: list[_Decodes] = []
    row_bytes = BLOCK_TOKENS * pool.shape[-1] * dtype.itemsize
    while singles:
        longest = _blocks(batch.spans[singles[0]])
        most = max(1, DECODE_GATHER_BYTES // (longest * row_bytes))
        # At most half of what a part gathers is padding.
        part = [index for index in singles[:most] if _blocks(batch.spans[index]) * 2 >= longest]
        singles = singles[len(part) :]
        decodes.append(_join(batch, tables, part, longest, dtype))
    return _Plan(tuple(prefills), tuple(decodes))


def _join(batch: Batch, tables: Tensor, part: Sequence[int], width: int, dtype: torch.dtype) -> _Decodes:
    device, spans = tables.device, [batch.spans[index] for index in part]
    own = torch.tensor([_blocks(span) for span in spans], device=device)[:, None]
    at = torch.arange(width, device=device).expand(len(part), width)
    at = torch.where(at < own, at, 0)  # behind its own blocks the first one will do: the mask hides it
    blocks = tables[torch.tensor(part, device=device)[:, None], at]
    ends = torch.tensor([span.total_len for span in spans], device=device)
    hidden = torch.arange(width * BLOCK_TOKENS, device=device) >= ends[:, None]
    stored = (at * BLOCK_TOKENS)[..., None] + torch.arange(BLOCK_TOKENS, device=device)
    stale = (stored >= ends[:, None, None]).flatten().nonzero().flatten()
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
    rows = torch.tensor([span.query_start for span in spans], device=device)
    return _Decodes(rows, blocks, mask[:, None], stale)


def _blocks(span: SequenceSpan) -> int:
    return (span.total_len - 1) // BLOCK_TOKENS + 1


def _gather(pool: Tensor, layer_in_group: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """One layer's rows of `blocks` [B, n]: [B, n * 16, width] in `dtype`, until the next gather."""
    _, layers, _, _, _, width = pool.shape
    runs = (blocks * layers + layer_in_group).flatten()
    found = widen_rows(pool.view(-1, BLOCK_TOKENS * width), runs, dtype)
    return found.view(len(blocks), -1, width)


def _attend_tile(q: Tensor, rows: Tensor, batch: Batch, span: SequenceSpan, begin: int, out: Tensor) -> None:
    """Queries `begin` to `begin + TILE_QUERIES` of one sequence, whose rows are `rows` [n, width]."""
    heads, rank = q.shape[1], out.shape[2]
    size = min(TILE_QUERIES, span.query_len - begin)
    at = slice(span.query_start + begin, span.query_start + begin + size)
    seen = rows[: span.context_len + begin + size]
    scores = (q[at].reshape(size * heads, -1) @ seen.T).view(size, heads, -1)
    future = batch.once(("latent future", size, scores.dtype), lambda: _future(size, scores))
    scores[..., -size:].add_(future)
    mixed = torch.softmax(scores, dim=-1).view(size * heads, -1) @ seen[:, :rank]
    out[at] = mixed.view(size, heads, rank)


def _future(size: int, like: Tensor) -> Tensor:
    full = torch.full((size, size), -math.inf, dtype=like.dtype, device=like.device)
    return full.triu(1)[:, None]


def latent_attention_reference(
    q: Tensor, pool: Tensor, layer_in_group: int, batch: Batch, group: str, *, scale: float, rank: int
) -> Tensor:
    """What `latent_attention` must give, one query at a time, in fp64. Slow: for tests."""
    tables = batch.groups[group].block_tables.tolist()
    out = q.new_empty(q.shape[0], q.shape[1], rank)
    for sequence, span in enumerate(batch.spans):
        for row in range(span.query_start, span.query_end):
            position = span.context_len + row - span.query_start
            at = [(tables[sequence][p // 16], p % 16) for p in range(position + 1)]
            rows = torch.stack([pool[block, layer_in_group, 0, 0, offset] for block, offset in at]).double()
            weights = torch.softmax(q[row].double() @ rows.T * scale, dim=-1)
            out[row] = (weights @ rows[:, :rank]).to(q.dtype)
    return out
