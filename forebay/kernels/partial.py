"""Attention over a part of the keys, with the log-sum-exp of its scores, and how parts on several ranks become one.

All query heads here look at one key head: that is what a rank has where several share the positions of a sequence,
latents as well as one KV head. Scores are rounded to the model's dtype; what follows is in fp32, or fp64 if that is it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.lse import Lse, Partial
from forebay.kernels.narrow import KvScales, is_narrow, narrow, widen_rows

TILE_QUERIES = 128
"""Queries whose scores are in memory at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Keys [..., m, dim] and what is summed of them [..., m, value dim], of one head."""

    k: Tensor
    v: Tensor

    def clear(self, rows: Tensor) -> None:
        """Make what is summed at `rows`, int64, of all rows in order, zeros. A weight of 0 hides a number only: what
        somebody else has left there may be none. Mutates `v`."""
        self.v.flatten(0, -2).index_fill_(0, rows, 0)


def exact(dtype: torch.dtype) -> torch.dtype:
    """What outputs and LSEs of parts are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing_seen(rows: int, heads: int, dim: int, like: Tensor) -> Partial:
    """The part of who has none of the keys."""
    dtype = exact(like.dtype)
    out = torch.zeros(rows, heads, dim, dtype=dtype, device=like.device)
    return Partial(out, Lse(out.new_full((rows, heads), -math.inf), "e"))


@dataclass(frozen=True, slots=True)
class Stored:
    """How a layer's rows lie in a pool [blocks, layers, planes, 1, tokens, dim]: `rank` is, of latents, how much of a
    row is summed (None: there are K and V); what is in FP8 is multiplied by `scales`."""

    layer: int
    rank: int | None = None
    scales: KvScales | None = None

    def write(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Keep `rows` [n, planes, dim] at `slots` (block * tokens + offset) [n]. Mutates `pool`."""
        _, layers, planes, _, tokens, dim = pool.shape
        first = (slots // tokens * layers + self.layer) * planes
        at = (first[:, None] + torch.arange(planes, device=pool.device)) * tokens + slots[:, None] % tokens
        flat = pool.view(-1, dim)
        if is_narrow(pool.dtype):  # as bytes: torch doesn't scatter FP8
            rows, flat = self._narrow(rows, pool.dtype).view(torch.uint8), flat.view(torch.uint8)
        flat.index_copy_(0, at.flatten(), rows.reshape(-1, dim))

    def gather(self, pool: Tensor, blocks: Tensor, dtype: torch.dtype) -> Keys:
        """Keys of `blocks` [B, n] in `dtype`: each [B, n * tokens, dim], until this thread gathers again."""
        _, layers, planes, heads, tokens, dim = pool.shape
        assert heads == 1 and planes == (2 if self.rank is None else 1), (pool.shape, self.rank)
        first = (blocks * layers + self.layer) * planes
        runs = first + torch.arange(planes, device=pool.device).view(-1, 1, 1)
        rows = widen_rows(pool.view(-1, tokens * dim), runs.flatten(), dtype).view(planes, len(blocks), -1, dim)
        if self.scales is not None:
            rows = rows * self._factors(dtype)[:, None, None]
        return Keys(rows[0], rows[1] if self.rank is None else rows[0][..., : self.rank])

    def as_kept(self, pool: Tensor, rows: Tensor) -> Tensor:
        """New `rows` [n, planes, dim] as they would be read: what FP8 has cut is cut here, too."""
        if not is_narrow(pool.dtype):
            return rows
        kept = self._narrow(rows, pool.dtype).to(rows.dtype)
        return kept if self.scales is None else kept * self._factors(rows.dtype)

    def keys(self, rows: Tensor) -> Keys:
        """From rows [n, planes, dim]."""
        return Keys(rows[:, 0], rows[:, 1] if self.rank is None else rows[:, 0, : self.rank])

    def _narrow(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return narrow(rows, None if self.scales is None else self._factors(torch.float32), dtype)

    def _factors(self, dtype: torch.dtype) -> Tensor:
        """Of each plane, [planes, 1]."""
        assert self.scales is not None
        return (self.scales.both if self.rank is None else self.scales.k[:, None]).to(dtype)


def attend_lengths(q: Tensor, keys: Keys, lengths: Tensor) -> Partial:
    """Each row of `q` [B, heads, dim], already scaled, over the first `lengths` [B] of its own `keys` [B, m, ...]."""
    scores = torch.bmm(q, keys.k.transpose(1, 2)).to(exact(q.dtype))
    hidden = torch.arange(scores.shape[2], device=q.device) >= lengths[:, None, None]
    return _summed(scores.masked_fill_(hidden, -math.inf), keys.v)


def attend_all(q: Tensor, keys: Keys) -> Partial:
    """Every row of `q` [n, heads, dim], already scaled, over all `keys` [m, ...]."""
    if not len(keys.k):
        return nothing_seen(q.shape[0], q.shape[1], keys.v.shape[-1], q)
    return _in_tiles(q, keys, causal=False)


def attend_causal(q: Tensor, keys: Keys) -> Partial:
    """Row i of `q` [n, heads, dim], already scaled, over the first i + 1 of as many `keys`."""
    assert len(q) == len(keys.k), (q.shape, keys.k.shape)
    return _in_tiles(q, keys, causal=True)


def _in_tiles(q: Tensor, keys: Keys, *, causal: bool) -> Partial:
    rows, heads, dim = q.shape
    out = q.new_empty(rows, heads, keys.v.shape[-1], dtype=exact(q.dtype))
    lse = out.new_empty(rows, heads)
    for begin in range(0, rows, TILE_QUERIES):
        end = min(begin + TILE_QUERIES, rows)
        k, v = (keys.k[:end], keys.v[:end]) if causal else (keys.k, keys.v)
        scores = (q[begin:end].reshape(-1, dim) @ k.T).to(out.dtype).view(end - begin, heads, -1)
        if causal:
            size = end - begin
            future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
            scores[..., -size:].masked_fill_(future[:, None], -math.inf)
        part = _summed(scores.flatten(0, 1)[None], v[None])
        out[begin:end], lse[begin:end] = part.out.view(end - begin, heads, -1), part.lse.values.view(-1, heads)
    return Partial(out, Lse(lse, "e"))


def _summed(scores: Tensor, v: Tensor) -> Partial:
    """From scores [B, rows, m], -inf where hidden, over `v` [B, m, dim]. Who sees nothing gets 0 and -inf."""
    if not scores.shape[2]:
        none = scores.new_full(scores.shape[:2], -math.inf)
        return Partial(scores.new_zeros(*none.shape, v.shape[-1]), Lse(none, "e"))
    highest = scores.amax(dim=-1)
    highest = highest.masked_fill_(highest == -math.inf, 0.0)
    weights = scores.sub_(highest[..., None]).exp_()
    total = weights.sum(dim=-1)
    out = torch.bmm(weights.to(v.dtype), v).to(total.dtype)
    out = out / total.masked_fill(total == 0, 1.0)[..., None]
    return Partial(out, Lse(highest + total.log(), "e"))


# --- one of many ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Weighing:
    """What one part is worth among all: its output times `weight` [...], and the `lse` [...] of all, to base e."""

    weight: Tensor
    lse: Tensor

    def of(self, out: Tensor) -> Tensor:
        """This part's share of the sum. What has no weight is left out, whatever it holds: 0 * nan is nan."""
        return out.masked_fill(self.weight[..., None] == 0, 0.0) * self.weight[..., None]


def weigh(lses: Lse, index: int) -> Weighing:
    """Part `index` among parts whose LSEs are `lses` [parts, ...]. An LSE that is +inf or no number is of a part that
    has seen nothing, as -inf is; where nobody has seen anything every weight is 0."""
    found = lses.to("e").values
    seen = torch.where(found.isnan() | (found == math.inf), -math.inf, found)
    highest = seen.amax(dim=0)
    highest = highest.masked_fill_(highest == -math.inf, 0.0)
    masses = (seen - highest).exp_()
    total = masses.sum(dim=0)
    return Weighing(masses[index] / total.masked_fill(total == 0, 1.0), highest + total.log())


def with_sinks(part: Partial, sinks: Tensor) -> Tensor:
    """The output [..., heads, dim] if every query sees `sinks` [heads] beside its keys: scores without a value."""
    lse = part.lse.to("e").values
    return part.out * torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]
