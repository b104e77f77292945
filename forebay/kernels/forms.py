"""The engine's operations by our Triton kernels: from batches to what kernels take, with shipped sizes of launches."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.kernels.gpu import library
from forebay.kernels.gpu.attend import Tiling, attend
from forebay.kernels.gpu.latent import attend_latents
from forebay.kernels.gpu.move import move
from forebay.kernels.moving import Pattern
from forebay.kernels.paged import Scores
from forebay.kernels.ragged import of_batch
from forebay.kernels.tuning.tables import sizes_for


def paged_attention(q: Tensor, pool: Tensor, layer: int, batch: Batch, group: str, scores: Scores) -> Tensor:
    """See `forebay.kernels.attention.paged_attention`."""
    where = of_batch(batch, group)
    kind = "attend.decode" if where.longest == 1 else "attend.prefill"
    return attend(q, pool, layer, where, scores, _tiling(q, batch, kind)).out


def latent_attention(q: Tensor, pool: Tensor, layer: int, batch: Batch, group: str, scale: float, rank: int) -> Tensor:
    """See `forebay.kernels.mla.latent_attention`."""
    where, tiling = of_batch(batch, group), _tiling(q, batch, "latent.decode")
    return attend_latents(q.contiguous(), pool, layer, where, Scores(scale), rank=rank, tiling=tiling).out


def _tiling(q: Tensor, batch: Batch, kind: str) -> Tiling:
    def find() -> Tiling:
        longest = max((span.total_len for span in batch.spans), default=0)
        return sizes_for(library.architecture(q.device), kind, Tiling, dim=q.shape[2], context=longest)

    return batch.once(("tiling", kind, q.shape[2]), find)


def move_granules(pool: Tensor, blocks: Tensor, granules: Tensor, *, store: bool) -> None:
    """Whole granules between `blocks` [n] of a contiguous pool and host memory uint8 [n, granule_bytes]. Blocks."""
    buffers = pool.view(-1).view(torch.uint8)
    length = granules.shape[1]
    pattern = Pattern(length, (), (), (), torch.arange(len(blocks)) * length, blocks * length)
    move(pattern, granules.view(-1), buffers, store=store)
    if buffers.device.type == "cuda":
        torch.cuda.current_stream(buffers.device).synchronize()
