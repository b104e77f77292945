"""The residual sum and the RMS norm behind it: one pass over memory, one program a row."""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 4096
"""Values of a row from which on a program has eight warps."""


@triton.jit
def add_norm_kernel(hidden, x, weight, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """hidden [rows, width] fp32 += x (ADD), then its norm times weight -> out. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(hidden + row * width + at, mask=inside, other=0.0)
    if ADD:
        values += tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * width + at, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = values * scale * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, normed.to(out.dtype.element_ty), mask=inside)


def add_norm(hidden: Tensor, x: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `forebay.kernels.norm.add_norm`; `hidden` and `weight` in fp32, all contiguous. Mutates `hidden`."""
    assert hidden.dtype == weight.dtype == torch.float32, (hidden.dtype, weight.dtype)
    assert hidden.is_contiguous() and (x is None or x.is_contiguous())
    out = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    rows, width = hidden.shape
    if rows:
        add_norm_kernel[(rows,)](
            hidden, x, weight, out, width, eps, ADD=x is not None, BLOCK=triton.next_power_of_2(width),
            num_warps=8 if width >= WIDE else 4,
        )  # fmt: skip
    return out
