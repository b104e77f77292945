"""Block-sparse attention over heads of K and V: an index chooses whole blocks of positions, for each KV head others.

    score(b) = the largest q_i . k_t of the block's positions t that the query sees

The blocks that lie nearest before a query, its own included, are always chosen. Blocks are counted from a sequence's
first position, and have nothing to do with those of the pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, Batch
from forebay.kernels.chosen import NONE, best_columns, in_order, resident_slots, sequence_of_rows
from forebay.kernels.indexer import Keys
from forebay.kernels.products import product_dtype
from forebay.kernels.scratch import gather_rows

SCORE_BYTES = 16 * 2**20
"""The most that scores of a tile of queries take."""

GATHER_BYTES = 4 * 2**20
"""The most K and V that are copied out of the pool at a time."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """`size` positions each, of which a query takes the best `top_k`, and among them the `local` last ones."""

    size: int
    top_k: int
    local: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockSelection:
    """`blocks` int64 [R, heads, K]: for rows int64 [R] of the batch and each KV head, the best first; NONE behind the
    last. `sequences` int64 [R] is the sequence of each row, `ends` [R] how many of its positions the row sees."""

    rows: Tensor
    sequences: Tensor
    ends: Tensor
    blocks: Tensor

    def positions(self, size: int) -> Tensor:
        """int64 [R, heads, K * size]; NONE for what isn't there or not seen."""
        at = self.blocks[..., None] * size + torch.arange(size, device=self.blocks.device)
        hidden = (self.blocks[..., None] < 0) | (at >= self.ends[:, None, None, None])
        return at.masked_fill_(hidden, NONE).flatten(2)


def choose_blocks(
    q: Tensor, pool: Tensor, layer_in_group: int, batch: Batch, group: str, blocks: Blocks, rows: Tensor | None = None
) -> BlockSelection:
    """For each row of the batch, or for `rows` int64 alone, which ascend, and each head of `q` [R, heads, dim], which
    is fp32 or fp64. The batch's own index keys must have been written. Mutates nothing. Blocks."""
    sequences = sequence_of_rows(batch)
    rows = torch.arange(len(sequences), device=sequences.device) if rows is None else rows
    sequences, ends = sequences.index_select(0, rows), batch.positions.index_select(0, rows) + 1
    width = min(blocks.top_k, -(-max(span.total_len for span in batch.spans) // blocks.size))
    out = torch.full((*q.shape[:2], width), NONE, dtype=torch.int64, device=rows.device)
    begin = 0
    for index, count in enumerate(torch.bincount(sequences, minlength=len(batch.spans)).tolist()):
        total = batch.spans[index].total_len
        table = batch.groups[group].block_tables[index, : (total - 1) // BLOCK_TOKENS + 1]
        keys = Keys(pool, layer_in_group, table, q.dtype)
        tile = max(1, SCORE_BYTES // (q.shape[1] * total * q.element_size()))
        for first in range(begin, begin + count, tile):
            part = slice(first, min(first + tile, begin + count))
            chosen = _choose(q[part], keys, ends[part], blocks)
            out[part, :, : chosen.shape[2]] = chosen
        begin += count
    return BlockSelection(rows, sequences, ends, out)


def _choose(q: Tensor, keys: Keys, ends: Tensor, blocks: Blocks) -> Tensor:
    """int64 [r, heads, at most top_k], for rows of one sequence whose `ends` [r] ascend."""
    rows, heads, _ = q.shape
    scores = block_scores(q, keys.all()[: int(ends[-1])], ends, blocks.size)
    near = ((ends - 1) // blocks.size)[:, None] - torch.arange(blocks.local, device=q.device)
    scores.scatter_(2, near.clamp_min_(0)[:, None].expand(-1, heads, -1), math.inf)
    flat = scores.flatten(0, 1)
    columns = best_columns(flat, blocks.top_k)
    return in_order(flat.gather(1, columns), columns).view(rows, heads, -1)


def block_scores(q: Tensor, keys: Tensor, ends: Tensor, size: int) -> Tensor:
    """[r, heads, blocks]: the best product in each block of `size` of `keys` [n, dim] with `q` [r, heads, dim], of keys
    before `ends` [r]; -inf where there is none."""
    rows, heads, dim = q.shape
    count = -(-len(keys) // size)
    products = q.new_full((rows, heads, count * size), -math.inf)
    products[..., : len(keys)] = (q.reshape(rows * heads, dim) @ keys.T).view(rows, heads, -1)
    hidden = torch.arange(count * size, device=q.device) >= ends[:, None]
    products.masked_fill_(hidden[:, None], -math.inf)
    return products.view(rows, heads, count, size).amax(dim=3)


def block_sparse_attention(
    q: Tensor, pool: Tensor, layer_in_group: int, tables: Tensor, selection: BlockSelection, size: int, *, scale: float
) -> Tensor:
    """Attention of rows `q` [R, heads, dim] over the blocks of `size` chosen for the KV head of each, of the pool
    [blocks, layers, 2, kv_heads, 16, dim] by block `tables` int64 [S, n]. Returns the shape of `q`. Mutates nothing."""
    rows, heads, dim = q.shape
    kv_heads, out = pool.shape[3], torch.empty_like(q)
    folded = (q.to(product_dtype(q)) * scale).view(rows, kv_heads, heads // kv_heads, dim)
    token_bytes = 2 * kv_heads * dim * pool.element_size()
    tile = max(1, GATHER_BYTES // max(1, selection.blocks.shape[2] * size * token_bytes))
    for begin in range(0, rows, tile):
        part = slice(begin, begin + tile)
        chosen = BlockSelection(*(x[part] for x in (
            selection.rows, selection.sequences, selection.ends, selection.blocks
        )))  # fmt: skip
        slots = resident_slots(tables, chosen.sequences, chosen.positions(size))
        k, v = (x.to(folded.dtype) for x in _read(pool, layer_in_group, slots))
        scores = (folded[part] @ k.transpose(2, 3)).masked_fill_((slots < 0)[:, :, None], -math.inf)
        out[part] = (torch.softmax(scores, dim=-1) @ v).view(-1, heads, dim)
    return out


def _read(pool: Tensor, layer_in_group: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """K and V [r, kv_heads, n, dim] at `slots` int64 [r, kv_heads, n], until the next gather; where a slot is negative,
    those of any position that the row has chosen."""
    _, layers, _, kv_heads, _, dim = pool.shape
    known = torch.where(slots < 0, slots.amax(dim=2, keepdim=True), slots)
    heads = torch.arange(kv_heads, device=pool.device)[:, None]
    first = (known // BLOCK_TOKENS * layers + layer_in_group) * 2 * kv_heads + heads
    at = torch.stack((first, first + kv_heads)) * BLOCK_TOKENS + known % BLOCK_TOKENS
    found = gather_rows(pool.view(-1, dim), at.flatten()).view(2, *slots.shape, dim)
    return found[0], found[1]


# --- the oracle ----------------------------------------------------------------------------------------------


def block_sparse_reference(
    q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, blocks: Blocks, *, scale: float
) -> Tensor:
    """What a sequence's heads `q` [n, heads, dim] must give over `k` and `v` [n, kv_heads, dim], chosen by `index_q`
    [n, kv_heads, d] and `index_k` [n, d]: one query at a time, in fp64. Slow: for tests."""
    out = torch.empty_like(q)
    shared = q.shape[1] // k.shape[1]
    for row in range(len(q)):
        own = row // blocks.size
        for kv in range(k.shape[1]):
            products = (index_k[: row + 1].double() @ index_q[row, kv].double()).split(blocks.size)
            worth = [math.inf if own - b < blocks.local else float(x.max()) for b, x in enumerate(products)]
            kept = sorted(range(len(worth)), key=lambda b: (-worth[b], b))[: blocks.top_k]
            seen = [t for t in range(row + 1) if t // blocks.size in kept]
            for head in range(kv * shared, (kv + 1) * shared):
                weights = torch.softmax(k[seen, kv].double() @ q[row, head].double() * scale, dim=0)
                out[row, head] = (weights @ v[seen, kv].double()).to(q.dtype)
    return out
