"""Attention to whole blocks of positions, which a small index chooses for every KV head; heads with norms whose weights
are stored minus one.

The index has as many heads as there are KV heads, and one key a token: a cache group of its own. Every rank keeps all
index keys, and chooses for its own KV heads. While a batch's sequences are no longer than what may be chosen, the index
only keeps its keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from forebay.kernels.attention import paged_attention
from forebay.kernels.batch import Batch
from forebay.kernels.blocks import Blocks, block_sparse_attention, choose_blocks
from forebay.kernels.cache import write_kv
from forebay.kernels.indexer import write_keys
from forebay.models.base import KVGroup
from forebay.models.layers import HeadNorm, accumulate_dtype
from forebay.models.prompts import everyones, kept_slots
from forebay.models.ranks import held_group, share_heads
from forebay.models.rope import rotate
from forebay.models.standard import AttentionShape, columns, heads_linear
from forebay.models.weights import Weights


class HeadParts:
    """Projections and norms of this rank's heads of layer `index`."""

    def __init__(self, shape: AttentionShape, index: int, weights: Weights) -> None:
        at, mine = f"layers.{index}.self_attn.", share_heads(shape.heads, shape.kv_heads, weights.ranks)
        self.heads, self.kv = len(mine.q), mine.kv
        self.qkv = heads_linear(weights, at, shape.hidden, (shape.heads, shape.kv_heads, shape.head_dim))
        self.out = weights.summed_linear(
            f"{at}o_proj", shape.hidden, shape.heads * shape.head_dim, columns(mine.q, shape.head_dim)
        )
        q, k = (weights.exact(f"{at}{x}_norm.weight", shape.head_dim) + 1 for x in "qk")
        self.norm = HeadNorm(q, k, len(mine.q), len(mine.kv), shape.eps)


class BlockSparseAttention:
    """Layer `index`, which chooses `blocks`."""

    def __init__(
        self, shape: AttentionShape, blocks: Blocks, groups: tuple[KVGroup, KVGroup], index: int, weights: Weights
    ) -> None:
        """`groups` are those of K and V, and of index keys."""
        self._parts, self._rope, self._blocks = HeadParts(shape, index, weights), shape.rope, blocks
        self._group, self._keys = held_group(groups[0], weights.ranks), groups[1]
        self._place, self._key_place = groups[0].layers.index(index), groups[1].layers.index(index)
        at, mine, dim = f"layers.{index}.self_attn.", self._parts.kv, groups[1].head_dim
        published = f"{at}index_q_proj.weight" in weights
        query, key = (f"{at}index_{x}" if published else f"{at}indexer.{x}" for x in "qk")
        outs = {f"{query}_proj": shape.kv_heads * dim, f"{key}_proj": dim}
        self._index = weights.merged_linear(outs, shape.hidden, rows={f"{query}_proj": columns(mine, dim)})
        q, k = (weights.exact(f"{name}_norm.weight", dim) + 1 for name in (query, key))
        self._index_norm = HeadNorm(q, k, len(mine), 1, shape.eps)

    def __call__(self, x: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None = None) -> Tensor:
        """x [T, hidden] -> [T, hidden], or only the rows `keep`. Writes this layer's K, V and index keys."""
        q, index_q = self._write(x, batch, kv)
        if keep is not None and not len(keep):
            return x[:0]
        group, pool = self._group, kv[self._group.name]
        if max(span.total_len for span in batch.spans) <= self._blocks.top_k * self._blocks.size:
            mixed = paged_attention(q, pool, self._place, batch, group.name, scale=group.head_dim**-0.5).flatten(1)
            return self._parts.out(mixed if keep is None else mixed.index_select(0, keep))
        if keep is None:
            return self._parts.out(self._attend(q, index_q, batch, kv, None))
        order = keep.argsort()
        wanted = keep.index_select(0, order)
        mixed = self._attend(q.index_select(0, wanted), index_q.index_select(0, wanted), batch, kv, wanted)
        return self._parts.out(torch.empty_like(mixed).index_copy_(0, order, mixed))

    def _attend(
        self, q: Tensor, index_q: Tensor, batch: Batch, kv: Mapping[str, Tensor], rows: Tensor | None
    ) -> Tensor:
        """[n, heads * head_dim] of all rows, or of `rows` alone, which ascend."""
        name, group, blocks = self._keys.name, self._group, self._blocks
        chosen = choose_blocks(index_q, kv[name], self._key_place, batch, name, blocks, rows)
        tables, scale = batch.groups[group.name].block_tables, group.head_dim**-0.5
        return block_sparse_attention(
            q, kv[group.name], self._place, tables, chosen, blocks.size, scale=scale
        ).flatten(1)

    def _write(self, x: Tensor, batch: Batch, kv: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The queries of the heads and those of the index; keys and values are written."""
        group, keys, exact = self._group, self._keys, accumulate_dtype(x.dtype)
        angles = self._rope.angles(batch, exact)
        heads, rotated = self._parts.heads, self._parts.heads + group.kv_heads
        qkv = self._parts.qkv(x).view(len(x), -1, group.head_dim)
        turned = rotate(self._parts.norm(qkv[:, :rotated].to(exact)), *angles).to(x.dtype)
        rows = everyones(batch, torch.cat((turned[:, heads:], qkv[:, rotated:]), dim=1))
        k, v = rows.chunk(2, dim=1)
        write_kv(kv[group.name], self._place, kept_slots(batch, group.name), k, v)
        both = self._index(x).view(len(x), -1, keys.head_dim).to(exact)
        index = rotate(self._index_norm(both), *angles).to(x.dtype)
        own = everyones(batch, index[:, -1].contiguous())
        write_keys(kv[keys.name], self._key_place, kept_slots(batch, keys.name), own)
        return turned[:, :heads].contiguous(), index[:, :-1].to(exact)
