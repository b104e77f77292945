"""Rotary positions: frequencies, the ways to stretch them over a longer context, and the rotation itself.

Angles are computed in fp32 (fp64 where the model runs in it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.kernels.rotary import Turn
from forebay.models.base import RopeValue


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the slow frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: slow frequencies are divided by `factor`, fast ones kept, with a ramp between them.

    The ramp lies between the dimensions that turn `beta_fast` and `beta_slow` times in the original context, rounded
    outwards if `truncate`. `magnitude` multiplies the rotated vectors.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK scaling that grows with the length: a position past the original context is rotated by the base that fits
    a context which ends there.

    That is what decoding token by token gives in any case. So a position's bytes don't depend on how much comes
    after it, and can be cached.
    """

    factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Rope:
    """One set of rotary frequencies over the first `dim` values of a head. At most one way to stretch them is set.

    `linear` divides all of them, `factors` each by its own.
    """

    theta: float
    dim: int
    linear: float = 1.0
    llama3: Llama3Scaling | None = None
    factors: tuple[float, ...] = ()
    yarn: YarnScaling | None = None
    dynamic: DynamicScaling | None = None

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[dim / 2], in radians a token; within the original context, where they change with the length."""
        frequencies = 1.0 / (self.theta ** self._steps(dtype))
        if self.llama3 is not None:
            frequencies = _stretch(frequencies, self.llama3)
        if self.yarn is not None:
            frequencies = _interpolate(frequencies, self.yarn, self.theta)
        if self.factors:
            frequencies = frequencies / torch.tensor(self.factors, dtype=dtype)
        return (frequencies / self.linear).to(device)

    def reach(self, max_positions: int) -> int:
        """The context that a configuration with `max_positions` means."""
        if self.dynamic is not None:
            return int(self.dynamic.original_context * self.dynamic.factor)
        if self.yarn is not None:
            return max(max_positions, int(self.yarn.original_context * self.yarn.factor))
        return max_positions

    def describe(self, name: str) -> dict[str, RopeValue]:
        """Everything that changes the rotated keys, as plain values under `name`."""
        found: dict[str, RopeValue] = {f"{name}.theta": self.theta, f"{name}.dim": self.dim}
        if self.linear != 1.0:
            found[f"{name}.linear"] = self.linear
        for key in ("llama3", "factors", "yarn", "dynamic"):
            value = getattr(self, key)
            if value:
                found[f"{name}.{key}"] = repr(value)
        return found

    def angles(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos [T, 1, dim] and sin [T, 1, dim / 2] of the batch's positions, once a batch."""
        return batch.once(("rope", self, dtype), lambda: self._angles(batch.positions, dtype))

    def turn(self, batch: Batch, *, pairs: bool = False) -> Turn:
        """The same in fp32 as the kernels take it, once a batch; `pairs`: neighbours are rotated."""

        def make() -> Turn:
            cos, sin = self.angles(batch, torch.float32)
            return Turn(cos[:, 0, : self.dim // 2].contiguous(), sin[:, 0].contiguous(), pairs)

        return batch.once(("turn", self, pairs), make)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.dynamic is not None:
            angles = positions.to(dtype)[:, None] * self._growing(positions, dtype, self.dynamic)
        else:
            angles = torch.outer(positions.to(dtype), self.frequencies(dtype, positions.device))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        if self.yarn is not None and self.yarn.magnitude != 1.0:
            cos, sin = cos * self.yarn.magnitude, sin * self.yarn.magnitude
        return torch.cat((cos, cos), dim=-1), sin

    def _growing(self, positions: Tensor, dtype: torch.dtype, scaling: DynamicScaling) -> Tensor:
        """Frequencies [T, dim / 2] for each position, as if the context ended with it."""
        lengths = (positions + 1).clamp_min(scaling.original_context).to(dtype)
        growth = lengths * scaling.factor / scaling.original_context - (scaling.factor - 1)
        bases = self.theta * growth ** (self.dim / (self.dim - 2))
        return 1.0 / bases[:, None] ** self._steps(dtype).to(positions.device)

    def _steps(self, dtype: torch.dtype) -> Tensor:
        return torch.arange(0, self.dim, 2, dtype=torch.int64).to(dtype) / self.dim


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _interpolate(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    dim = 2 * len(frequencies)
    low = _turning_dim(scaling.beta_fast, dim, theta, scaling.original_context)
    high = _turning_dim(scaling.beta_slow, dim, theta, scaling.original_context)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slow = ((torch.arange(dim // 2, dtype=frequencies.dtype) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * slow + frequencies * (1 - slow)


def _turning_dim(turns: float, dim: int, theta: float, context: int) -> float:
    """The dimension, not whole, that turns so many times in the context."""
    return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_magnitude(factor: float, strength: float = 1.0) -> float:
    """By how much YaRN makes attention sharper when it stretches by `factor`."""
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + dim / 2) of the first dim values of x [T, heads, head_dim], a new tensor of the same
    dtype. `cos` [T, 1, dim] and `sin` [T, 1, dim / 2]."""
    dim = cos.shape[-1]
    turning = x[..., :dim]
    out = turning * cos
    (left, right), (out_left, out_right) = turning.chunk(2, dim=-1), out.chunk(2, dim=-1)
    out_left.addcmul_(right, sin, value=-1)
    out_right.addcmul_(left, sin)
    return out if dim == x.shape[-1] else torch.cat((out, x[..., dim:]), dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Like `rotate`, but of the neighbouring pairs (2i, 2i + 1), and of all of x [T, heads, dim]."""
    half = cos[..., : sin.shape[-1]]
    left, right = x[..., 0::2], x[..., 1::2]
    return torch.stack((left * half - right * sin, right * half + left * sin), dim=-1).flatten(-2)
