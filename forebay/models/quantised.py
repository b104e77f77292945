"""How the weights of safetensors are quantised.

FP8's scales stand beside the values (`..._scale_inv`). Values are computed in fp32 and then rounded to the model's
dtype: what is run is the published numbers, without another rounding of activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.kernels.formats import MX_GROUP, scale_shape, unpack_mxfp4, unscale_fp8
from forebay.models.config import Config

__all__ = ["MX_GROUP", "Quantisation", "read_quantisation", "scale_shape", "unpack_mxfp4", "unscale_fp8"]


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
