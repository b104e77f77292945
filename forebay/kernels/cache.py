"""Moving KV: from a layer's output into the paged pool, and whole granules between pool and canonical bytes.

A pool is [num_blocks, layers, 2, kv_heads, 16, head_dim], contiguous. Seen as rows of one head's vector it is
[num_blocks * layers * 2 * kv_heads * 16, head_dim]; seen as granules, [num_blocks, granule_bytes] of uint8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.dispatch import dispatch
from forebay.kernels.narrow import KvScales, is_narrow, narrow


def slot_rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Vector rows [T, 2 * kv_heads] of layer 0 for `slots` [T]: K of every head, then V of every head.

    Layer l's rows are these plus l * 2 * kv_heads * 16. Shared by all layers of a group.
    """
    _, layers, _, kv_heads, _, _ = pool.shape
    vectors = 2 * kv_heads
    block_rows = layers * vectors * BLOCK_TOKENS
    block = slots // BLOCK_TOKENS
    first = block * block_rows + (slots - block * BLOCK_TOKENS)
    heads = torch.arange(vectors, device=pool.device) * BLOCK_TOKENS
    return first[:, None] + heads


def write_rows(
    pool: Tensor, layer_in_group: int, rows: Tensor, kv: Tensor, scales: KvScales | None = None
) -> None:
    """Store `kv` [T, 2 * kv_heads, head_dim] (all K heads, then all V heads) at `slot_rows`; divided by `scales`, where
    the pool is in FP8. Mutates `pool`."""
    vectors = rows.shape[1]
    flat = pool.view(-1, pool.shape[-1])
    if is_narrow(pool.dtype):
        # As bytes: torch doesn't scatter FP8.
        kv = narrow(kv, None if scales is None else scales.both, pool.dtype).view(torch.uint8)
        flat = flat.view(torch.uint8)
    at = rows.reshape(-1) + layer_in_group * vectors * BLOCK_TOKENS
    flat.index_copy_(0, at, kv.reshape(-1, flat.shape[1]))


def write_kv(pool: Tensor, layer_in_group: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store `k` and `v` [T, kv_heads, head_dim] of one layer at `slots` int64 [T]. Mutates `pool`."""
    write_rows(pool, layer_in_group, slot_rows(pool, slots), torch.cat((k, v), dim=1))


def gather_granules(pool: Tensor, block_ids: Sequence[int] | Tensor, out: Tensor) -> None:
    """Copy blocks `block_ids` of `pool` to `out` uint8 [n, granule_bytes], in order.

    `out` is contiguous host memory whose address is a multiple of 8, such as a slot of a mapped extent.
    Blocks until the bytes are there.
    """
    words, ids = _words(pool), _ids(block_ids)
    _check_granules(words, ids, out)
    if _by_kernel(pool, out):
        from forebay.kernels import forms

        forms.move_granules(pool, ids, out, store=True)
    elif pool.device.type == "cpu":
        torch.index_select(words, 0, ids, out=out.view(torch.int64))
    else:
        out.view(torch.int64).copy_(words.index_select(0, ids.to(pool.device)))


def scatter_granules(pool: Tensor, block_ids: Sequence[int] | Tensor, src: Tensor) -> None:
    """The inverse of `gather_granules`: `src` uint8 [n, granule_bytes] to the blocks. Mutates `pool`.

    A block may be named only once. Blocks until `src` is no longer read.
    """
    words, ids = _words(pool), _ids(block_ids)
    _check_granules(words, ids, src)
    if _by_kernel(pool, src):
        from forebay.kernels import forms

        forms.move_granules(pool, ids, src, store=False)
        return
    first = int(ids[0]) if len(ids) else 0
    if torch.equal(ids, torch.arange(first, first + len(ids))):
        words[first : first + len(ids)].copy_(src.view(torch.int64))
    else:
        words.index_copy_(0, ids.to(pool.device), src.view(torch.int64).to(pool.device))


def _by_kernel(pool: Tensor, side: Tensor) -> bool:
    return dispatch().choose("move", side, pool.view(-1).view(torch.uint8)) == "triton"


def _words(pool: Tensor) -> Tensor:
    # Elements of 8 bytes: torch copies a row as a loop over elements, and bytes take ten times as long.
    return pool.view(pool.shape[0], -1).view(torch.int64)


def _ids(block_ids: Sequence[int] | Tensor) -> Tensor:
    if isinstance(block_ids, Tensor):
        return block_ids.to("cpu", torch.int64)
    return torch.tensor(block_ids, dtype=torch.int64)


def _check_granules(words: Tensor, ids: Tensor, side: Tensor) -> None:
    assert side.dtype == torch.uint8 and side.device.type == "cpu", (side.dtype, side.device)
    assert side.shape == (len(ids), words.shape[1] * 8), (side.shape, len(ids), words.shape)
    assert not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < words.shape[0]), ids
