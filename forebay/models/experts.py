"""The experts of one layer that a rank has, laid out for whatever computes them.

    packed    on the CPU: two projections an expert, each called with all of its tokens
    stacked   elsewhere, and where the kernels run: all experts as one tensor, shared ones as slots behind them; in FP8
              or MXFP4, if they are stored so and the kernels take them

Weights are laid out once, when they are read (`expert_weights.py`), for the form that `forebay.kernels.dispatch`
foresees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forebay.errors import ConfigError
from forebay.kernels.dispatch import VARIABLE, dispatch
from forebay.kernels.experts import Activation, Stack, activate, with_shared
from forebay.kernels.moe import Routes, mix_experts
from forebay.kernels.products import multiply
from forebay.models.layers import Linear
from forebay.models.ranks import Ranks, share


class Experts(Protocol):
    """Experts that a rank has, numbered from 0."""

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """For x [T, hidden] the weighted sum of what its experts give, [T, hidden] in the dtype of the weights. An
        expert of -1 is elsewhere, and gives nothing."""


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Which experts a rank has, and which of the columns between their projections."""

    ids: range
    columns: range


def expert_share(experts: int, ffn: int, ranks: Ranks) -> ExpertShare:
    """A part of every expert; or whole experts, where ranks deal them out."""
    if ranks.experts == "inside":
        return ExpertShare(range(experts), share(ffn, ranks))
    return ExpertShare(share(experts, ranks), range(ffn))


class PackedExperts:
    """Experts as pairs of projections, up and down, with `act` between."""

    def __init__(self, pairs: Sequence[tuple[Linear, Linear]], act: Activation) -> None:
        self._pairs, self._act = pairs, act

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """See `Experts`."""
        if dispatch().choose("experts", x, x) == "triton":
            raise ConfigError(f"{VARIABLE}=triton came after the experts' weights: they are laid out for torch's form")
        return mix_experts(x, routes, len(self._pairs), self._expert)

    def _expert(self, index: int, rows: Tensor) -> Tensor:
        up, down = self._pairs[index]
        return down(activate(up(rows), self._act))


class StackedExperts:
    """Experts as two stacks of weights. The last `shared` of them are every token's."""

    def __init__(self, up: Stack, down: Stack, act: Activation, shared: int = 0) -> None:
        self._up, self._down, self._act, self._shared = up, down, act, shared

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """See `Experts`."""
        count = self._up.values.shape[0]
        if self._shared:
            routes = with_shared(routes, count - self._shared, self._shared)
        if dispatch().choose("experts", x, self._up.values) == "triton":
            from forebay.kernels import forms

            return forms.mix(x, routes, self._up, self._down, self._act)
        return mix_experts(x, routes, count, self._expert)

    def _expert(self, index: int, rows: Tensor) -> Tensor:
        return _project(activate(_project(rows, self._up, index), self._act), self._down, index)


def _project(x: Tensor, stack: Stack, index: int) -> Tensor:
    return multiply(x, stack.plain(index).to(x.dtype), None if stack.bias is None else stack.bias[index].to(x.dtype))
