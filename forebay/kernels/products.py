"""Products in bf16 on CPUs that don't multiply in it.

Without AVX512 or AMX (AMD EPYC up to Zen 3, many desktops) torch multiplies bf16 by a loop of its own, at a seventh to
a tenth of what the same CPU does in fp32. From a few rows on it is cheaper to widen a block of the weight, multiply
that, and go on to the next: nothing is kept twice. A row or two is bound by reading the weight, which torch's loop does
as fast as can be. Attention widens what it gathers.

Measured on two cores of a Zen 3, 2048 x 640: 4 rows 0.66 ms either way, 16 rows 2.6 and 1.1 ms, 512 rows 74 and 8.6 ms.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_MIN = 6
"""Rows of x from which widening pays."""
BLOCK = 2048
"""Rows of the weight that are widened at a time."""


@cache
def multiplies_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_dtype(x: Tensor) -> torch.dtype:
    """What to multiply in, for an `x` that isn't multiplied with weights: its own dtype, or fp32 where that isn't one
    that this CPU multiplies in."""
    return torch.float32 if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_bf16() else x.dtype


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias [out], all of one dtype: a new tensor [T, out] in it."""
    if x.shape[0] < ROWS_MIN or product_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)
    wide = x.float()
    out = x.new_empty(x.shape[0], weight.shape[0])
    for begin in range(0, weight.shape[0], BLOCK):
        part = slice(begin, begin + BLOCK)
        out[:, part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out
