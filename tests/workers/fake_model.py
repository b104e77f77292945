"""A model without weights whose every answer depends on every KV entry that it should have read.

Integers in float64, so that sums are exact in any order: whoever reads one wrong block, or computes with one
position missing, gets another token. A step of the recurrence reads the pools as attention would: each group
over what its window shows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, NO_BLOCK, Batch
from forebay.models.base import CausalLM, KVGroup, ModelInfo

MODULUS = 1009
VOCAB = 300


class FakeModel(CausalLM):
    """One full group and, unless `window` is None, one window group."""

    def __init__(
        self, window: int | None = 40, max_context: int = 2048, eos_ids: tuple[int, ...] = (VOCAB - 1,)
    ) -> None:
        groups = [KVGroup("full", "full", (2,), 1, 4)]
        if window is not None:
            groups.append(KVGroup("window", "window", (0, 1), 1, 4, window))
        self.info = ModelInfo(
            family="fake", vocab_size=VOCAB, hidden_size=4, num_layers=3, max_context=max_context,
            kv_groups=tuple(groups), rope={"theta": 10000.0}, eos_ids=eos_ids,
        )  # fmt: skip
        self.dtype = torch.float64
        self.device = torch.device("cpu")

    def forward(self, batch: Batch, kv: Mapping[str, Tensor]) -> Tensor:
        batch.check()
        states = torch.zeros(batch.num_tokens, dtype=torch.int64)
        for index, span in enumerate(batch.spans):
            for row in range(span.query_start, span.query_end):
                position = int(batch.positions[row])
                state = int(batch.token_ids[row]) * 31 + position * 17
                for order, group in enumerate(self.info.kv_groups):
                    state += (7 + order) * self._read(batch, kv, index, group, position)
                states[row] = state = state % MODULUS
                for group in self.info.kv_groups:
                    self._write(kv[group.name], int(batch.groups[group.name].slots[row]), state)
        wanted = states[batch.logits_rows].to(torch.float64)
        ids = torch.arange(VOCAB, dtype=torch.float64)
        return torch.remainder(wanted[:, None] * 13 + ids * 37, 101) / 10

    def _read(self, batch: Batch, kv: Mapping[str, Tensor], index: int, group: KVGroup, position: int) -> int:
        first = 0 if group.window is None else max(0, position - group.window + 1)
        pool, at = kv[group.name], torch.arange(first, position)
        blocks = batch.groups[group.name].block_tables[index][at // BLOCK_TOKENS]
        assert bool((blocks != NO_BLOCK).all()), f"{group.name}: a position before {position} is gone"
        entries = pool[blocks, :, :, :, at % BLOCK_TOKENS, :]
        values = entries[:, 0, 0, 0, 0]
        whole = self._entry(pool, 0) + values.view(-1, 1, 1, 1, 1)
        assert torch.equal(entries, whole), f"{group.name}: torn KV before {position}"
        return int((values * (at + 1)).sum()) % MODULUS

    def _write(self, pool: Tensor, slot: int, value: int) -> None:
        pool[slot // BLOCK_TOKENS, :, :, :, slot % BLOCK_TOKENS, :] = self._entry(pool, value)

    @staticmethod
    def _entry(pool: Tensor, value: int) -> Tensor:
        shape = (*pool.shape[1:4], pool.shape[5])
        return torch.arange(torch.Size(shape).numel(), dtype=pool.dtype).view(shape) + value
