"""Formats of weights and activations with scales, as plain torch: back to plain numbers, and there.

FP8, block-scaled: e4m3 values, and one fp32 scale for every block of, usually, 128 x 128; blocks at the edges are cut.
MXFP4: 32 values of 4 bits (e2m1) share one scale, a power of two. Older AMD devices have another FP8 (e4m3fnuz): the
same bits stand for half the number, and what is -0 elsewhere is no number there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.gpu import library

MX_GROUP = 32
"""Values that share a scale in MXFP4."""

FP8_GROUP = 128
"""Values of a row of activations that share a scale."""

FP8_MAX = 448.0

FNUZ_MAX = 240.0
"""The largest number of the older AMD FP8."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_BIAS = 127
_MX_NAN = 255
_E4M3_EXPONENT = 8
_MINUS_ZERO = 0x80


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Of the scales of a matrix of this shape."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def unscale_fp8(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """`values` [n, k] in fp8 times the scale of their block, in fp32. `scales` has `scale_shape`."""
    rows = scales.float().repeat_interleave(block[0], dim=0)[: values.shape[0]]
    return values.float() * rows.repeat_interleave(block[1], dim=1)[:, : values.shape[1]]


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., g * 32] from `blocks` uint8 [..., g, 16], the even values in the low halves, and `scales` uint8
    [..., g], exponents of two plus 127 (255 is no number)."""
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.float32)
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)
    exponents = scales.to(torch.int32) - _MX_BIAS
    values = torch.ldexp(table[pairs.int()].flatten(-2), exponents[..., None])
    values.masked_fill_((scales == _MX_NAN)[..., None], torch.nan)
    return values.flatten(-2)


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """`values` [T, k] in FP8 and the scales that they are to be multiplied by: fp32 [T, ceil(k / 128)], or of MX uint8
    [T, k / 32]."""

    values: Tensor
    scales: Tensor


def quantise_rows(x: Tensor) -> Scaled:
    """`x` [T, k] as FP8 (e4m3) with a scale for every 128 values of a row; rows of zeros have a scale of 1."""
    width = -(-x.shape[1] // FP8_GROUP) * FP8_GROUP
    groups = torch.nn.functional.pad(x.float(), (0, width - x.shape[1])).unflatten(1, (-1, FP8_GROUP))
    highest = groups.abs().amax(dim=-1)
    scales = torch.where(highest > 0, highest / FP8_MAX, 1.0)
    values = (groups / scales[..., None]).flatten(1)[:, : x.shape[1]]
    return Scaled(values.to(torch.float8_e4m3fn), scales)


def quantise_mx(x: Tensor) -> Scaled:
    """`x` [T, k], k a multiple of 32, as FP8 (e4m3) with a scale for every 32 values of a row: a power of two, as uint8
    [T, k / 32] exponents plus 127. Values that the scale leaves too large become the largest."""
    groups = x.float().unflatten(1, (-1, MX_GROUP))
    highest = groups.abs().amax(dim=-1).clamp_min(2.0**-120)
    exponents = highest.log2().floor() - _E4M3_EXPONENT
    values = torch.ldexp(groups, -exponents[..., None].to(torch.int32)).clamp(-FP8_MAX, FP8_MAX).flatten(1)
    return Scaled(values.to(torch.float8_e4m3fn), (exponents + _MX_BIAS).clamp(0, _MX_NAN - 1).to(torch.uint8))


def unscale_mx(scaled: Scaled) -> Tensor:
    """The fp32 [T, k] that `quantise_mx` has made of its argument."""
    powers = torch.ldexp(torch.ones(scaled.scales.shape), scaled.scales.to(torch.int32) - _MX_BIAS)
    return scaled.values.float() * powers.repeat_interleave(MX_GROUP, dim=1)


def as_fnuz(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 weights (e4m3fn) and their scales for devices whose FP8 is e4m3fnuz: the same products, bit for bit."""
    bits = values.view(torch.uint8)
    bits = torch.where(bits == _MINUS_ZERO, 0, bits)
    return bits.view(torch.float8_e4m3fnuz), scales * 2


def own_fp8(device: torch.device) -> torch.dtype:
    """The FP8 (e4m3) that a device computes with: e4m3fnuz on AMD's gfx94x, e4m3fn elsewhere."""
    older = library.architecture(device).startswith("gfx94")
    return torch.float8_e4m3fnuz if older else torch.float8_e4m3fn
