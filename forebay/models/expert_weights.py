"""Reads the weights of a layer's experts, those that are this rank's, and lays them out for whatever computes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels.dispatch import dispatch
from forebay.kernels.experts import Activation, Stack
from forebay.kernels.formats import FP8_GROUP, as_fnuz, own_fp8
from forebay.models.experts import Experts, ExpertShare, PackedExperts, StackedExperts, expert_share
from forebay.models.layers import Linear
from forebay.models.standard import dense_mlp
from forebay.models.weights import Weights

Pair = tuple[Tensor, Tensor]
"""Of an expert, or of all of them: what is of its first projection and of its second."""

log = logging.getLogger(__name__)

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class GatedExperts:
    """Where a layer's experts are, as most families name them: `at`.0.gate_proj and so on; and perhaps an MLP that
    every token goes to, as wide as `shared` of them, at `shared_at`."""

    at: str
    count: int
    hidden: int
    ffn: int
    names: tuple[str, str, str] = GATE_UP_DOWN
    shared_at: str = ""
    shared: int = 0
    shared_bias: bool = False

    def read(self, weights: Weights) -> tuple[Experts, Callable[[Tensor], Tensor] | None]:
        """This rank's experts; and the shared MLP, unless it is some of them."""
        mine, act = expert_share(self.count, self.ffn, weights.ranks), Activation()
        fp8 = self._fp8(weights, mine)
        if fp8 is not None:
            return StackedExperts(*fp8, act), self._shared_mlp(weights)
        pairs = (self._pair(weights, f"{self.at}.{index}", mine.columns) for index in mine.ids)
        if not stacks(weights):
            return PackedExperts([(Linear(up), Linear(down)) for up, down in pairs], act), self._shared_mlp(weights)
        if self.shared_bias or weights.ranks.experts != "inside":
            return StackedExperts(*stacked(pairs), act), self._shared_mlp(weights)
        slots = [self._slot(weights, index, mine.columns) for index in range(self.shared)]
        return StackedExperts(*stacked([*pairs, *slots]), act, self.shared), None

    def _pair(self, weights: Weights, at: str, columns: range) -> Pair:
        gate, up, down = (f"{at}.{name}.weight" for name in self.names)
        sides = [weights.take(name, self.ffn, self.hidden, cut={0: columns}) for name in (gate, up)]
        return torch.cat(sides), weights.take(down, self.hidden, self.ffn, cut={1: columns})

    def _slot(self, weights: Weights, index: int, columns: range) -> Pair:
        """A part of the shared MLP, as wide as an expert."""
        wide, first = self.shared * self.ffn, index * self.ffn
        part = range(first + columns.start, first + columns.stop)
        gate, up, down = (f"{self.shared_at}.{name}.weight" for name in GATE_UP_DOWN)
        sides = [weights.take(name, wide, self.hidden, cut={0: part}) for name in (gate, up)]
        return torch.cat(sides), weights.take(down, self.hidden, wide, cut={1: part})

    def _shared_mlp(self, weights: Weights) -> Callable[[Tensor], Tensor] | None:
        """A part of it on each rank; whole on each where ranks deal out experts: it is computed where a token is."""
        if not self.shared:
            return None
        whole, wide = weights.ranks.experts != "inside", self.shared * self.ffn
        return dense_mlp(
            weights, self.shared_at, self.hidden, wide, bias=self.shared_bias, partial=True, whole=whole
        )

    def _fp8(self, weights: Weights, mine: ExpertShare) -> tuple[Stack, Stack] | None:
        """Experts as they are stored in FP8, if kernels take them. A part of the columns is widened to whole blocks of
        scales, by zeros: they give nothing."""
        block = weights.quantisation.block
        if weights.quantisation.method != "fp8" or not mine.columns or not stacks(weights, own_fp8(weights.device)):
            return None
        if block != (FP8_GROUP, FP8_GROUP):
            log.warning(
                "%s in FP8 with scales for %d x %d are unpacked to %s: kernels take %d x %d", self.at, *block,
                weights.dtype, FP8_GROUP, FP8_GROUP,
            )  # fmt: skip
            return None
        ups, downs = [], []
        for index in mine.ids:
            gate, up, down = (f"{self.at}.{index}.{name}.weight" for name in self.names)
            sides = [_fp8_part(weights, name, (self.ffn, self.hidden), 0, mine.columns) for name in (gate, up)]
            ups.append(tuple(torch.cat(parts) for parts in zip(*sides, strict=True)))
            downs.append(_fp8_part(weights, down, (self.hidden, self.ffn), 1, mine.columns))
        return _fp8_stack(ups, weights.device), _fp8_stack(downs, weights.device)


def _fp8_part(weights: Weights, name: str, shape: tuple[int, int], axis: int, part: range) -> Pair:
    """Values and scales of the blocks that have any of `part`; what isn't of it is zero."""
    wide = widened(part, FP8_GROUP)
    there = range(wide.start, min(wide.stop, shape[axis]))
    values, scales = weights.take_fp8(name, *shape, cut={axis: there})
    missing = [0, 0, 0, len(wide) - len(there)] if axis == 0 else [0, len(wide) - len(there)]
    bits = F.pad(values.view(torch.uint8), missing)
    clear(bits, axis, part, wide)
    return bits.view(values.dtype), scales


def widened(part: range, step: int) -> range:
    """`part` from the beginning of a block of `step` to the end of one."""
    return range(part.start // step * step, -(-part.stop // step) * step)


def clear(x: Tensor, axis: int, part: range, wide: range, value: int = 0) -> None:
    """Write `value` to what is of `wide`, which is the axis of `x`, and not of `part`."""
    x.narrow(axis, 0, part.start - wide.start).fill_(value)
    x.narrow(axis, part.stop - wide.start, wide.stop - part.stop).fill_(value)


def _fp8_stack(parts: Iterable[tuple[Tensor, ...]], device: torch.device) -> Stack:
    values, scales = (torch.stack(side) for side in zip(*parts, strict=True))
    if own_fp8(device) == torch.float8_e4m3fnuz:
        values, scales = as_fnuz(values, scales)
    return Stack(values.contiguous(), "fp8", scales.contiguous())


def stacked(pairs: Iterable[Pair], biases: Pair | tuple[None, None] = (None, None)) -> tuple[Stack, Stack]:
    """Both projections of all experts."""
    ups, downs = (torch.stack(side).contiguous() for side in zip(*pairs, strict=True))
    return Stack(ups, bias=biases[0]), Stack(downs, bias=biases[1])


def stacks(weights: Weights, stored: torch.dtype | None = None) -> bool:
    """Are experts stacked here? In `stored`, if that isn't the model's dtype: then only for the kernels."""
    form = dispatch().foresee("experts", weights.dtype, stored or weights.dtype, weights.device)
    return form == "triton" or (stored is None and weights.device.type != "cpu")


@dataclass(frozen=True, slots=True)
class StackedProjection:
    """One projection of every expert, from `into` to `out` features, as gpt-oss stores it: all in one tensor."""

    weights: Weights
    name: str
    experts: int
    out: int
    into: int

    @property
    def packed(self) -> bool:
        """Is it stored in MXFP4?"""
        return f"{self.name}_blocks" in self.weights

    def matrices(self, ids: range, rows: range, columns: range) -> Iterator[Tensor]:
        """[out, into] of these experts, or these parts of them. Unquantised weights are stored with the last two axes
        the other way round."""
        if self.packed:
            parts = {0: ids, 1: rows, 2: columns}
            found = self.weights.take_mxfp4(self.name, self.experts, self.out, self.into, cut=parts)
        else:
            turned = {0: ids, 2: rows, 1: columns}
            found = self.weights.take(self.name, self.experts, self.into, self.out, cut=turned).transpose(1, 2)
        # Copies, so that no expert's share keeps the whole stack.
        return (matrix.contiguous() for matrix in found)

    def codes(self, ids: range, rows: range, columns: range) -> tuple[Tensor, Tensor]:
        """Codes and scales of these experts, or of these parts of them, as they are stored in MXFP4. The columns are
        whole groups."""
        parts = {0: ids, 1: rows, 2: columns}
        return self.weights.take_codes(self.name, self.experts, self.out, self.into, cut=parts)

    def bias(self, ids: range, rows: range) -> Tensor:
        """[experts, out] of these experts and rows."""
        return self.weights.take(f"{self.name}_bias", self.experts, self.out, cut={0: ids, 1: rows})
