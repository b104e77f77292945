"""The merge of attention over parts of the keys: the last step of split decodes, and of ranks that share out tokens."""
# ruff: noqa: ANN001, ANN201  (what a kernel takes is told by its first line; Triton gives annotations another meaning)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.lse import Lse, Partial

LN2 = tl.constexpr(0.6931471805599453)
BLOCK_D = 64


@triton.jit
def merge_kernel(
    outs, lses, out, lse, rows, dim, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, BLOCK_D: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """outs [PARTS, rows, dim], lses [PARTS, rows] to base 2 -> out [rows, dim], lse [rows]. One program a row and
    BLOCK_D dims. NATURAL: the result's LSE is to base e."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    found = tl.load(lses + part.to(tl.int64) * rows + row, mask=part < PARTS, other=float("-inf"))
    # A row that nobody has written may hold anything: no number, too, isn't below infinity.
    found = tl.where(found < float("inf"), found, float("-inf"))
    highest = tl.max(found, 0)
    weights = tl.exp2(found - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    at = (part.to(tl.int64)[:, None] * rows + row) * dim + d[None, :]
    values = tl.load(outs + at, mask=(weights[:, None] > 0) & (d[None, :] < dim), other=0.0).to(tl.float32)
    mixed = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * dim + d, mixed.to(out.dtype.element_ty), mask=d < dim)
    whole = highest + tl.log2(total)
    whole = tl.where(total == 0.0, float("-inf"), whole)
    if NATURAL:
        whole = whole * LN2
    tl.store(lse + row, whole)


def merge(outs: Tensor, lses: Lse, dtype: torch.dtype) -> Partial:
    """`outs` [parts, ..., dim] and their LSEs [parts, ...] as one, `out` in `dtype`, the LSE to base e."""
    parts, dim = outs.shape[0], outs.shape[-1]
    values = lses.to("2").values.contiguous()
    out = torch.empty(outs.shape[1:], dtype=dtype, device=outs.device)
    lse = torch.empty(outs.shape[1:-1], dtype=torch.float32, device=outs.device)
    if lse.numel():
        grid = (lse.numel(), triton.cdiv(dim, BLOCK_D))
        padded = triton.next_power_of_2(parts)
        merge_kernel[grid](
            outs.contiguous(), values, out, lse, lse.numel(), dim,
            PARTS=parts, PARTS_PAD=padded, BLOCK_D=BLOCK_D, NATURAL=True,
        )  # fmt: skip
    return Partial(out, Lse(lse, "e"))
