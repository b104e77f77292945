"""Whose positions are whose under decode context parallelism: the positions of a sequence are dealt out to ranks.

    position   0 ... I-1 | I ... 2I-1 | ... | DI ... DI+I-1 | ...         D ranks, I positions at a time
    owner          0     |     1      | ... |       0       |
    there      0 ... I-1 | 0 ...  I-1 | ... |  I ... 2I-1   |

A block of the table stands for the same 16 positions on every rank, and holds 16 / D of them there. So one table serves
all ranks, blocks are allocated and hashed by 16 positions whatever D is, and everything above the ranks knows no D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS

NO_SLOT = -1
"""Where a rank writes a position that isn't its own: nowhere."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """Those rows of a batch that a rank keeps, int64 [n], and the slots of its own pool where they go, int64 [n]."""

    rows: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Dealing:
    """`size` ranks, of which this is `rank`, get `interleave` positions at a time. `refusal` says what can't be."""

    size: int = 1
    rank: int = 0
    interleave: int = 1

    @property
    def block_tokens(self) -> int:
        """Positions of one rank in a block."""
        return BLOCK_TOKENS // self.size

    def owner(self, position: int) -> int:
        """The rank that keeps a position."""
        return position // self.interleave % self.size

    def local_index(self, position: int) -> int:
        """Which of its owner's positions it is."""
        return position // (self.size * self.interleave) * self.interleave + position % self.interleave

    def local_length(self, tokens: int) -> int:
        """How many of a sequence's first `tokens` positions are this rank's; often different from rank to rank."""
        whole, rest = divmod(tokens, self.size * self.interleave)
        return whole * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def local_lengths(self, tokens: Tensor) -> Tensor:
        """`local_length` of each of `tokens`, int64: of query j behind H others, that of H + j + 1."""
        whole, rest = tokens // (self.size * self.interleave), tokens % (self.size * self.interleave)
        return whole * self.interleave + (rest - self.rank * self.interleave).clamp(0, self.interleave)

    def local_blocks(self, tokens: int) -> int:
        """Blocks, from a sequence's first on, in which this rank keeps something of its first `tokens` positions."""
        return -(-self.local_length(tokens) // self.block_tokens)

    def slot(self, block: int, position: int) -> int:
        """Where in this rank's pool, `block` * `block_tokens` + offset, a position lies; NO_SLOT if it isn't here."""
        if self.owner(position) != self.rank:
            return NO_SLOT
        return block * self.block_tokens + self.local_index(position % BLOCK_TOKENS)

    def slots(self, slots: Tensor) -> Tensor:
        """`slot` of each of a batch's `slots` (block * 16 + position % 16, int64 [T])."""
        offset = slots % BLOCK_TOKENS
        step = self.size * self.interleave
        there = slots // BLOCK_TOKENS * self.block_tokens + offset // step * self.interleave + offset % self.interleave
        return torch.where(offset // self.interleave % self.size == self.rank, there, NO_SLOT)

    def own_rows(self, slots: Tensor) -> OwnRows:
        """Which rows of a batch with these `slots` this rank writes, and where."""
        there = self.slots(slots)
        rows = (there != NO_SLOT).nonzero()[:, 0]
        return OwnRows(rows, there.index_select(0, rows))

    def in_order(self, tokens: int, width: int, device: torch.device | None = None) -> Tensor:
        """Where position 0, 1, ... `tokens` - 1 is, int64 [tokens], if the ranks' own stand behind one another, each
        in a place for `width`. They are positions of a sequence from some multiple of 16 on."""
        at = torch.arange(tokens, device=device)
        step = self.size * self.interleave
        return at // self.interleave % self.size * width + at // step * self.interleave + at % self.interleave

    def selected(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of selected `positions` int64 [T, K] (-1: none), all of a sequence: this rank's own as their local indices,
        the valid ones in front, [T, K], and how many those are, [T]."""
        own = (positions >= 0) & (positions // self.interleave % self.size == self.rank)
        step = self.size * self.interleave
        there = torch.where(own, positions // step * self.interleave + positions % self.interleave, NO_SLOT)
        order = own.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
        return there.gather(1, order), own.sum(dim=1)


def refusal(size: int, interleave: int) -> str | None:
    """Why positions can't be dealt out like this, naming the number to change, or None."""
    if size < 1 or BLOCK_TOKENS % size:
        possible = [n for n in range(1, BLOCK_TOKENS + 1) if BLOCK_TOKENS % n == 0]
        return (
            f"decode_context_parallel_size {size} must be one of {', '.join(map(str, possible))}: a block of "
            f"{BLOCK_TOKENS} tokens is dealt out evenly"
        )
    own = BLOCK_TOKENS // size
    if interleave < 1 or own % interleave:
        possible = [n for n in range(1, own + 1) if own % n == 0]
        return (
            f"cp_kv_cache_interleave_size {interleave} must be one of {', '.join(map(str, possible))}: it divides the "
            f"{own} tokens of a block that each of {size} ranks has"
        )
    return None


def best_of(scores: Tensor, positions: Tensor, count: int) -> Tensor:
    """The `count` best of candidates from all ranks, int64 [T, count]: the higher of `scores` [T, n] first, of equal
    ones the lower of `positions` int64 [T, n]. The same on every rank, whatever the order in which candidates came; so
    are the best of each rank's best those of all."""
    by_position = positions.sort(dim=1)
    ranked = scores.gather(1, by_position.indices).sort(dim=1, descending=True, stable=True)
    return by_position.values.gather(1, ranked.indices[:, :count])
