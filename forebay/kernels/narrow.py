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

PIECE = 2**17
"""Pairs of values that are widened at a time: what they pass through stays in the cache."""

TWICE = {torch.bfloat16: torch.int32, torch.float32: torch.int64, torch.float64: torch.complex128}
"""What is as long as two."""


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
    """`source[rows]` for `source` [n, width] and `rows` int64 [m], in `dtype`: valid until this thread gathers
    again."""
    if not is_narrow(source.dtype):
        plain = gather_rows(source, rows)
        return plain if plain.dtype == dtype else room(plain.numel(), dtype).view(plain.shape).copy_(plain)
    found = gather_rows(source.view(torch.uint8), rows)
    if source.device.type != "cpu":
        return found.view(source.dtype).to(dtype)
    # By a table of all pairs: torch's own conversion takes seven times as long.
    table, codes, out = _pairs(source.dtype, dtype), found.flatten().view(torch.int16), room(found.numel(), dtype)
    both, index = out.view(table.dtype), room(min(PIECE, len(codes)), torch.int32)
    for first in range(0, len(codes), PIECE):
        part = codes[first : first + PIECE]
        at = index[: len(part)].copy_(part).bitwise_and_(0xFFFF)
        torch.index_select(table, 0, at, out=both[first : first + len(part)])
    return out.view(found.shape)


@cache
def _pairs(narrow_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """[65536]: what any two codes are, side by side in `dtype`, as one element."""
    with torch.inference_mode(False):
        codes = torch.arange(2**16).to(torch.int16).view(narrow_dtype)
        return codes.to(dtype).view(TWICE[dtype])
