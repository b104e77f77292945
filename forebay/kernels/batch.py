"""What one forward pass computes: a flat batch of token rows and where each cache group keeps their KV.

Sequences lie one after the other in the flat batch. A sequence of the batch is a run of `query_len` new
tokens that follow `context_len` tokens whose KV is in the pool already. A batch may mix long runs (prefill
chunks) and runs of one (decodes).

The KV of a group lies in a pool [num_blocks, layers_in_group, 2, kv_heads, 16, head_dim]; a block holds 16
absolute positions of one sequence, and a sequence's row of the block table says which block holds which.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forebay.kernels.chosen import RowResolver

BLOCK_TOKENS = 16
"""Tokens in a device block: one granule of the canonical layout."""

NO_BLOCK = -1
"""Stands in a block table for a block that has left the window, or that is not needed."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Rows [query_start, query_start + query_len) of the flat batch, which follow `context_len` cached tokens."""

    query_start: int
    query_len: int
    context_len: int

    @property
    def query_end(self) -> int:
        """One past the last row."""
        return self.query_start + self.query_len

    @property
    def total_len(self) -> int:
        """Tokens of the sequence once these rows are computed."""
        return self.context_len + self.query_len


@dataclass(frozen=True, slots=True, eq=False)
class GroupTables:
    """Where one cache group keeps the batch's KV.

    `block_tables` int64 [num_seqs, max_blocks]: entry i of a row is the block that holds absolute positions
    [16 * i, 16 * i + 16) of that sequence, NO_BLOCK where there is none (outside the window, or padding).
    `slots` int64 [T]: block * 16 + offset where each row of the batch writes its K and V.
    """

    block_tables: Tensor
    slots: Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """The input of a forward pass. `token_ids`, `positions` int64 [T]; `logits_rows` int64, rows of the flat
    batch whose logits are wanted (each at most once, in any order); `spans` in the order of the rows of every
    block table. `resolver` says where rows are that sparse layers choose; None: where the block tables say. All tensors
    are on the model's device.
    """

    token_ids: Tensor
    positions: Tensor
    spans: tuple[SequenceSpan, ...]
    groups: Mapping[str, GroupTables]
    logits_rows: Tensor
    resolver: RowResolver | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """T, the rows of the flat batch."""
        return self.token_ids.shape[0]

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, worked out at the first call for `key` and kept as long as the batch.

        All layers of a group share index tensors, masks and rope angles; this is where they meet.
        """
        if key not in self._memo:
            self._memo[key] = make()
        made: Made = self._memo[key]
        return made

    def check(self) -> None:
        """Assert what every forward pass counts on. Copies the tables to the host: for tests and debugging."""
        row = 0
        for span in self.spans:
            assert span.query_start == row, (span, row)
            assert span.query_len > 0 and span.context_len >= 0, span
            wanted = torch.arange(span.context_len, span.total_len)
            assert torch.equal(self.positions[row : span.query_end].cpu(), wanted), span
            row = span.query_end
        assert row == self.num_tokens == self.positions.shape[0], (row, self.num_tokens)
        for name, tables in self.groups.items():
            assert tables.block_tables.shape[0] == len(self.spans), name
            assert tables.slots.shape[0] == row, name
            assert bool((tables.slots >= 0).all()), name


def pack_batch(
    sequences: Sequence[tuple[Sequence[int], int]],
    tables: Mapping[str, Sequence[Sequence[int]]],
    *,
    logits_rows: Sequence[int] | None = None,
    device: torch.device | None = None,
    resolver: RowResolver | None = None,
) -> Batch:
    """Build a batch from plain lists.

    `sequences[i]` is (new token ids, context length). `tables[group][i]` is that sequence's list of blocks,
    long enough for context and new tokens. `logits_rows` defaults to the last row of every sequence.
    """
    spans: list[SequenceSpan] = []
    tokens: list[int] = []
    positions: list[int] = []
    for ids, context in sequences:
        spans.append(SequenceSpan(len(tokens), len(ids), context))
        tokens.extend(ids)
        positions.extend(range(context, context + len(ids)))
    if logits_rows is None:
        logits_rows = [span.query_end - 1 for span in spans]
    groups = {name: _pack_tables(rows, spans, device) for name, rows in tables.items()}
    return Batch(
        token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        spans=tuple(spans),
        groups=groups,
        logits_rows=torch.tensor(list(logits_rows), dtype=torch.int64, device=device),
        resolver=resolver,
    )


def _pack_tables(
    rows: Sequence[Sequence[int]], spans: Sequence[SequenceSpan], device: torch.device | None
) -> GroupTables:
    width = max(len(row) for row in rows)
    padded = [[*row, *[NO_BLOCK] * (width - len(row))] for row in rows]
    slots: list[int] = []
    for row, span in zip(rows, spans, strict=True):
        for position in range(span.context_len, span.total_len):
            block = row[position // BLOCK_TOKENS]
            assert block != NO_BLOCK, (position, row)
            slots.append(block * BLOCK_TOKENS + position % BLOCK_TOKENS)
    return GroupTables(
        block_tables=torch.tensor(padded, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
    )
