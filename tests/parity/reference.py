"""transformers as the oracle, and a runner that drives our models through a paged pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from forebay.kernels.batch import BLOCK_TOKENS, NO_BLOCK, pack_batch
from forebay.kernels.cache import gather_granules, scatter_granules
from forebay.models.base import CausalLM, KVGroup
from tests.ties import first_of_equals

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def reference_logits(path: Path, ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits [len(ids), vocab] of a full forward pass by transformers."""
    with _in_full_precision() if dtype == torch.float64 else contextlib.nullcontext(), first_of_equals():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        if model.config.model_type != "gpt_oss":  # its sinks are known to eager attention only
            model.set_attn_implementation("sdpa")  # eager attention rounds its softmax to fp32
        with torch.inference_mode():
            logits: torch.Tensor = model.eval()(torch.tensor([list(ids)])).logits[0]
    return logits


@contextlib.contextmanager
def _in_full_precision() -> Iterator[None]:
    """transformers computes norms and angles in fp32 even in an fp64 model; here it must not."""

    def gemma_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x) * (1.0 + self.weight)

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * scale)

    def rotary(
        self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parameters = self.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        assert parameters["rope_type"] == "default", parameters
        dim = getattr(self.config, "head_dim", None)
        dim = dim or self.config.hidden_size // self.config.num_attention_heads
        steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        angles = position_ids[..., None].double() / parameters["rope_theta"] ** steps
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    patches = [
        (modeling_gemma3.Gemma3RMSNorm, gemma_norm),
        (modeling_gemma3.Gemma3RotaryEmbedding, rotary),
        (modeling_llama.LlamaRMSNorm, norm),
        (modeling_llama.LlamaRotaryEmbedding, rotary),
        (modeling_qwen2.Qwen2RMSNorm, norm),
        (modeling_qwen2.Qwen2RotaryEmbedding, rotary),
        (modeling_qwen3.Qwen3RMSNorm, norm),
        (modeling_qwen3.Qwen3RotaryEmbedding, rotary),
    ]
    with contextlib.ExitStack() as stack:
        for cls, forward in patches:
            stack.enter_context(mock.patch.object(cls, "forward", forward))
        yield


class Runner:
    """Sequences of token ids, fed to a model in any pieces. Blocks are handed out in a shuffled order."""

    def __init__(self, model: CausalLM, *, blocks: int = 64, seed: int = 0) -> None:
        self.model = model
        self.groups = model.info.kv_groups
        self.pools = model.new_pools({group.name: blocks for group in self.groups})
        rng = torch.Generator().manual_seed(seed)
        self._free = {group.name: torch.randperm(blocks, generator=rng).tolist() for group in self.groups}
        self._tables: dict[tuple[int, str], list[int]] = {}
        self._done: dict[int, int] = {}

    def step(self, pieces: dict[int, Sequence[int]]) -> torch.Tensor:
        """Feed each sequence its next tokens, all in one batch. Returns the logits of every row."""
        sequences = [(list(ids), self._done.get(key, 0)) for key, ids in pieces.items()]
        tables = {
            group.name: [self._grow(key, group, self._done.get(key, 0) + len(ids)) for key, ids in pieces.items()]
            for group in self.groups
        }
        rows = sum(len(ids) for ids, _ in sequences)
        batch = pack_batch(sequences, tables, logits_rows=range(rows), device=self.model.device)
        batch.check()
        logits = self.model.forward(batch, self.pools)
        for key, ids in pieces.items():
            self._done[key] = self._done.get(key, 0) + len(ids)
        return logits

    def export(self, key: int, unit: int) -> dict[str, torch.Tensor]:
        """The canonical bytes of a sequence's whole unit, of every group, as they go to a store."""
        found = {}
        for group in self.groups:
            out = torch.empty(1, group.granule_bytes(self.model.kv_dtype), dtype=torch.uint8)
            gather_granules(self.pools[group.name], [self._tables[key, group.name][unit]], out)
            found[group.name] = out
        return found

    def adopt(self, key: int, units: Sequence[dict[str, torch.Tensor]]) -> None:
        """Begin a sequence with what a store holds of it: of windowed groups only what its next token can see."""
        length = len(units) * BLOCK_TOKENS
        for group in self.groups:
            first = 0 if group.window is None else max(0, length - group.window + 1) // BLOCK_TOKENS
            table = [NO_BLOCK] * first
            for unit in units[first:]:
                table.append(self._free[group.name].pop())
                scatter_granules(self.pools[group.name], table[-1:], unit[group.name])
            self._tables[key, group.name] = table
        self._done[key] = length

    def _grow(self, key: int, group: KVGroup, total: int) -> list[int]:
        table = self._tables.setdefault((key, group.name), [])
        while len(table) * BLOCK_TOKENS < total:
            table.append(self._free[group.name].pop())
        if group.window is not None:
            gone = max(0, self._done.get(key, 0) - group.window + 1) // BLOCK_TOKENS
            for index in range(gone):
                if table[index] != NO_BLOCK:
                    # Its next owner overwrites it: nobody may read it any more.
                    self.pools[group.name][table[index]] = 1e3
                    self._free[group.name].insert(0, table[index])
                    table[index] = NO_BLOCK
        return list(table)
