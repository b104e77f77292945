"""The scales of KV in FP8 that a checkpoint was calibrated for, one a layer or one a KV head.

They are looked for under the names that published checkpoints have. One that has none is served with scales of 1, which
suits models whose keys and values stay below FP8's largest number. Devices with the older AMD FP8, whose largest number
is about half of that, get twice the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.narrow import KvScales, is_narrow
from forebay.models.errors import CheckpointBroken
from forebay.models.weights import Weights

SHARED = ("kv_scale", "attn.kv_scale")
"""One for K and V."""


def read_kv_scales(weights: Weights, at: str, kv_heads: int, mine: range) -> KvScales | None:
    """Of the layer's attention under `at`, of the KV heads `mine`; None: all are 1, or KV isn't in FP8. Raises
    CheckpointBroken."""
    if not is_narrow(weights.kv_dtype):
        return None
    k, v = (_find(weights, at, side, kv_heads) for side in "kv")
    if k is None and v is None:
        return None
    one = torch.ones(kv_heads, device=weights.device)
    factor = 2.0 if weights.kv_dtype == torch.float8_e4m3fnuz else 1.0
    k, v = (one if side is None else side * factor for side in (k, v))
    return KvScales(k[mine.start : mine.stop].contiguous(), v[mine.start : mine.stop].contiguous())


def read_latent_scale(weights: Weights, at: str) -> KvScales | None:
    """The same of a layer that keeps latents: one number, which `k_scale` or `kv_scale` may be."""
    found = read_kv_scales(weights, at, 1, range(1))
    return None if found is None else KvScales(found.k, found.k)


def _find(weights: Weights, at: str, side: str, kv_heads: int) -> Tensor | None:
    own = (f"{side}_scale", f"{side}_proj.{side}_scale", f"attn.{side}_scale")
    for name in (f"{at}{name}" for name in (*own, *SHARED)):
        if name not in weights:
            continue
        shape = weights.shape(name)
        if shape not in ((), (1,), (kv_heads,)):
            raise CheckpointBroken(
                f"{weights.directory}: {name} has shape {list(shape)}; a KV scale is one number, or one for each of "
                f"{kv_heads} KV heads"
            )
        found = weights.take(name, *shape, dtype=torch.float32).flatten().expand(kv_heads)
        if not bool((found.isfinite() & (found > 0)).all()):
            raise CheckpointBroken(f"{weights.directory}: {name} is {found.tolist()}; KV scales are positive numbers")
        return found
    return None
