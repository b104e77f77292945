"""KV in FP8 (e4m3): numbers are stored divided by a scale and cut to the largest there is, and widened when read.

    stored = round_to_fp8(clamp(x / scale))          x is about stored * scale

Scales aren't multiplied into what is read: they go into the query and into the result, which is less and the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from forebay.kernels.formats import FNUZ_MAX, FP8_MAX
from forebay.kernels.scratch import gather_rows, room

LARGEST = {torch.float8_e4m3fn: FP8_MAX, torch.float8_e4m3fnuz: FNUZ_MAX}
"""Of each FP8 that KV may be in."""

PIECE = 2**18
"""Values that are widened at a time: what they pass through stays in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class KvScales:
    """What stored values are multiplied by, fp32 [kv_heads] each. Of latents both are one and the same, [1]."""

    k: Tensor
    v: Tensor

    @property
    def both(self) -> Tensor:
        """[2 * kv_heads, 1]: of K heads, then of V heads."""
        return torch.cat((self.k, self.v))[:, None]


def is_narrow(dtype: torch.dtype) -> bool:
    """Is it an FP8 that KV may be in?"""
    return dtype in LARGEST


def narrow(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x` / `scale` in FP8. Without a scale it is 1."""
    most, exact = LARGEST[dtype], x.to(torch.float32)
    return (exact if scale is None else exact / scale).clamp(-most, most).to(dtype)


def widen_rows(source: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`source[rows]` for `source` [n, width] and `rows` int64 [m], in `dtype` if it is in FP8: valid until this thread
    gathers again."""
    if not is_narrow(source.dtype):
        return gather_rows(source, rows)
    found = gather_rows(source.view(torch.uint8), rows)
    if source.device.type != "cpu":
        return found.view(source.dtype).to(dtype)
    # By a table: torch's own conversion takes four times as long.
    table, codes, out = _table(source.dtype, dtype), found.flatten(), room(found.numel(), dtype)
    index = room(min(PIECE, len(codes)), torch.int32)
    for first in range(0, len(codes), PIECE):
        part = codes[first : first + PIECE]
        at = index[: len(part)].copy_(part)
        torch.index_select(table, 0, at, out=out[first : first + len(part)])
    return out[: len(codes)].view(found.shape)


@cache
def _table(narrow_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8).view(narrow_dtype).to(dtype)
