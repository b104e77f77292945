"""From a plan to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.kernels.batch import BLOCK_TOKENS, NO_BLOCK, Batch, GroupTables, SequenceSpan
from forebay.kernels.chosen import RowResolver
from forebay.scheduler.plan import Work
from forebay.workers.holdings import Holdings

Ints = NDArray[np.int64]


def build_batch(
    works: Sequence[Work], holdings: Holdings, device: torch.device, resolver: RowResolver | None = None
) -> Batch:
    """The batch that carries out `works`, one span each, in their order; logits of those that are scored or sample,
    in order of their rows. `resolver` says where chosen rows are, if not all of them where the tables say."""
    assert works
    spans: list[SequenceSpan] = []
    row = 0
    for work in works:
        spans.append(SequenceSpan(row, work.count, work.start))
        row += work.count
    ids = np.concatenate([np.array(w.request.tokens[w.start : w.end], dtype=np.int64) for w in works])
    positions = np.concatenate([np.arange(w.start, w.end, dtype=np.int64) for w in works])
    wanted: list[int] = []
    for span, work in zip(spans, works, strict=True):
        wanted += [span.query_start + position - work.start for position in work.scored]
        wanted += [span.query_end - 1] * work.samples
    groups = {
        shape.geometry.name: _tables(works, group, holdings, device) for group, shape in enumerate(holdings.shapes)
    }
    return Batch(
        token_ids=_tensor(ids, device),
        positions=_tensor(positions, device),
        spans=tuple(spans),
        groups=groups,
        logits_rows=_tensor(np.array(wanted, dtype=np.int64), device),
        resolver=resolver,
    )


def _tables(works: Sequence[Work], group: int, holdings: Holdings, device: torch.device) -> GroupTables:
    rows = [np.array(holdings.holding(work.request).tables[group], dtype=np.int64) for work in works]
    table = np.full((len(rows), max(map(len, rows))), NO_BLOCK, dtype=np.int64)
    slots: list[Ints] = []
    for index, (row, work) in enumerate(zip(rows, works, strict=True)):
        table[index, : len(row)] = row
        positions = np.arange(work.start, work.end, dtype=np.int64)
        slots.append(row[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS)
    return GroupTables(_tensor(table, device), _tensor(np.concatenate(slots), device))


def _tensor(values: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)
