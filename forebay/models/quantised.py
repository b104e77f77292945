"""Quantised weights of safetensors, back to plain numbers.

FP8, block-scaled: e4m3 values, and beside them (`..._scale_inv`) one fp32 scale for every block of, usually, 128 x 128;
blocks at the edges are cut. MXFP4: 32 values of 4 bits (e2m1) share one scale, a power of two. They are computed in
fp32 and then rounded to the model's dtype: what is run is the published numbers, without another rounding of
activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forebay.models.config import Config

MX_GROUP = 32
"""Values that share a scale in MXFP4."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MX_BIAS = 127
_MX_NAN = 255


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a checkpoint's weights are stored. `block` counts rows and columns that share a scale in FP8."""

    method: Literal["none", "fp8", "mxfp4"] = "none"
    block: tuple[int, int] = (128, 128)


def read_quantisation(config: Config) -> Quantisation:
    """From `quantization_config`. Raises UnsupportedArchitecture for what isn't read here."""
    section = config.section("quantization_config")
    if "quant_method" not in section:
        return Quantisation()
    method = section.text("quant_method")
    if method == "mxfp4":
        return Quantisation("mxfp4")
    if method != "fp8" or section.text("fmt", "e4m3") != "e4m3":
        raise config.unsupported(
            f"weights that are quantised by {method!r} are not supported: use those in FP8 (e4m3, block-scaled), in "
            "MXFP4, or unquantised ones"
        )
    block = section.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise config.unsupported(
            f"FP8 weights with scales for {block!r} are not supported, only for blocks of two sizes"
        )
    return Quantisation("fp8", (block[0], block[1]))


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
