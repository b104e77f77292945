"""What comes between a layer's projections and its attention, as plain torch: norms of heads, rotation, cache write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.narrow import KvScales, is_narrow, narrow


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Angles of a batch: `cos` and `sin` [T, dim / 2], of the first dim values of a head; `pairs`: of neighbours
    (2i, 2i + 1), not of the pairs (i, i + dim / 2)."""

    cos: Tensor
    sin: Tensor
    pairs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """RMS norms of every query and of every key head by itself; weights [head_dim] in the accumulation dtype."""

    q: Tensor
    k: Tensor
    eps: float


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """The first 2 * cos.shape[1] values of x [T, heads, head_dim] rotated, a new tensor; computed in the dtype of the
    angles."""
    half = turn.cos.shape[1]
    exact = x.to(turn.cos.dtype)
    cos, sin = turn.cos[:, None], turn.sin[:, None]
    turning, rest = exact[..., : 2 * half], exact[..., 2 * half :]
    left, right = (turning[..., ::2], turning[..., 1::2]) if turn.pairs else turning.chunk(2, dim=-1)
    turned = (left * cos - right * sin, right * cos + left * sin)
    both = torch.stack(turned, dim=-1).flatten(-2) if turn.pairs else torch.cat(turned, dim=-1)
    return torch.cat((both, rest), dim=-1).to(x.dtype)


def norm_rotate_write(
    qkv: Tensor, turn: Turn, norms: HeadNorms | None, pool: Tensor, layer: int, slots: Tensor, heads: int,
    scales: KvScales | None = None,
) -> None:  # fmt: skip
    """Norm and rotate the query and key heads of `qkv` [T, heads + 2 * kv_heads, head_dim], queries in place, and store
    K and V at `slots` int64 [T] of `pool` (-1: nowhere), divided by `scales` where it is in FP8. Mutates the query
    heads and the pool; K in `qkv` is then unspecified."""
    kv_heads = pool.shape[3]
    turning = qkv[:, : heads + kv_heads].to(turn.cos.dtype)
    if norms is not None:
        weight = torch.cat((norms.q.expand(heads, -1), norms.k.expand(kv_heads, -1)))
        turning = turning * (turning.square().mean(dim=-1, keepdim=True) + norms.eps).rsqrt() * weight
    turned = rotate(turning, turn).to(qkv.dtype)
    qkv[:, :heads] = turned[:, :heads]
    kept = slots >= 0
    at, inside = slots[kept] // BLOCK_TOKENS, slots[kept] % BLOCK_TOKENS
    kv = torch.cat((turned[kept, heads:], qkv[kept, heads + kv_heads :]), dim=1)
    if is_narrow(pool.dtype):
        kv = narrow(kv, None if scales is None else scales.both, pool.dtype)
    pool[at, layer, :, :, inside] = kv.to(pool.dtype).view(len(at), 2, kv_heads, -1)
