"""Rows of many sequences in one flat batch, and which stored tokens each row sees: what attention kernels are told.

`Batch` says the same of a whole forward pass; this is one cache group's part of it, as tensors. A sequence's stored
tokens may be fewer than its positions say, where ranks share them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, Batch


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """`counts` [S] rows of each sequence, one after the other in the flat batch, the first at position `contexts` [S].

    `starts` [S + 1]: where they begin and end. `lengths` [S] tokens of each are stored; token p lies in block
    p // 16 of the sequence's row of `tables` [S, n], which covers its length (-1: there is none: unseen). Row i of a
    sequence sees the tokens p < length; if `causal`, those with p <= context + i; in a window of W positions, those
    with p > context + i - W. `counts` is on the host, since grids follow from it; the others int32, `tables` int64.
    """

    counts: tuple[int, ...]
    starts: Tensor
    contexts: Tensor
    lengths: Tensor
    tables: Tensor
    causal: bool = True

    @property
    def rows(self) -> int:
        """Of the flat batch."""
        return sum(self.counts)

    @property
    def longest(self) -> int:
        """Rows of the sequence that has most."""
        return max(self.counts, default=0)

    def pieces(self, size: int) -> Tensor:
        """int32 [n, 2]: sequence and first row in it, for every piece of at most `size` rows of one sequence."""
        found = [(index, first) for index, count in enumerate(self.counts) for first in range(0, count, size)]
        return torch.tensor(found, dtype=torch.int32, device=self.tables.device).view(-1, 2)


def ragged(
    counts: Sequence[int], contexts: Sequence[int], lengths: Sequence[int], tables: Tensor, *, causal: bool = True
) -> Ragged:
    """From plain lists; `tables` int64 [S, n], on the device that the kernels run on."""
    assert len(counts) == len(contexts) == len(lengths) == len(tables), (counts, contexts, lengths, tables.shape)
    starts = [0, *accumulate(counts)]

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=tables.device)

    return Ragged(tuple(counts), column(starts), column(contexts), column(lengths), tables, causal)


def of_batch(batch: Batch, group: str) -> Ragged:
    """One group's part of a batch, worked out once."""
    return batch.once(("ragged", group), lambda: _of_batch(batch, group))


def _of_batch(batch: Batch, group: str) -> Ragged:
    spans = batch.spans
    return ragged(
        [span.query_len for span in spans],
        [span.context_len for span in spans],
        [span.total_len for span in spans],
        batch.groups[group].block_tables,
    )


def seen(where: Ragged, sequence: int, row: int, window: int | None) -> list[int]:
    """Positions that row `row` of a sequence sees, as the definition says. For references: slow."""
    position, length = int(where.contexts[sequence]) + row, int(where.lengths[sequence])
    end = min(length, position + 1) if where.causal else length
    first = 0 if window is None else max(0, position - window + 1)
    table = where.tables[sequence].tolist()
    return [p for p in range(first, end) if table[p // BLOCK_TOKENS] >= 0]
