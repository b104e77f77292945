"""What every model family offers: facts about itself, and one forward pass over a flat batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, Batch

GroupKind = Literal["full", "window", "latent", "indexer"]
RopeValue = str | int | float | bool | None

SCALE_BYTES = 4
"""Of a row whose values are scaled."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one cache geometry.

    `window` counts the positions that a query sees, itself included. A group of kind "latent" has one row of
    `head_dim` values a token, for all heads and as key and value at once; its `kv_heads` is 1. So it is with an
    "indexer": the keys by which a sparse layer finds what to attend to. `scaled`: a row's values are float8_e4m3fn, and
    behind them is an fp32 scale that multiplies them; its pool has bytes. `block_tokens` of the 16 in a block are here:
    fewer where ranks share them out.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None = None
    block_tokens: int = BLOCK_TOKENS
    scaled: bool = False

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Shape of this group's KV pool: [num_blocks, layers, 2 (1 for one row), kv_heads, block_tokens, width]."""
        return (num_blocks, len(self.layers), self.planes, self.kv_heads, self.block_tokens, self.width)

    @property
    def one_row(self) -> bool:
        """Has a token one row for all heads, which every rank has whole?"""
        return self.kind in ("latent", "indexer")

    @property
    def width(self) -> int:
        """Elements of a row in the pool: its values, or bytes of values and scale."""
        return self.head_dim + SCALE_BYTES * self.scaled

    def pool_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of this group's pool in a model that computes in `dtype`."""
        return torch.uint8 if self.scaled else dtype

    @property
    def planes(self) -> int:
        """Rows of one token and head: K and V, or one latent."""
        return 1 if self.one_row else 2

    def granule_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one block in a model that computes in `dtype`."""
        rows = len(self.layers) * self.planes * self.kv_heads * self.block_tokens
        return rows * self.width * self.pool_dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Which positions layers attend to: those that an index finds, `top_k` of them, or as many blocks of `block`.

    `group` is the cache group whose rows are chosen. `leaders` says of every layer whose choice it takes: its own, or
    that of the layer with this number, in the same forward pass; -1: it attends to everything.
    """

    group: str
    top_k: int
    leaders: tuple[int, ...]
    block: int = 1


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What can be known from the configuration alone, without weights.

    `kv_groups` cover every layer once, those of index keys aside. `rope` holds the plain values of rope and position
    settings that change KV bytes. `max_context` counts prompt and answer together. `sparse`: None, if all layers attend
    to everything that they see.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    kv_groups: tuple[KVGroup, ...]
    rope: Mapping[str, RopeValue] = field(default_factory=dict)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    sparse: Sparsity | None = None


class CausalLM(ABC):
    """A decoder-only model on one device in one dtype."""

    info: ModelInfo
    dtype: torch.dtype
    device: torch.device
    narrow_kv: torch.dtype | None = None
    """What KV is kept in, if not in `dtype`: an FP8."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """What KV is kept in."""
        return self.narrow_kv or self.dtype

    @abstractmethod
    def forward(self, batch: Batch, kv: Mapping[str, Tensor]) -> Tensor:
        """Logits [len(batch.logits_rows), vocab_size]; float32, or float64 if the model computes in it.

        Writes the K and V of all rows of `batch` into the pools `kv` (group name -> pool) at the batch's slots,
        and reads what is there for the context. Blocks on the CPU until it has the result; on CUDA it only
        enqueues. The result is the caller's own.
        """

    def held_groups(self) -> tuple[KVGroup, ...]:
        """The cache groups with those KV heads that this process has: all, unless ranks share the model."""
        return self.info.kv_groups

    def new_pools(self, num_blocks: Mapping[str, int]) -> dict[str, Tensor]:
        """Zeroed KV pools of what this process has of the model: {group name: pool of num_blocks[name] blocks}."""
        return {
            group.name: torch.zeros(
                group.pool_shape(num_blocks[group.name]), dtype=group.pool_dtype(self.kv_dtype), device=self.device
            )
            for group in self.held_groups()
        }
