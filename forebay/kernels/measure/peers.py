"""FlashInfer and FlashAttention on the same work, where they are installed: what `bench` puts beside our attention.

FlashInfer reads our pool as it lies, page by page; FlashAttention gets the same keys and values side by side, since its
pages are of 256 tokens. Both are found by import: neither is a dependency.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.measure.timing import Timer
from forebay.kernels.ragged import Ragged

WORKSPACE_BYTES = 256 * 2**20
WITHIN = 2e-2
"""How far two kernels' results in bf16 may be apart."""

Run = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Attention of `q` [rows, heads, dim] over the first layer of `pool`, as many rows of each sequence: a decode, or
    the prefill of one sequence. Scores are scaled by dim ** -0.5. `ours` computes it."""

    q: Tensor
    pool: Tensor
    where: Ragged
    ours: Run

    @property
    def decoding(self) -> bool:
        """One row a sequence?"""
        return self.where.longest == 1


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Which pages are whose, on the device: of sequence i `indices` from `starts[i]` to `starts[i + 1]`; its last page
    has `last[i]` tokens."""

    starts: Tensor
    indices: Tensor
    last: Tensor


def pages_of(where: Ragged) -> Pages:
    """Of sequences none of which is empty or has holes."""
    counts = -(-where.lengths // BLOCK_TOKENS)
    indices = torch.cat([table[:count] for table, count in zip(where.tables, counts.tolist(), strict=True)])
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    last = where.lengths - (counts - 1) * BLOCK_TOKENS
    return Pages(starts.int(), indices.int(), last.int())


def side_by_side(paged: Paged) -> tuple[Tensor, Tensor]:
    """Keys and values [sequences, positions, kv_heads, dim], in order; all sequences of one length."""
    length = int(paged.where.lengths[0])
    assert bool((paged.where.lengths == length).all())
    rows = paged.pool[paged.where.tables[:, : -(-length // BLOCK_TOKENS)], 0]  # [S, pages, 2, kv_heads, 16, dim]
    keys, values = (rows[:, :, side].transpose(2, 3).flatten(1, 2)[:, :length].contiguous() for side in range(2))
    return keys, values


def flashinfer(module: Any, paged: Paged) -> Run:
    """FlashInfer's decode over pages, or its prefill."""
    q, where = paged.q, paged.where
    (_, heads, dim), kv_heads = q.shape, paged.pool.shape[3]
    if not paged.decoding:
        keys, values = side_by_side(paged)
        return lambda: module.single_prefill_with_kv_cache(q, keys[0], values[0], causal=True)
    pages, pool = pages_of(where), paged.pool[:, 0]
    room = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(room, "HND", use_tensor_cores=heads // kv_heads >= 4)
    wrapper.plan(
        pages.starts, pages.indices, pages.last, heads, kv_heads, dim, BLOCK_TOKENS,
        q_data_type=q.dtype, kv_data_type=pool.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q, pool)


def flash_attention(module: Any, paged: Paged) -> Run:
    """FlashAttention over the same keys and values side by side."""
    keys, values = side_by_side(paged)
    if not paged.decoding:
        return lambda: module.flash_attn_func(paged.q[None], keys, values, causal=True)[0]
    lengths = paged.where.lengths.int()
    return lambda: module.flash_attn_with_kvcache(
        paged.q[:, None], keys, values, cache_seqlens=lengths, causal=True
    )[:, 0]


PEERS: dict[str, tuple[str, Callable[[Any, Paged], Run]]] = {
    "FlashInfer": ("flashinfer", flashinfer),
    "FlashAttention": ("flash_attn", flash_attention),
}


def beside(paged: Paged, timer: Timer) -> Iterator[tuple[str, float | None, str]]:
    """For every peer its name, its seconds, and, where there are none, why. What it gives must be what ours gives."""
    wanted = paged.ours().float()
    for name, (module, make) in PEERS.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            yield name, None, "not installed"
            continue
        try:
            run = make(found, paged)
            off = float((run().float() - wanted).abs().max())
        except Exception as error:  # another package's: whatever it is, it is told
            yield name, None, f"{type(error).__name__}: {error}"
            continue
        yield name, timer(run) if off <= WITHIN else None, f"off by {off:.3g}"
