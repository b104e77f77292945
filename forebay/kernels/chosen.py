"""Which positions each row of a batch attends to, where they lie in the pool, and what chooses the best of many scores.

One order holds everywhere: the higher score first, and of equal scores the lower position. So what is chosen doesn't
depend on how a context was cut, nor on which rank computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, NO_BLOCK, Batch

NONE = -1
"""Stands for a position or slot that isn't there."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What some rows of a batch attend to.

    `rows` int64 [R] are these rows, ascending, `sequences` int64 [R] the sequence of each, by its place in the batch.
    `positions` int64 [R, K]: of that sequence, the best score first, each at most once; NONE behind the last.
    """

    rows: Tensor
    sequences: Tensor
    positions: Tensor

    def only(self, rows: Tensor) -> Selection:
        """Of the batch's `rows` int64 [n] alone, in their order, all of which it has."""
        at = torch.searchsorted(self.rows, rows)
        return Selection(rows, self.sequences.index_select(0, at), self.positions.index_select(0, at))


class RowResolver(Protocol):
    """Says where chosen rows of one cache group are on the device, and brings those that aren't.

    Both are called on the thread that computes, in the order of the layers. A layer is named by its place in the group.
    """

    def resolve(self, leader: int, batch: Batch, selection: Selection) -> Tensor:
        """Slots (block * 16 + offset) int64 [R, K] of the group's pool for `selection.positions`; NONE where those are.

        Once for each choice, by the layer that made it, before any layer reads by it. The same slots serve all layers
        that share the choice.
        """

    def prepare(self, layer: int, batch: Batch, selection: Selection, slots: Tensor) -> None:
        """Before `layer` reads its rows at `slots`, and after it has written those of the batch: they are there once
        this returns, or in the order of the device's stream. `selection` and `slots` may be fewer rows than resolved.
        """


def sequence_of_rows(batch: Batch) -> Tensor:
    """int64 [T]: the place in the batch of each row's sequence."""

    def make() -> Tensor:
        device = batch.positions.device
        counts = torch.tensor([span.query_len for span in batch.spans], device=device)
        return torch.repeat_interleave(torch.arange(len(counts), device=device), counts)

    return batch.once(("sequence of rows",), make)


def resident_slots(tables: Tensor, sequences: Tensor, positions: Tensor) -> Tensor:
    """Slots int64 [R, ...] of `positions` int64 [R, ...] by block `tables` int64 [S, n] alone; NONE where those are, or
    where there is no block."""
    there = positions.clamp_min(0)
    columns = (there // BLOCK_TOKENS).flatten(1)
    rows = tables.index_select(0, sequences)
    blocks = rows.gather(1, columns.clamp_max(rows.shape[1] - 1)).view(positions.shape)
    slots = blocks * BLOCK_TOKENS + there % BLOCK_TOKENS
    return slots.masked_fill_((positions < 0) | (blocks == NO_BLOCK), NONE)


def physical_rows(slots: Tensor, layers: int, layer_in_group: int) -> Tensor:
    """Rows int64 of a pool [blocks, layers, 1, 1, 16, width], seen as [n, width], of one layer; negative where the slot
    is."""
    return (slots // BLOCK_TOKENS * layers + layer_in_group) * BLOCK_TOKENS + slots % BLOCK_TOKENS


def best_columns(scores: Tensor, count: int) -> Tensor:
    """int64 [R, count]: the columns with the highest of `scores` [R, n], ascending. Of equal scores the first ones.

    A score of -inf is none: which of those columns fill up a row isn't said. Blocks.
    """
    rows, n = scores.shape
    if n <= count:
        return torch.arange(n, device=scores.device).expand(rows, n)
    best = scores.topk(count + 1, dim=1)
    columns = best.indices[:, :count].sort(dim=1).values
    last, next_best = best.values[:, count - 1 : count], best.values[:, count]
    # Where more than fit are as good as the last, topk has taken any of them.
    tied = (next_best == last[:, 0]) & (next_best > -math.inf)
    if bool(tied.any()):
        columns[tied] = _first_of_equals(scores[tied], last[tied], count)
    return columns


def _first_of_equals(scores: Tensor, last: Tensor, count: int) -> Tensor:
    above, equal = scores > last, scores == last
    room = count - above.sum(dim=1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=1) <= room))
    return kept.nonzero()[:, 1].view(len(scores), count)


def in_order(scores: Tensor, positions: Tensor) -> Tensor:
    """`positions` int64 [R, K], which ascend, by their `scores` [R, K]: the best first; NONE for those with -inf."""
    ranked = scores.sort(dim=1, descending=True, stable=True)
    return positions.gather(1, ranked.indices).masked_fill_(ranked.values == -math.inf, NONE)
