"""The residual sum and the RMS norm behind it, as plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(hidden: Tensor, x: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """hidden += x, in place, and then hidden / rms(hidden) * weight in `dtype`.

    `hidden` [T, n] is in the accumulation dtype (fp32 or fp64), `x` [T, n] in any; without it only the norm. `weight`
    [n] is in the dtype of `hidden`.
    """
    if x is not None:
        hidden.add_(x)
    scale = (hidden.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (hidden * scale * weight).to(dtype)
