"""What the attention kernels compute, as plain torch: one row at a time, in fp64. The page to read before the kernels.

The pool is [blocks, layers, 2, kv_heads, 16, head_dim], K then V; of latents [blocks, layers, 1, 1, 16, rank + rope],
one row for key and value of all heads. It may hold FP8, with a scale for each KV head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.lse import Lse, Partial
from forebay.kernels.ragged import Ragged, seen


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How a score follows from a query and a key: cap * tanh(q.k * scale / cap), or q.k * scale without a cap.

    `sinks` [heads] are scores of a position without a value that every row sees: they are part of the LSE. `window`
    counts visible positions, the row's own included. `k_scale` and `v_scale` [kv_heads] multiply what is stored.
    """

    scale: float
    cap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def attend(q: Tensor, pool: Tensor, layer: int, where: Ragged, scores: Scores) -> Partial:
    """Attention of rows `q` [T, heads, head_dim]: out [T, heads, head_dim] in fp64, LSE [T, heads] to base e."""
    shared = q.shape[1] // pool.shape[3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for sequence, row, at in _rows(where):
        found = _tokens(pool, layer, where, sequence, seen(where, sequence, row, scores.window))
        for head in range(q.shape[1]):
            kv = head // shared
            k = found[:, 0, kv] * (1.0 if scores.k_scale is None else scores.k_scale[kv].double())
            v = found[:, 1, kv] * (1.0 if scores.v_scale is None else scores.v_scale[kv].double())
            out[at, head], lse[at, head] = _mix(k @ q[at, head].double(), v, scores, head)
    return Partial(out, Lse(lse, "e"))


def attend_latents(q: Tensor, pool: Tensor, layer: int, where: Ragged, scores: Scores, *, rank: int) -> Partial:
    """The same for latents: `q` [T, heads, rank + rope], out [T, heads, rank]. `k_scale` [1] is of key and value."""
    factor = 1.0 if scores.k_scale is None else float(scores.k_scale)
    out = torch.zeros(*q.shape[:2], rank, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for sequence, row, at in _rows(where):
        rows = _tokens(pool, layer, where, sequence, seen(where, sequence, row, scores.window))[:, 0, 0] * factor
        for head in range(q.shape[1]):
            out[at, head], lse[at, head] = _mix(rows @ q[at, head].double(), rows[:, :rank], scores, head)
    return Partial(out, Lse(lse, "e"))


def _rows(where: Ragged) -> list[tuple[int, int, int]]:
    """(sequence, row in it, row of the flat batch) of all rows."""
    starts = where.starts.tolist()
    return [(s, row, starts[s] + row) for s, count in enumerate(where.counts) for row in range(count)]


def _tokens(pool: Tensor, layer: int, where: Ragged, sequence: int, positions: list[int]) -> Tensor:
    """[n, planes, kv_heads, dim] in fp64."""
    at = torch.tensor(positions, dtype=torch.int64)
    blocks = where.tables[sequence][at // BLOCK_TOKENS]
    return pool.to(torch.float64)[blocks, layer, :, :, at % BLOCK_TOKENS]


def _mix(products: Tensor, values: Tensor, scores: Scores, head: int) -> tuple[Tensor, Tensor]:
    found = products * scores.scale
    if scores.cap is not None:
        found = torch.tanh(found / scores.cap) * scores.cap
    if scores.sinks is not None:
        found = torch.cat((found, scores.sinks[head : head + 1].double()))
        values = torch.cat((values, torch.zeros(1, values.shape[1], dtype=values.dtype)))
    if not len(found):
        return torch.zeros(values.shape[1], dtype=torch.float64), torch.tensor(-math.inf, dtype=torch.float64)
    highest = found.max()
    if highest == -math.inf:
        return torch.zeros(values.shape[1], dtype=torch.float64), highest
    weights = (found - highest).exp()
    return weights @ values / weights.sum(), highest + weights.sum().log()
