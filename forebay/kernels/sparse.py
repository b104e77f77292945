"""Latent attention over chosen rows: each query has its own, wherever in the pool they lie.

The sums are taken in the order in which the rows are chosen. So the result has the same bits wherever they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.chosen import physical_rows
from forebay.kernels.dispatch import dispatch
from forebay.kernels.products import product_dtype
from forebay.kernels.scratch import gather_rows

GATHER_BYTES = 4 * 2**20
"""The most rows that are copied out of the pool at a time: they are still in the cache when used."""


def read_rows(pool: Tensor, layer_in_group: int, slots: Tensor) -> Tensor:
    """Rows [R, K, width] of one layer at `slots` int64 [R, K], until the next gather. Where a slot is negative it is
    any of the query's own: never what somebody else has left there, which could be no number."""
    known = torch.where(slots < 0, slots[:, :1], slots).clamp_(min=0)
    at = physical_rows(known, pool.shape[1], layer_in_group).flatten()
    return gather_rows(pool.view(-1, pool.shape[-1]), at).view(*slots.shape, -1)


def sparse_latent_attention(
    q: Tensor, pool: Tensor, layer_in_group: int, slots: Tensor, *, scale: float, rank: int
) -> Tensor:
    """Attention of each query over the rows of one layer at its own `slots` int64 [R, K]; negative: none.

    `q` [R, heads, width] is the absorbed query and its rotated part. Returns [R, heads, rank] in its dtype: the
    weighted sum of latents; zeros for a query that has none. Mutates nothing.
    """
    assert pool.dtype == q.dtype, (pool.dtype, q.dtype)
    if dispatch().choose("sparse", q, pool) == "triton":
        from forebay.kernels import forms

        return forms.sparse_latent_attention(q, pool, layer_in_group, slots, scale, rank)
    own, q = q.dtype, q.to(product_dtype(q)) * scale
    out = q.new_empty(q.shape[0], q.shape[1], rank, dtype=own)
    size = max(1, GATHER_BYTES // max(1, slots.shape[1] * q.shape[2] * q.element_size()))
    for begin in range(0, len(q), size):
        part = slice(begin, begin + size)
        rows, absent = read_rows(pool, layer_in_group, slots[part]).to(q.dtype), slots[part] < 0
        scores = torch.bmm(q[part], rows.transpose(1, 2)).masked_fill_(absent[:, None], -math.inf)
        mixed = torch.bmm(torch.softmax(scores, dim=-1), rows)[..., :rank]
        out[part] = mixed.masked_fill(absent.all(dim=1)[:, None, None], 0)
    return out


def sparse_latent_attention_reference(
    q: Tensor, pool: Tensor, layer_in_group: int, slots: Tensor, *, scale: float, rank: int
) -> Tensor:
    """What `sparse_latent_attention` must give, one query at a time, in fp64. Slow: for tests."""
    out = torch.zeros(q.shape[0], q.shape[1], rank, dtype=q.dtype)
    for row, found in enumerate(slots.tolist()):
        at = [divmod(slot, BLOCK_TOKENS) for slot in found if slot >= 0]
        if at:
            rows = torch.stack([pool[block, layer_in_group, 0, 0, offset] for block, offset in at]).double()
            weights = torch.softmax(q[row].double() @ rows.T * scale, dim=-1)
            out[row] = (weights @ rows[:, :rank]).to(q.dtype)
    return out
