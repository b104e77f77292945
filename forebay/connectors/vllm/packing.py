"""How vLLM's attention backends keep K and V in a block.

Most keep a token's K and V side by side. The CPU's kernels don't: how, depends on dtype, block size, head size and the
machine. So its own operation is asked: it writes numbers that tell where they come from, into a cache of two blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from forebay.connectors.cells import CellRow, learned_row
from forebay.connectors.copying import Packing
from forebay.connectors.grouping import Part
from forebay.errors import ConfigError
from forebay.kvstore.geometry import GroupGeometry

PLAIN = {"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"}
"""Backends that keep K and V of a token side by side."""

CPU = "CPU_ATTN"
BASE = 128
"""Numbers up to this are exact in every dtype of a cache."""


def packing_of(config: VllmConfig, part: Part, geometry: GroupGeometry) -> Packing | None:
    """How cells of a part's layers are packed; None: not at all. Raises ConfigError for a backend that isn't known."""
    if geometry.kind == "latent":
        return None  # one row a token
    layers = get_layers_from_vllm_config(config, AttentionLayerBase, list(part.names))
    backends = {layer.get_attn_backend().get_name() for layer in layers.values()}
    if backends <= PLAIN:
        return None
    if backends == {CPU}:
        return lambda tokens: _cpu_rows(config, geometry, tokens)
    raise ConfigError(f"the KV caches of backends {', '.join(sorted(backends))} can't be read: choose FLASH_ATTN")


def _cpu_rows(config: VllmConfig, geometry: GroupGeometry, tokens: int) -> tuple[CellRow, ...]:
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if geometry.second_dim != geometry.head_dim:
        raise ConfigError("the CPU's attention has no K and V of different widths")
    dtype, dim = getattr(torch, geometry.dtype), geometry.head_dim
    isa = _get_attn_isa(config.model_config.dtype, tokens, dim, config.cache_config.cache_dtype)

    def write(rows: Tensor) -> Tensor:
        """Let the backend put rows [tokens, dim] into a block as K and as V; the cell, flat."""
        given = rows.to(dtype)[:, None].contiguous()
        cache = torch.zeros(2, 1, tokens, 2 * dim, dtype=dtype)
        keys, values = cache.view(2, 1, 2 * tokens, dim).chunk(2, dim=2)
        slots = torch.arange(tokens, 2 * tokens)
        _custom_ops.cpu_attn_reshape_and_cache(given, given.clone(), keys, values, slots, isa)
        return cache[1, 0].reshape(-1).to(torch.long)

    return _learned(write, tokens, dim)


def _learned(write: Callable[[Tensor], Tensor], tokens: int, dim: int) -> tuple[CellRow, CellRow]:
    """K's and V's rows, from where a cell has which number."""
    size = tokens * dim
    numbers = torch.arange(size).view(tokens, dim)
    found = torch.zeros(2 * size, dtype=torch.long)
    scale = 1
    while scale < size:
        found += write(numbers // scale % BASE) * scale
        scale *= BASE
    rows = []
    for half in (0, 1):
        mine = found[half * size : (half + 1) * size]
        if not torch.equal(mine.sort().values, torch.arange(size)):
            raise ConfigError("the CPU's attention keeps K and V in a way that Forebay's connector can't follow")
        places = torch.empty(size, dtype=torch.long)
        places[mine] = torch.arange(half * size, (half + 1) * size)
        rows.append(learned_row(places.view(tokens, dim).tolist()))
    return rows[0], rows[1]
