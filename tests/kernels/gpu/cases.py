"""Batches over pools of noise, for the attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forebay.kernels.ragged import Ragged, ragged


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    pool: torch.Tensor
    where: Ragged


def make_case(
    sequences: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    layers: int = 2,
    planes: int = 2,
    window: int | None = None,
    lengths: Sequence[int] | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """`sequences` are (rows, tokens before them). Blocks are permuted; those that have left the window are gone."""
    rng = torch.Generator().manual_seed(seed)
    lengths = [rows + context for rows, context in sequences] if lengths is None else lengths
    needed = [-(-length // 16) for length in lengths]
    free = torch.randperm(sum(needed) + 3, generator=rng)
    tables = torch.full((len(sequences), max([*needed, 1])), -1, dtype=torch.int64)
    at = 0
    for index, ((_, context), count) in enumerate(zip(sequences, needed, strict=True)):
        tables[index, :count] = free[at : at + count]
        at += count
        if window is not None:
            tables[index, : max(0, context - window + 1) // 16] = -1
    rows = sum(rows for rows, _ in sequences)
    pool = torch.randn(sum(needed) + 3, layers, planes, kv_heads, 16, dim, generator=rng).to(dtype)
    q = torch.randn(rows, heads, dim, generator=rng).to(dtype)
    counts, contexts = zip(*sequences, strict=True)
    where = ragged(counts, contexts, lengths, tables, causal=causal)
    return Case(q, pool, where)
