"""Keeping the best of scores that come part by part, in the order of their positions.

Of a long context nearly nothing beats what is kept already. So a part is only looked through for what exceeds the
*floor*, the least of what is kept: by the maxima of short runs of columns, of which few have to be looked at. What does
is set aside, and sorted in once there is enough of it. Meanwhile the floor is lower than it could be, which lets too
much through and nothing get lost. A later position that is only as good as the floor never counts: of equal scores the
lower position wins.

While many exceed it, at the beginning of a context, whole parts are sorted in instead: see `dense`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.chosen import best_columns, in_order

RUN = 64
"""Columns that have their maximum taken together."""


class Best:
    """The `count` best of each of `rows` rows so far. Scores are in the dtype and on the device of `like`.

    A score of -inf is none. All parts begin where the last one has ended, and nothing is mutated but this."""

    def __init__(self, rows: int, count: int, like: Tensor) -> None:
        self._count = count
        self._scores = like.new_empty(rows, 0)
        self._positions = torch.empty(rows, 0, dtype=torch.int64, device=like.device)
        self._floor = like.new_full((rows, 1), -math.inf)
        self._aside: list[tuple[Tensor, Tensor, Tensor]] = []
        self._waiting = 0

    def dense(self, seen: int) -> bool:
        """With `seen` positions behind, is it cheaper to `take` the next part than to `sift` it? Where no position is
        likelier to be good than another, every run has one of the best then. The result is the same."""
        return seen < RUN * self._count

    def reach(self, most: float) -> bool:
        """Is all that is kept in every row at least `most`? Then no later position that isn't better counts."""
        return bool((self._floor >= most).all())

    def take(self, scores: Tensor, first: int) -> None:
        """A part [rows, n] of scores, whose columns are positions from `first` on."""
        self._settle()
        at = torch.arange(first, first + scores.shape[1], device=scores.device)
        self._merge(scores, at.expand(len(scores), -1))

    def sift(self, scores: Tensor, first: int) -> None:
        """The same, where little of it exceeds what is kept. Waits for the device."""
        rows, n = scores.shape
        if n % RUN:
            scores = torch.nn.functional.pad(scores, (0, -n % RUN), value=-math.inf)
        runs = scores.reshape(rows, -1, RUN)
        row, run = (runs.amax(2) > self._floor).nonzero().unbind(1)
        if not len(row):
            return
        found = runs[row, run]
        which, column = (found > self._floor[row]).nonzero().unbind(1)
        self._aside.append((row[which], first + run[which] * RUN + column, found[which, column]))
        self._waiting += len(which)
        if self._waiting > rows * self._count // 2:
            self._settle()

    def positions(self) -> Tensor:
        """int64 [rows, at most count], the best first, NONE behind the last."""
        self._settle()
        return in_order(self._scores, self._positions)

    def _settle(self) -> None:
        if not self._aside:
            return
        row, position, score = (torch.cat(parts) for parts in zip(*self._aside, strict=True))
        self._aside, self._waiting = [], 0
        # As a table, each row's in the order in which they came: that of their positions.
        order = row.argsort(stable=True)
        row = row[order]
        counts = row.bincount(minlength=len(self._floor))
        column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        width = int(counts.max())
        scores = score.new_full((len(counts), width), -math.inf)
        positions = torch.zeros_like(scores, dtype=torch.int64)
        scores[row, column], positions[row, column] = score[order], position[order]
        self._merge(scores, positions)

    def _merge(self, scores: Tensor, positions: Tensor) -> None:
        # What is kept comes first, and its positions ascend: so the order of columns stays that of positions.
        scores = torch.cat((self._scores, scores), dim=1)
        positions = torch.cat((self._positions, positions), dim=1)
        columns = best_columns(scores, self._count)
        self._scores, self._positions = scores.gather(1, columns), positions.gather(1, columns)
        if self._scores.shape[1] == self._count:
            self._floor = self._scores.amin(1, keepdim=True)
