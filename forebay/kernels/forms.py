"""The engine's operations by our Triton kernels: from batches to what kernels take, with shipped sizes of launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.kernels.chosen import in_order
from forebay.kernels.experts import Activation, Stack
from forebay.kernels.gpu import library
from forebay.kernels.gpu.attend import Tiling, attend
from forebay.kernels.gpu.choose import choose
from forebay.kernels.gpu.experts import Sizes
from forebay.kernels.gpu.experts import activate as activate_rows
from forebay.kernels.gpu.experts import mix as mix_stacks
from forebay.kernels.gpu.indexer import pick_columns, score_keys
from forebay.kernels.gpu.latent import attend_latents
from forebay.kernels.gpu.move import move
from forebay.kernels.gpu.norm import add_norm
from forebay.kernels.gpu.rotary import norm_rotate_write, rotate_
from forebay.kernels.gpu.route import route
from forebay.kernels.gpu.sparse import attend_chosen
from forebay.kernels.moe import Routes
from forebay.kernels.moving import Pattern
from forebay.kernels.narrow import KvScales
from forebay.kernels.paged import Scores
from forebay.kernels.ragged import Ragged, of_batch
from forebay.kernels.rotary import Turn
from forebay.kernels.tuning.tables import sizes_for

__all__ = [
    "activate", "add_norm", "choose", "choose_positions", "latent_attention", "mix", "move_granules",
    "norm_rotate_write", "paged_attention", "rotate", "route", "sparse_latent_attention",
]  # fmt: skip

SCORE_BYTES = 256 * 2**20
"""The most that scores of an index take at a time."""


def paged_attention(q: Tensor, pool: Tensor, layer: int, batch: Batch, group: str, scores: Scores) -> Tensor:
    """See `forebay.kernels.attention.paged_attention`. Decodes beside prefill chunks have a launch of their own: their
    contexts are split."""
    where = of_batch(batch, group)
    parts = batch.once(("parts", group), lambda: _parts(where))
    if len(parts) == 1:
        return _attend(q, pool, layer, where, batch, scores)
    out = torch.empty_like(q)
    for part in parts:
        out.index_copy_(0, part.rows, _attend(q.index_select(0, part.rows), pool, layer, part.where, batch, scores))
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some sequences of a batch, and their rows int64 [n] in it."""

    rows: Tensor
    where: Ragged


def _parts(where: Ragged) -> list[_Part]:
    """Sequences of one row, and those of more; those that there are."""
    starts = list(accumulate(where.counts, initial=0))
    kinds = [[i for i, count in enumerate(where.counts) if (count == 1) == single] for single in (True, False)]
    found = []
    for chosen in filter(None, kinds):
        rows = [row for i in chosen for row in range(starts[i], starts[i + 1])]
        device = where.tables.device
        at = torch.tensor(chosen, device=device)
        counts = [where.counts[i] for i in chosen]
        columns = (where.contexts[at], where.lengths[at], where.tables[at])
        ends = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        found.append(_Part(torch.tensor(rows, device=device), Ragged(tuple(counts), ends, *columns, where.causal)))
    return found


def _attend(q: Tensor, pool: Tensor, layer: int, where: Ragged, batch: Batch, scores: Scores) -> Tensor:
    kind = "attend.decode" if where.longest == 1 else "attend.prefill"
    return attend(q, pool, layer, where, scores, _tiling(q, batch, kind)).out


def latent_attention(
    q: Tensor, pool: Tensor, layer: int, batch: Batch, group: str, scale: float, rank: int, scales: KvScales | None
) -> Tensor:
    """See `forebay.kernels.mla.latent_attention`."""
    where, tiling = of_batch(batch, group), _tiling(q, batch, "latent.decode")
    scores = Scores(scale, k_scale=None if scales is None else scales.k)
    return attend_latents(q.contiguous(), pool, layer, where, scores, rank=rank, tiling=tiling).out


def sparse_latent_attention(q: Tensor, pool: Tensor, layer: int, slots: Tensor, scale: float, rank: int) -> Tensor:
    """See `forebay.kernels.sparse.sparse_latent_attention`."""
    tiling = sizes_for(
        library.architecture(q.device), "latent.decode", Tiling, dim=q.shape[2], context=slots.shape[1]
    )
    return attend_chosen(q.contiguous(), pool, layer, slots.contiguous(), scale, rank=rank, tiling=tiling).out


def choose_positions(
    q: Tensor, weights: Tensor, pool: Tensor, layer: int, tables: Tensor, sequences: Tensor, ends: Tensor,
    longest: int, count: int,
) -> Tensor:  # fmt: skip
    """For each row, which sees its sequence's first `ends` int64 [R] positions, of `longest` at most, the `count` best
    of these: int64 [R, count], the best first, -1 behind the last."""
    q = q if pool.dtype == torch.uint8 else q.to(pool.dtype)
    parts = []
    step = max(1, SCORE_BYTES // (4 * longest))
    for begin in range(0, len(q), step):
        part = slice(begin, begin + step)
        scores = score_keys(
            q[part].contiguous(), weights[part].contiguous(), pool, layer, tables, sequences[part], ends[part], longest
        )
        columns = pick_columns(scores, count)
        worth = scores.gather(1, columns.clamp_min(0)).masked_fill_(columns < 0, -math.inf)
        parts.append(in_order(worth, columns))
    return torch.cat(parts)


def _tiling(q: Tensor, batch: Batch, kind: str) -> Tiling:
    def find() -> Tiling:
        longest = max((span.total_len for span in batch.spans), default=0)
        return sizes_for(library.architecture(q.device), kind, Tiling, dim=q.shape[2], context=longest)

    return batch.once(("tiling", kind, q.shape[2]), find)


def move_granules(pool: Tensor, blocks: Tensor, granules: Tensor, *, store: bool) -> None:
    """Whole granules between `blocks` [n] of a contiguous pool and host memory uint8 [n, granule_bytes]. Blocks."""
    buffers = pool.view(-1).view(torch.uint8)
    length = granules.shape[1]
    pattern = Pattern(length, (), (), (), torch.arange(len(blocks)) * length, blocks * length)
    move(pattern, granules.view(-1), buffers, store=store)
    if buffers.device.type == "cuda":
        torch.cuda.current_stream(buffers.device).synchronize()


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """x [T, heads, dim], of any strides, rotated: a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    rotate_(out, turn)
    return out


def activate(gate_up: Tensor, act: Activation) -> Tensor:
    """See `forebay.kernels.experts.activate`."""
    return activate_rows(gate_up.contiguous(), act)


def mix(x: Tensor, routes: Routes, up: Stack, down: Stack, act: Activation) -> Tensor:
    """See `forebay.kernels.experts.mix`; experts that are elsewhere are -1 in `routes`."""
    count = up.values.shape[0]
    each = -(-routes.experts.numel() // count)
    sizes = sizes_for(library.architecture(x.device), f"experts.{up.form}", Sizes, each=each)
    return mix_stacks(x.contiguous(), routes, up, down, act, sizes)
