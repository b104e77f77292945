"""Attention over a paged pool, as torch operations that run on any device.

On the CPU a product of matrices is what is fast: in bf16 it reaches twice the speed of torch's fused
attention in prefill, ten times in decode. So:

* the query heads that share a KV head are folded into the rows of one product;
* a prefill chunk goes in tiles of queries, each against no more keys than it can see: a windowed layer's
  work doesn't grow with the context, and the scores of a tile stay in the cache;
* decodes of similar context lengths are padded to one another and go as one batch of products.

Scores are rounded to the model's dtype, the softmax over them is computed in fp32 or better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, Batch, SequenceSpan
from forebay.kernels.dispatch import dispatch
from forebay.kernels.narrow import KvScales, widen_rows
from forebay.kernels.paged import Scores
from forebay.kernels.products import product_dtype

TILE_QUERIES = 128
"""Queries a prefill tile. Smaller wastes less on masked scores, larger makes better products."""

DECODE_GATHER_BYTES = 4 * 2**20
"""The most KV that one batch of decodes copies out of the pool at a time: it is still in the cache when it is used."""


def paged_attention(
    q: Tensor,
    pool: Tensor,
    layer_in_group: int,
    batch: Batch,
    group: str,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: KvScales | None = None,
) -> Tensor:
    """Causal attention of every row of the batch over its sequence's KV in `pool`, own rows included.

    `q` [T, heads, head_dim]; `heads` is a multiple of the pool's kv_heads. Returns [T, heads, head_dim] in the
    dtype of `q`. `window` counts visible positions, the query's own included. `sinks` [heads] are scores of a
    position without a value, which every query of that head sees beside its own. What is stored is multiplied by
    `scales`; a pool in FP8 is widened to the dtype of `q`. The batch's own K and V must have been written before.
    Mutates nothing (index tensors are kept in the batch). Runs as the Triton kernel where `forebay.kernels.dispatch`
    says so.
    """
    if dispatch().choose("attend", q, pool) == "triton":
        from forebay.kernels import forms

        k, v = (None, None) if scales is None else (scales.k, scales.v)
        scores = Scores(scale, softcap, window, sinks, k, v)
        return forms.paged_attention(q, pool, layer_in_group, batch, group, scores)
    if scales is not None:
        q = _by_head(q, scales.k)
    mixed = _attend(q, pool, layer_in_group, batch, group, scale, window, softcap, sinks)
    return mixed if scales is None else _by_head(mixed, scales.v)


def _by_head(x: Tensor, factors: Tensor) -> Tensor:
    """x [T, heads, dim] times the factor of each head's KV head."""
    wide = factors.repeat_interleave(x.shape[1] // len(factors))[:, None]
    return (x * wide).to(x.dtype)


def _attend(
    q: Tensor, pool: Tensor, layer_in_group: int, batch: Batch, group: str, scale: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """torch's form, over what is stored as it is."""
    own, q = q.dtype, q.to(product_dtype(q))
    plan = batch.once(("attention", group, window), lambda: _plan(batch, group, window, pool, q.dtype))
    if scale != 1.0:
        q = q * scale
    if plan.whole is not None:
        return _attend_decodes(q, pool, layer_in_group, plan.whole, softcap, sinks).to(own)
    out = torch.empty_like(q)
    for prefill in plan.prefills:
        _attend_prefill(q, pool, layer_in_group, batch, prefill, window, softcap, sinks, out)
    for decodes in plan.decodes:
        rows = q.index_select(0, decodes.rows)
        mixed = _attend_decodes(rows, pool, layer_in_group, decodes, softcap, sinks)
        out.index_copy_(0, decodes.rows, mixed)
    return out.to(own)


# --- which blocks a batch needs ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """One sequence, whose gathered KV begins at position `first` and ends with the last query's block."""

    span: SequenceSpan
    runs: Tensor
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class _Decodes:
    """`count` sequences of one new token each, padded to a common number of blocks.

    `rows` [count] are their rows of the flat batch, in order. `mask`
    [count, 1, n * 16] adds -inf to positions that aren't theirs. `stale`: those of the gathered vectors that lie behind
    a sequence's end. Whoever had the block before may have left anything there, and neither a mask nor a weight of 0
    hides what is no number. A single sequence needs neither: it sees positions `seen` of its blocks.
    """

    count: int
    rows: Tensor
    runs: Tensor
    mask: Tensor | None
    stale: Tensor | None
    seen: slice


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    prefills: tuple[_Prefill, ...]
    decodes: tuple[_Decodes, ...]

    @property
    def whole(self) -> _Decodes | None:
        """The decodes, if they go together and are all of the batch."""
        return self.decodes[0] if not self.prefills and len(self.decodes) == 1 else None


@dataclass(frozen=True, slots=True)
class _Reach:
    """A decode's sequence: its index, row, and the visible positions [start, end)."""

    index: int
    row: int
    start: int
    end: int

    @property
    def first_block(self) -> int:
        return self.start // BLOCK_TOKENS

    @property
    def num_blocks(self) -> int:
        return (self.end - 1) // BLOCK_TOKENS + 1 - self.first_block


def _plan(batch: Batch, group: str, window: int | None, pool: Tensor, dtype: torch.dtype) -> _Plan:
    tables = batch.groups[group].block_tables
    prefills: list[_Prefill] = []
    singles: list[_Reach] = []
    for i, span in enumerate(batch.spans):
        start = 0 if window is None else max(0, span.context_len - window + 1)
        if span.query_len == 1:
            singles.append(_Reach(i, span.query_start, start, span.total_len))
            continue
        first = start // BLOCK_TOKENS
        blocks = tables[i, first : (span.total_len - 1) // BLOCK_TOKENS + 1]
        prefills.append(_Prefill(span, _runs(pool, blocks[None]), first * BLOCK_TOKENS))
    most = max(1, DECODE_GATHER_BYTES // _kv_bytes(pool, dtype))
    decodes = [_join(part, tables, pool, dtype) for part in _by_length(singles, most)]
    return _Plan(tuple(prefills), tuple(decodes))


def _by_length(reaches: list[_Reach], most_blocks: int) -> Iterator[list[_Reach]]:
    """Parts of similar length, at most half of what a part gathers is padding. Inside a part by row."""
    part: list[_Reach] = []
    for reach in sorted(reaches, key=lambda reach: reach.num_blocks, reverse=True):
        longest = part[0].num_blocks if part else 0
        if part and (reach.num_blocks * 2 < longest or (len(part) + 1) * longest > most_blocks):
            yield sorted(part, key=lambda reach: reach.row)
            part = []
        part.append(reach)
    if part:
        yield sorted(part, key=lambda reach: reach.row)


def _join(part: list[_Reach], tables: Tensor, pool: Tensor, dtype: torch.dtype) -> _Decodes:
    device = tables.device
    rows = torch.tensor([reach.row for reach in part], device=device)
    if len(part) == 1:
        reach = part[0]
        blocks = tables[reach.index, reach.first_block : reach.first_block + reach.num_blocks]
        base = reach.first_block * BLOCK_TOKENS
        seen = slice(reach.start - base, reach.end - base)
        return _Decodes(1, rows, _runs(pool, blocks[None]), None, None, seen)
    width = max(reach.num_blocks for reach in part)
    facts = torch.tensor(
        [(reach.index, reach.first_block, reach.start, reach.end, reach.num_blocks) for reach in part], device=device
    )
    indices, firsts, starts, ends, own = (column[:, None] for column in facts.unbind(1))
    at = torch.arange(width, device=device).expand(len(part), width)
    # Behind its own blocks the sequence's first one will do: the mask hides it.
    at = torch.where(at < own, at, 0)
    blocks = tables[indices, firsts + at]
    positions = firsts * BLOCK_TOKENS + torch.arange(width * BLOCK_TOKENS, device=device)
    hidden = (positions < starts) | (positions >= ends)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask.masked_fill_(hidden, -math.inf)
    stored = ((firsts + at) * BLOCK_TOKENS)[..., None] + torch.arange(BLOCK_TOKENS, device=device)
    stale = _vectors((stored >= ends[..., None]).flatten(1), pool.shape[3])
    return _Decodes(len(part), rows, _runs(pool, blocks), mask[:, None], stale, slice(None))


def _vectors(chosen: Tensor, kv_heads: int) -> Tensor:
    """Which of the gathered vectors [2, B, kv_heads, n * 16] are those at `chosen` [B, n * 16], of all heads."""
    whole = chosen[None, :, None].expand(2, -1, kv_heads, -1)
    return whole.flatten().nonzero().flatten()


def _kv_bytes(pool: Tensor, dtype: torch.dtype) -> int:
    """Bytes of one block in one layer, once it is gathered."""
    return 2 * pool.shape[3] * BLOCK_TOKENS * pool.shape[5] * dtype.itemsize


def _runs(pool: Tensor, blocks: Tensor) -> Tensor:
    """Where layer 0's KV of `blocks` [B, n] is: indices of runs of one head's 16 vectors, in the order
    K or V, sequence, head, block."""
    _, layers, _, kv_heads, _, _ = pool.shape
    first = blocks * (layers * 2 * kv_heads)
    vectors = torch.arange(2 * kv_heads, device=pool.device).view(2, 1, kv_heads, 1)
    return (first[:, None, :] + vectors).view(-1)


def _gather(
    pool: Tensor, layer_in_group: int, runs: Tensor, count: int, dtype: torch.dtype, stale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """K and V in one layer of `count` sequences, each [count * kv_heads, n * 16, head_dim], until the next gather.
    `stale` vectors are zeros."""
    _, _, _, kv_heads, _, dim = pool.shape
    of_layer = runs + layer_in_group * 2 * kv_heads
    kv = widen_rows(pool.view(-1, BLOCK_TOKENS * dim), of_layer, dtype)
    if stale is not None:
        kv.view(-1, dim).index_fill_(0, stale, 0)
    k, v = kv.view(2, count * kv_heads, -1, dim).unbind(0)
    return k, v


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [N, r, c] @ b [N, c, n], either factor possibly a slice or a transposed view."""
    if a.shape[0] == 1:
        return torch.mm(a[0], b[0])[None]
    whole = b.is_contiguous() or b.transpose(1, 2).is_contiguous()
    if a.device.type != "cpu" or whole:
        return torch.bmm(a, b)
    # On the CPU a batched product first copies a factor that is a slice of a batch; a plain one doesn't.
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for left, right, into in zip(a, b, out, strict=True):
        torch.mm(left, right, out=into)
    return out


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of `scores` [N, shared or t * shared, n] along the last axis; with `sinks` [kv_heads, shared], N a
    multiple of kv_heads, of which these take their part."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    count, rows, _ = scores.shape
    kv_heads, shared = sinks.shape
    column = sinks.to(scores.dtype).repeat(count // kv_heads, rows // shared)[..., None]
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


# --- prefill -------------------------------------------------------------------------------------------------


def _attend_prefill(
    q: Tensor,
    pool: Tensor,
    layer_in_group: int,
    batch: Batch,
    prefill: _Prefill,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    span, kv_heads = prefill.span, pool.shape[3]
    heads, dim = q.shape[1:]
    shared = heads // kv_heads
    sinks = None if sinks is None else sinks.view(kv_heads, shared)
    k, v = _gather(pool, layer_in_group, prefill.runs, 1, q.dtype)
    for begin in range(0, span.query_len, TILE_QUERIES):
        size = min(TILE_QUERIES, span.query_len - begin)
        position = span.context_len + begin
        low = prefill.first if window is None else max(prefill.first, position - window + 1)
        seen = slice(low - prefill.first, position + size - prefill.first)
        rows = slice(span.query_start + begin, span.query_start + begin + size)
        folded = q[rows].view(size, kv_heads, shared, dim).transpose(0, 1)
        folded = folded.reshape(kv_heads, size * shared, dim)
        scores = _product(folded, k[:, seen].transpose(1, 2))
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        _hide(scores.view(kv_heads, size, shared, -1), batch, window)
        mixed = _product(_weights(scores, sinks), v[:, seen])
        out[rows] = mixed.view(kv_heads, size, shared, dim).transpose(0, 1).reshape(size, heads, dim)


def _hide(scores: Tensor, batch: Batch, window: int | None) -> None:
    """Add -inf to what a tile's queries must not see. `scores` [kv_heads, t, shared, n]; the last t of the n
    positions are the queries' own, the first is the first query's oldest visible one or the sequence's first.

    Only the two triangles at the ends can hold hidden positions, and they are the same for all tiles.
    """
    size, count = scores.shape[1], scores.shape[3]
    future = batch.once(("future", size, scores.dtype), lambda: _triangle(size, scores, below=False))
    scores[..., count - size :].add_(future)
    if window is None:
        return
    cut = window + size - 1 - count  # columns that fall before the sequence's first position
    reach = min(size - cut, count)
    if reach > 0:
        past = batch.once(("past", size, scores.dtype), lambda: _triangle(size, scores, below=True))
        scores[..., :reach].add_(past[..., cut : cut + reach])


def _triangle(size: int, like: Tensor, *, below: bool) -> Tensor:
    """[t, 1, t] with -inf above the diagonal, or below it."""
    full = torch.full((size, size), -math.inf, dtype=like.dtype, device=like.device)
    return (full.tril(-1) if below else full.triu(1))[:, None, :]


# --- decode --------------------------------------------------------------------------------------------------


def _attend_decodes(
    q: Tensor, pool: Tensor, layer_in_group: int, decodes: _Decodes, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`q` [count, heads, head_dim], the decodes' own rows. Returns the same shape."""
    count, heads, dim = q.shape
    kv_heads = pool.shape[3]
    k, v = _gather(pool, layer_in_group, decodes.runs, count, q.dtype, decodes.stale)
    folded = q.reshape(count * kv_heads, heads // kv_heads, dim)
    scores = _product(folded, k[:, decodes.seen].transpose(1, 2))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if decodes.mask is not None:
        scores.view(count, heads, -1).add_(decodes.mask)
    sinks = None if sinks is None else sinks.view(kv_heads, -1)
    return _product(_weights(scores, sinks), v[:, decodes.seen]).view(count, heads, dim)


# --- the oracle ----------------------------------------------------------------------------------------------


def attention_reference(
    q: Tensor,
    pool: Tensor,
    layer_in_group: int,
    batch: Batch,
    group: str,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `paged_attention` must give, one query and head at a time, in fp64. Slow: for tests."""
    tables = batch.groups[group].block_tables.tolist()
    out = torch.empty_like(q)
    shared = q.shape[1] // pool.shape[3]
    for sequence, span in enumerate(batch.spans):
        for row in range(span.query_start, span.query_end):
            position = span.context_len + row - span.query_start
            first = 0 if window is None else max(0, position - window + 1)
            at = [(tables[sequence][p // 16], p % 16) for p in range(first, position + 1)]
            for head in range(q.shape[1]):
                kv = torch.stack([pool[b, layer_in_group, :, head // shared, o] for b, o in at])
                k, v = kv[:, 0].double(), kv[:, 1].double()
                scores = k @ q[row, head].double() * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = torch.softmax(scores, dim=0)[: len(v)]
                out[row, head] = (weights @ v).to(q.dtype)
    return out
