"""Batches over a pool of shuffled blocks, for tests of what chooses positions and reads chosen ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forebay.kernels.batch import BLOCK_TOKENS, Batch, pack_batch

LAYERS = 3


@dataclass(frozen=True)
class Case:
    """`pool` is of one row a token, full of noise, no number anywhere behind a sequence's end."""

    batch: Batch
    pool: torch.Tensor

    def rows(self, layer: int, sequence: int) -> torch.Tensor:
        """A sequence's rows [n, width] in the order of its positions."""
        span, table = self.batch.spans[sequence], self.batch.groups["g"].block_tables[sequence]
        blocks = table[: -(-span.total_len // BLOCK_TOKENS)]
        return self.pool[blocks, layer, 0, 0].flatten(0, 1)[: span.total_len]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_case(
    sequences: Sequence[tuple[int, int]], width: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    """`sequences` are (new tokens, context)."""
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-(new + context) // BLOCK_TOKENS) for new, context in sequences]
    free = torch.randperm(sum(needed) + 3, generator=rng).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    batch = pack_batch([([0] * new, context) for new, context in sequences], {"g": tables})
    pool = noise(sum(needed) + 3, LAYERS, 1, 1, BLOCK_TOKENS, width, seed=seed, dtype=dtype)
    for blocks, (new, context) in zip(tables, sequences, strict=True):
        last = (new + context - 1) % BLOCK_TOKENS + 1
        pool[blocks[-1], :, :, :, last:] = torch.nan
    for block in free:
        pool[block] = torch.nan
    return Case(batch, pool)
