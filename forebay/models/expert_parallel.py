"""Experts that ranks deal out whole: each token has a rank where it is at home, and its experts' ranks compute for it.

    gathered     every rank gets every token with its choices, computes those that are its experts', and the parts of a
                 token's sum go home, where they are summed in the order of the ranks
    exchanged    a token's row goes to the ranks of its experts and to no others; what they give comes back, and is
                 summed at home in the order of the token's choices: the same bits as one rank alone computes

Every rank has all tokens to begin with, since attention leaves them so, and gets all sums in the end. The ranks are
neighbours in a layer: a token is at home where `share` says. A rank that is home to no token, or whose experts nobody
chose, enters every collective all the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels.moe import Routes
from forebay.models.experts import Experts
from forebay.models.ranks import Alone, Ranks, share

Choose = Callable[[Tensor], Routes]
"""Routes of rows [n, hidden]."""


class DealtExperts:
    """This rank's `experts`, of `count` that all ranks have together, and the way to the others'."""

    def __init__(self, experts: Experts, count: int, ranks: Ranks) -> None:
        self._experts, self._ranks = experts, ranks
        self._ids = share(count, ranks)
        self._starts = [share(count, Alone(rank, ranks.size)).start for rank in range(ranks.size)]
        self._mix = self._gathered if ranks.experts == "gathered" else self._exchanged

    def __call__(self, x: Tensor, choose: Choose, shared: Callable[[Tensor], Tensor] | None) -> Tensor:
        """For x [T, hidden], the same on every rank, the weighted sums of what its experts give, with `shared`'s on
        top, on every rank: [T, hidden] in the dtype of the weights."""
        home, routes = share(len(x), self._ranks), choose(x)  # of all rows, lest a product of fewer rounds otherwise
        at = slice(home.start, home.stop)
        own, routes = x[at], Routes(routes.experts[at], routes.weights[at])
        mixed = self._mix(own, routes, -(-len(x) // self._ranks.size))
        if shared is not None and len(own):
            mixed = mixed.add_(shared(own))
        return self._to_all(mixed, len(x))

    def _gathered(self, own: Tensor, routes: Routes, widest: int) -> Tensor:
        missing = widest - len(own)
        rows = self._ranks.gather_all(F.pad(own, (0, 0, 0, missing)))
        chosen = self._ranks.gather_all(F.pad(routes.experts, (0, 0, 0, missing), value=-1))
        weights = self._ranks.gather_all(F.pad(routes.weights, (0, 0, 0, missing)))
        mine = (chosen >= self._ids.start) & (chosen < self._ids.stop)
        local = torch.where(mine, chosen - self._ids.start, -1)
        return self._ranks.sum_parts(self._experts(rows, Routes(local, weights)))[: len(own)]

    def _exchanged(self, own: Tensor, routes: Routes, _: int) -> Tensor:
        top_k, flat = routes.experts.shape[1], routes.experts.flatten()
        starts = torch.tensor(self._starts, device=own.device)
        goes_to = torch.searchsorted(starts, flat, right=True) - 1
        order = goes_to.argsort(stable=True)
        given = goes_to.bincount(minlength=self._ranks.size)
        taken = self._ranks.exchange(given[:, None], [1] * self._ranks.size, [1] * self._ranks.size)
        there, here = given.tolist(), taken.flatten().tolist()
        local = (flat - starts[goes_to]).index_select(0, order)
        rows = self._ranks.exchange(own.index_select(0, order // top_k), there, here)
        chosen = self._ranks.exchange(local[:, None], there, here)
        ones = torch.ones(chosen.shape, dtype=routes.weights.dtype, device=own.device)
        results = self._ranks.exchange(self._experts(rows, Routes(chosen, ones)).to(own.dtype), here, there)
        placed = torch.empty_like(results).index_copy_(0, order, results)
        return (placed.view(-1, top_k, own.shape[1]) * routes.weights[..., None]).sum(dim=1)

    def _to_all(self, mixed: Tensor, tokens: int) -> Tensor:
        size = self._ranks.size
        widest = -(-tokens // size)
        whole = self._ranks.gather_all(F.pad(mixed, (0, 0, 0, widest - len(mixed))))
        if tokens == size * widest:
            return whole
        homes = [share(tokens, Alone(rank, size)) for rank in range(size)]
        return torch.cat([whole[rank * widest :][: len(home)] for rank, home in enumerate(homes)])
