"""Sparse latent attention (DSA): a small index finds the positions that a query attends to, of which there are at most
so many however long the context is.

A *full* layer has an index, whose keys are a cache group of their own; a *shared* one takes what the last full layer
before it has chosen. While a batch's sequences are no longer than what may be chosen, all of it is: then the index only
keeps its keys. Every rank computes the whole index and chooses alike; heads are shared out as in `latent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.kernels.chosen import Selection, resident_slots
from forebay.kernels.indexer import choose_positions, hadamard, write_keys
from forebay.kernels.sparse import sparse_latent_attention
from forebay.models.base import KVGroup, Sparsity
from forebay.models.latent import LatentAttention, LatentShape
from forebay.models.layers import accumulate_dtype
from forebay.models.prompts import everyones, kept_slots
from forebay.models.rope import rotate, rotate_pairs
from forebay.models.weights import Weights

KEY_EPS = 1e-6
"""Of the index keys' norm, which isn't the configuration's."""


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Sizes of an index: `heads` queries of `dim` values a token, one key. `pairs`: neighbours are rotated, not halves.

    `turned`: keys and queries are multiplied by a Hadamard matrix, which is done for scaled keys.
    """

    heads: int
    dim: int
    top_k: int
    pairs: bool
    scaled: bool

    @property
    def turned(self) -> bool:
        return self.scaled and self.dim & (self.dim - 1) == 0

    def group(self, layers: tuple[int, ...]) -> KVGroup:
        """The cache group of the full layers' keys."""
        return KVGroup("index", "indexer", layers, 1, self.dim, scaled=self.scaled)


class SparseLatentAttention(LatentAttention):
    """Layer `index`. `keys` is the group of index keys; `sparsity` says whose choice this layer takes."""

    def __init__(
        self,
        shape: LatentShape,
        index_shape: IndexShape,
        groups: tuple[KVGroup, KVGroup],
        sparsity: Sparsity,
        index: int,
        weights: Weights,
    ) -> None:
        """`groups` are those of latents and of index keys."""
        super().__init__(shape, groups[0], index, weights)
        self._leader, self._top_k = groups[0].layers.index(sparsity.leaders[index]), sparsity.top_k
        own = self._leader == self._layer_in_group
        self._index = _Index(shape, index_shape, groups[1], index, weights) if own else None

    def __call__(self, x: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None = None) -> Tensor:
        """As `LatentAttention`; writes this layer's index keys, too, if it has any."""
        pool, rows = kv[self._group.name], self._rows(x, batch)
        self._write(rows, pool, batch)
        if self._index is not None:
            self._index.write(x, batch, kv)
        if keep is not None and not len(keep):
            return x[:0]
        latent = self._query.latent(x)
        if self._sees_everything(batch):
            mixed = self._attend(self._absorbed(self._query.heads(latent), batch), rows, pool, batch)
            return self._values(mixed if keep is None else mixed.index_select(0, keep))
        order = None if keep is None else keep.argsort()
        wanted = keep if order is None or keep is None else keep.index_select(0, order)
        choice = self._choice(x, latent, batch, kv, wanted)
        q = self._absorbed(self._query.heads(latent), batch)
        q = q if wanted is None else q.index_select(0, wanted)
        mixed = self._attend_chosen(q, choice, batch, pool)
        return self._values(mixed if order is None else torch.empty_like(mixed).index_copy_(0, order, mixed))

    def _sees_everything(self, batch: Batch) -> bool:
        longest = max(span.total_len for span in batch.spans)
        return batch.resolver is None and longest <= self._top_k

    def _choice(
        self, x: Tensor, latent: Tensor, batch: Batch, kv: Mapping[str, Tensor], wanted: Tensor | None
    ) -> _Choice:
        """Of all rows, or of those that are `wanted`, which ascend."""
        last = batch.once(("choice",), _Last)
        if self._index is None:
            assert last.leader == self._leader and last.choice is not None, (last.leader, self._leader)
            return last.choice if wanted is None else last.choice.only(wanted)
        selection = self._index.choose(x, latent, batch, kv, wanted)
        if batch.resolver is None:
            tables = batch.groups[self._group.name].block_tables
            slots = resident_slots(tables, selection.sequences, selection.positions)
        else:
            slots = batch.resolver.resolve(self._leader, batch, selection)
        last.leader, last.choice = self._leader, _Choice(selection, slots)
        return last.choice

    def _attend_chosen(self, q: Tensor, choice: _Choice, batch: Batch, pool: Tensor) -> Tensor:
        if batch.resolver is not None:
            batch.resolver.prepare(self._layer_in_group, batch, choice.selection, choice.slots)
        shape = self._shape
        return sparse_latent_attention(
            q, pool, self._layer_in_group, choice.slots, scale=shape.scale, rank=shape.rank
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """What is attended to, and where it lies."""

    selection: Selection
    slots: Tensor

    def only(self, rows: Tensor) -> _Choice:
        at = torch.searchsorted(self.selection.rows, rows)
        return _Choice(self.selection.only(rows), self.slots.index_select(0, at))


@dataclass(slots=True)
class _Last:
    """The last choice of a forward pass, for layers that share it; the ones before it aren't needed any more."""

    leader: int = -1
    choice: _Choice | None = None


class _Index:
    """The index of one full layer."""

    def __init__(
        self, latent: LatentShape, shape: IndexShape, group: KVGroup, index: int, weights: Weights
    ) -> None:
        assert latent.q_rank is not None
        at, exact = f"layers.{index}.self_attn.indexer.", accumulate_dtype(weights.dtype)
        self._shape, self._rope, self._exact = shape, latent.rope, exact
        self._group, self._layer_in_group = group, group.layers.index(index)
        self._query = weights.linear(f"{at}wq_b", shape.heads * shape.dim, latent.q_rank)
        self._key = weights.linear(f"{at}wk", shape.dim, latent.hidden)
        self._norm = (weights.exact(f"{at}k_norm.weight", shape.dim), weights.exact(f"{at}k_norm.bias", shape.dim))
        # Products are divided by the root of their length, heads' scores by that of their number.
        scale = shape.dim**-0.5 * shape.heads**-0.5
        self._weights = weights.exact(f"{at}weights_proj.weight", shape.heads, latent.hidden) * scale

    def write(self, x: Tensor, batch: Batch, kv: Mapping[str, Tensor]) -> None:
        """Keep the keys of `x` [T, hidden]."""
        keys = F.layer_norm(self._key(x).to(self._exact), (self._shape.dim,), *self._norm, eps=KEY_EPS)
        turned = self._turned(keys[:, None].to(x.dtype), batch)[:, 0]
        name = self._group.name
        write_keys(kv[name], self._layer_in_group, kept_slots(batch, name), everyones(batch, turned))

    def choose(
        self, x: Tensor, latent: Tensor, batch: Batch, kv: Mapping[str, Tensor], rows: Tensor | None
    ) -> Selection:
        """Positions for all rows, or for `rows` alone, by their `x` and queries' `latent`."""
        shape, name = self._shape, self._group.name
        q = self._turned(self._query(latent).view(len(latent), shape.heads, shape.dim), batch)
        weights = F.linear(x.to(self._exact), self._weights)
        if rows is not None:
            q, weights = q.index_select(0, rows), weights.index_select(0, rows)
        pool = kv[name]
        return choose_positions(q, weights, pool, self._layer_in_group, batch, name, shape.top_k, rows)

    def _turned(self, x: Tensor, batch: Batch) -> Tensor:
        """`x` [T, heads, dim], its first values rotated, in its dtype."""
        rope, exact = self._rope, x.to(self._exact)
        cos, sin = rope.angles(batch, self._exact)
        if self._shape.pairs:
            exact = torch.cat((rotate_pairs(exact[..., : rope.dim], cos, sin), exact[..., rope.dim :]), dim=-1)
        else:
            exact = rotate(exact, cos, sin)
        return (hadamard(exact) if self._shape.turned else exact).to(x.dtype)
