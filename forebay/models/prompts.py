"""Prompts whose new tokens several ranks share out: each computes two stretches of every prompt of a step.

    one prompt's new tokens   | 0 | 1 | 2 | 3 |      N ranks, 2N stretches; rank r has r and 2N - 1 - r: an early one,
    two ranks                   0   1   1   0        which sees little, with a late one, which sees much

To a rank each stretch is a sequence of its own, behind everything before it. In every layer the new keys of all
stretches come to all ranks, which write them all, and then attend: so every rank's pool has everything. Single new
tokens (decodes) are computed by all, and rank 0's results count. Layers in which a token needs the state that the one
before it leaves can't be shared out like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from forebay.kernels.batch import Batch, GroupTables, SequenceSpan
from forebay.models.traffic import Traffic


class Prompts(Protocol):
    """The ranks that share out prompts. All enter each collective, in the same order, or none."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def traffic(self) -> Traffic: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, contiguous and of equal shapes: [size, *x.shape]."""


def stretches(length: int, size: int) -> list[range]:
    """The 2 * `size` stretches of `length` new tokens, as even as they can be; some are empty if it is short."""
    each, more = divmod(length, 2 * size)
    starts = [index * each + min(index, more) for index in range(2 * size + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def own_stretches(length: int, size: int, rank: int) -> list[range]:
    """Those that `rank` computes, without empty ones, in order."""
    every = stretches(length, size)
    return [part for part in (every[rank], every[2 * size - 1 - rank]) if part]


@dataclass(frozen=True, slots=True)
class _Row:
    """A stretch of the whole batch as one rank has it: of sequence `index`, from the new token `first` on."""

    index: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """A step's whole batch, and where its rows are among those of all ranks: `order` int64 [T], rank r's from
    r * `most` on; `wanted` of those whose logits are, int64, among these alone, rank r's from r * `most_wanted` on."""

    whole: Batch
    prompts: Prompts
    order: Tensor
    most: int
    wanted: Tensor
    most_wanted: int

    def everyones(self, rows: Tensor) -> Tensor:
        """The rows [T, ...] of the whole batch, in its order, of which this rank has computed `rows`."""
        return self._gathered(rows, self.most).index_select(0, self.order)

    def results(self, hidden: Tensor) -> Tensor:
        """Those whose logits are wanted, in the order in which they are: `hidden` are this rank's."""
        if not self.most_wanted:
            return hidden
        return self._gathered(hidden, self.most_wanted).index_select(0, self.wanted)

    def _gathered(self, rows: Tensor, most: int) -> Tensor:
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        self.prompts.traffic.add("rows", (self.prompts.size - 1) * padded.numel() * padded.element_size())
        return self.prompts.all_gather(padded).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class SpreadBatch(Batch):
    """This rank's part of a batch: sequences are stretches, the table of each is its sequence's. Its own `slots` and
    `logits_rows` are of its rows alone."""

    spread: Spread | None = None


def everyones(batch: Batch, rows: Tensor) -> Tensor:
    """New `rows` [T, ...] to be kept: this rank's, or all ranks' if they share out the batch."""
    spread = batch.spread if isinstance(batch, SpreadBatch) else None
    return rows if spread is None else spread.everyones(rows)


def results(batch: Batch, hidden: Tensor) -> Tensor:
    """The rows whose logits are wanted of the whole batch, of this rank's `hidden` ones."""
    spread = batch.spread if isinstance(batch, SpreadBatch) else None
    return hidden if spread is None else spread.results(hidden)


def kept_slots(batch: Batch, group: str) -> Tensor:
    """Where `everyones` rows are kept."""
    spread = batch.spread if isinstance(batch, SpreadBatch) else None
    return (batch if spread is None else spread.whole).groups[group].slots


def spread_batch(batch: Batch, prompts: Prompts) -> SpreadBatch:
    """This rank's part of `batch`."""
    device = batch.token_ids.device
    every = [_rows(batch.spans, prompts.size, rank) for rank in range(prompts.size)]
    places = [_places(batch.spans, rows) for rows in every]
    order, owners = _order(batch.num_tokens, places)
    most = max(map(len, places))
    mine = torch.tensor(places[prompts.rank], device=device)
    wanted = [_wanted(batch.logits_rows, place, owners, rank) for rank, place in enumerate(places)]
    results = _wanted_order(batch.logits_rows, wanted).to(device)
    spread = Spread(batch, prompts, (owners * most + order).to(device), most, results, max(map(len, wanted)))
    return SpreadBatch(
        token_ids=batch.token_ids.index_select(0, mine),
        positions=batch.positions.index_select(0, mine),
        spans=_spans(batch.spans, every[prompts.rank]),
        groups={name: _tables(tables, every[prompts.rank], mine) for name, tables in batch.groups.items()},
        logits_rows=torch.tensor([at for _, at in wanted[prompts.rank]], dtype=torch.int64, device=device),
        spread=spread,
    )


def _rows(spans: Sequence[SequenceSpan], size: int, rank: int) -> list[_Row]:
    found = []
    for index, span in enumerate(spans):
        if span.query_len == 1:
            found.append(_Row(index, 0, 1))
        else:
            found += [_Row(index, part.start, len(part)) for part in own_stretches(span.query_len, size, rank)]
    # Nobody computes nothing: who has no part of a short prompt computes a row that nobody asks for.
    return found or [_Row(0, 0, 1)]


def _places(spans: Sequence[SequenceSpan], rows: Sequence[_Row]) -> list[int]:
    """Which rows of the whole batch these are."""
    starts = [spans[row.index].query_start + row.first for row in rows]
    return [start + step for start, row in zip(starts, rows, strict=True) for step in range(row.count)]


def _order(total: int, places: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Of each row of the whole batch, its place among its owner's, and the owner: the first that has it."""
    order, owners = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
    for rank, mine in reversed(list(enumerate(places))):
        at = torch.tensor(mine)
        order[at], owners[at] = torch.arange(len(mine)), rank
    return order, owners


def _wanted(wanted: Tensor, place: Sequence[int], owners: Tensor, rank: int) -> list[tuple[int, int]]:
    """Wanted rows that this rank owns: in the whole batch, and its own."""
    local = {row: at for at, row in enumerate(place) if int(owners[row]) == rank}
    return [(row, local[row]) for row in wanted.tolist() if row in local]


def _wanted_order(rows: Tensor, wanted: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    most = max(len(keys) for keys in wanted)
    at = {row: rank * most + index for rank, keys in enumerate(wanted) for index, (row, _) in enumerate(keys)}
    return torch.tensor([at[row] for row in rows.tolist()], dtype=torch.int64)


def _spans(spans: Sequence[SequenceSpan], rows: Sequence[_Row]) -> tuple[SequenceSpan, ...]:
    made, start = [], 0
    for row in rows:
        made.append(SequenceSpan(start, row.count, spans[row.index].context_len + row.first))
        start += row.count
    return tuple(made)


def _tables(tables: GroupTables, rows: Sequence[_Row], mine: Tensor) -> GroupTables:
    sequences = torch.tensor([row.index for row in rows], device=mine.device)
    return replace(
        tables,
        block_tables=tables.block_tables.index_select(0, sequences),
        slots=tables.slots.index_select(0, mine),
    )
