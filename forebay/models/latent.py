"""Multi-head latent attention: a layer that keeps one row a token for all of its heads.

The row is the normed latent and, behind it, the rotated part of the key. The two projections that make a head's key and
value from a latent are applied to the query and to the result instead, so nothing is expanded. With several ranks each
has its part of the heads; the rows, which all heads need, are computed and kept on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.kernels.dispatch import dispatch
from forebay.kernels.mla import latent_attention, write_latents
from forebay.kernels.partial import Stored
from forebay.models.base import KVGroup
from forebay.models.context import DealtAttention, context_of, query_heads
from forebay.models.kv_scales import read_latent_scale
from forebay.models.layers import Linear, RMSNorm, accumulate_dtype
from forebay.models.prompts import everyones, kept_slots
from forebay.models.ranks import held_group, share_heads
from forebay.models.rope import Rope, rotate, rotate_pairs
from forebay.models.standard import columns
from forebay.models.weights import Weights

NORM_EPS = 1e-6
"""Of the latents' norms. It isn't the configuration's `rms_norm_eps`, which is that of the layers' norms."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of one latent attention layer.

    `q_rank`: of the query's own latent; None: the query has none. `nope` and `rope.dim` values of a query head meet
    the latent and the rotated part. `pairs`: neighbours are rotated, not halves. `bias`: of the projections into
    latents and of the output.
    """

    hidden: int
    heads: int
    q_rank: int | None
    rank: int
    nope: int
    value: int
    rope: Rope
    scale: float
    pairs: bool
    bias: bool

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.rank + self.rope.dim

    def group(self, layers: int) -> KVGroup:
        """The cache group of all layers."""
        return KVGroup("latent", "latent", tuple(range(layers)), 1, self.width)


class LatentAttention:
    """Projections, rotation, cache write and attention of layer `index`."""

    def __init__(self, shape: LatentShape, group: KVGroup, index: int, weights: Weights) -> None:
        at, heads = f"layers.{index}.self_attn.", share_heads(shape.heads, 1, weights.ranks).q
        self._shape, self._group, self._layer_in_group = shape, group, group.layers.index(index)
        context = context_of(group, weights.ranks)
        asking = query_heads(heads, context)
        self._kv_scales = read_latent_scale(weights, at)
        stored = Stored(self._layer_in_group, shape.rank, self._kv_scales)
        held = held_group(group, weights.ranks)
        self._dealt = None if context is None else DealtAttention(context, held, stored, shape.scale)
        self._query = _Query(shape, at, weights, asking)
        self._down = weights.linear(f"{at}kv_a_proj_with_mqa", shape.width, shape.hidden, bias=shape.bias)
        self._norm = RMSNorm(weights.exact(f"{at}kv_a_layernorm.weight", shape.rank), NORM_EPS)
        width = shape.nope + shape.value
        up = weights.take(
            f"{at}kv_b_proj.weight", shape.heads * width, shape.rank, cut={0: columns(asking, width)}
        )
        to_key, to_value = up.view(len(asking), -1, shape.rank).split((shape.nope, shape.value), dim=1)
        self._to_key = to_key.contiguous()
        own = slice(heads.start - asking.start, heads.stop - asking.start)
        self._to_value = to_value[own].transpose(1, 2).contiguous()
        self._out = weights.summed_linear(
            f"{at}o_proj", shape.hidden, shape.heads * shape.value, columns(heads, shape.value), bias=shape.bias
        )

    def __call__(self, x: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden], or only the rows `keep`. Writes this layer's rows into the pool."""
        pool, rows = kv[self._group.name], self._rows(x, batch)
        self._write(rows, pool, batch)
        if keep is not None and not len(keep):
            return x[:0]
        mixed = self._attend(self._absorbed(self._query(x), batch), rows, pool, batch)
        return self._values(mixed if keep is None else mixed.index_select(0, keep))

    def _rows(self, x: Tensor, batch: Batch) -> Tensor:
        """What is kept of `x` [T, hidden]: [T, width]."""
        compressed, rank = self._down(x), self._shape.rank
        latent = self._norm(compressed[:, :rank], x.dtype)
        return torch.cat((latent, self._rotate(compressed[:, None, rank:], batch)[:, 0]), dim=1)

    def _absorbed(self, heads: Tensor, batch: Batch) -> Tensor:
        """What meets kept rows, [T, heads, width], of `heads` [T, heads, nope + rope]."""
        nope, turning = heads.split((self._shape.nope, self._shape.rope.dim), dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), self._to_key).transpose(0, 1)
        return torch.cat((absorbed, self._rotate(turning, batch)), dim=-1)

    def _values(self, mixed: Tensor) -> Tensor:
        """[n, hidden] of sums of latents [n, heads, rank]."""
        values = torch.bmm(mixed.transpose(0, 1), self._to_value).transpose(0, 1)
        return self._out(values.flatten(1))

    def _write(self, rows: Tensor, pool: Tensor, batch: Batch) -> None:
        if self._dealt is not None:
            self._dealt.write(pool, batch, rows[:, None])
        else:
            slots = kept_slots(batch, self._group.name)
            write_latents(pool, self._layer_in_group, slots, everyones(batch, rows), self._kv_scales)

    def _attend(self, q: Tensor, rows: Tensor, pool: Tensor, batch: Batch) -> Tensor:
        if self._dealt is not None:
            return self._dealt.attend(q, rows[:, None], pool, batch)
        name, shape = self._group.name, self._shape
        return latent_attention(
            q, pool, self._layer_in_group, batch, name, scale=shape.scale, rank=shape.rank, scales=self._kv_scales
        )

    def _rotate(self, x: Tensor, batch: Batch) -> Tensor:
        if dispatch().choose("turn", x, x) == "triton":
            from forebay.kernels import forms

            return forms.rotate(x, self._shape.rope.turn(batch, pairs=self._shape.pairs))
        exact = accumulate_dtype(x.dtype)
        turn = rotate_pairs if self._shape.pairs else rotate
        return turn(x.to(exact), *self._shape.rope.angles(batch, exact)).to(x.dtype)


class _Query:
    """Heads [T, heads, nope + rope] from hidden states, through a latent of their own or not."""

    def __init__(self, shape: LatentShape, at: str, weights: Weights, heads: range) -> None:
        self._dtype = weights.dtype
        dim = shape.nope + shape.rope.dim
        self._heads, out, mine = len(heads), shape.heads * dim, columns(heads, dim)
        self._down: Linear | None = None
        if shape.q_rank is None:
            self._up = weights.linear(f"{at}q_proj", out, shape.hidden, rows=mine)
            return
        self._down = weights.linear(f"{at}q_a_proj", shape.q_rank, shape.hidden, bias=shape.bias)
        self._norm = RMSNorm(weights.exact(f"{at}q_a_layernorm.weight", shape.q_rank), NORM_EPS)
        self._up = weights.linear(f"{at}q_b_proj", out, shape.q_rank, rows=mine)

    def __call__(self, x: Tensor) -> Tensor:
        return self.heads(self.latent(x))

    def latent(self, x: Tensor) -> Tensor:
        """[T, q_rank], or `x` itself where the query has none."""
        return x if self._down is None else self._norm(self._down(x), self._dtype)

    def heads(self, latent: Tensor) -> Tensor:
        """Of what `latent` gives."""
        return self._up(latent).view(len(latent), self._heads, -1)
