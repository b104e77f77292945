"""MLPs with a clamped SwiGLU, and experts that are such, from weights as published or in transformers' own form.

Gate and up lie side by side in both forms. Here they alternate, as the activation wants them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forebay.kernels.experts import Activation, activate
from forebay.models.expert_weights import stacked, stacks
from forebay.models.experts import Experts, ExpertShare, PackedExperts, StackedExperts, expert_share
from forebay.models.layers import Linear
from forebay.models.ranks import share
from forebay.models.weights import Weights

Pair = tuple[Tensor, Tensor]


class ClampedMLP:
    """down(act(gate_up(x))), gate and up alternating."""

    def __init__(self, gate_up: Linear, down: Linear, act: Activation) -> None:
        self._gate_up, self._down, self._act = gate_up, down, act

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(activate(self._gate_up(x), self._act))


def clamped_mlp(
    weights: Weights, at: str, hidden: int, ffn: int, act: Activation, *, partial: bool = False, whole: bool = False
) -> ClampedMLP:
    """The one under the name `at`. With several ranks each has its part of the columns, and gives the sum of all, or
    its part of the sum if only that is wanted (`partial`); unless each is to have it `whole`."""
    mine = range(ffn) if whole else share(ffn, weights.ranks)
    if f"{at}.gate_up_proj.weight" in weights:
        gate_up = _halves(weights, f"{at}.gate_up_proj.weight", ffn, hidden, mine)
    else:
        gate_up = _sides(weights, (f"{at}.gate_proj", f"{at}.up_proj"), ffn, hidden, mine)
    down = weights.summed_linear(f"{at}.down_proj", hidden, ffn, mine, partial=partial or whole)
    return ClampedMLP(Linear(gate_up), down, act)


def clamped_experts(weights: Weights, at: str, count: int, hidden: int, ffn: int, act: Activation) -> Experts:
    """This rank's of `count` experts under `at`, each by itself or all in one tensor."""
    mine = expert_share(count, ffn, weights.ranks)
    read = _from_stack if f"{at}.gate_up_proj" in weights else _one_by_one
    pairs = read(weights, at, count, hidden, ffn, mine)
    if stacks(weights):
        return StackedExperts(*stacked(pairs), act)
    return PackedExperts([(Linear(up), Linear(down)) for up, down in pairs], act)


def _one_by_one(
    weights: Weights, at: str, _: int, hidden: int, ffn: int, mine: ExpertShare
) -> Iterator[Pair]:
    for index in mine.ids:
        gate, up, down = (f"{at}.{index}.{name}" for name in ("w1", "w3", "w2"))
        gate_up = _sides(weights, (gate, up), ffn, hidden, mine.columns)
        yield gate_up, weights.take(f"{down}.weight", hidden, ffn, cut={1: mine.columns})


def _from_stack(
    weights: Weights, at: str, count: int, hidden: int, ffn: int, mine: ExpertShare
) -> Iterator[Pair]:
    columns = mine.columns
    sides = [
        weights.take(f"{at}.gate_up_proj", count, 2 * ffn, hidden, cut={0: mine.ids, 1: half})
        for half in (columns, range(ffn + columns.start, ffn + columns.stop))
    ]
    downs = weights.take(f"{at}.down_proj", count, hidden, ffn, cut={0: mine.ids, 2: columns})
    # Copies, so that no expert's share keeps the whole stack.
    return ((_alternating(gate, up), down.clone()) for gate, up, down in zip(*sides, downs, strict=True))


def _sides(weights: Weights, names: tuple[str, str], ffn: int, hidden: int, mine: range) -> Tensor:
    return _alternating(*(weights.take(f"{name}.weight", ffn, hidden, cut={0: mine}) for name in names))


def _halves(weights: Weights, name: str, ffn: int, hidden: int, mine: range) -> Tensor:
    halves = (mine, range(ffn + mine.start, ffn + mine.stop))
    return _alternating(*(weights.take(name, 2 * ffn, hidden, cut={0: half}) for half in halves))


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up), dim=1).flatten(0, 1)
