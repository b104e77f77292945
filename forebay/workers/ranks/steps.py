"""A batch as a message, and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forebay.kernels.batch import Batch, GroupTables, SequenceSpan
from forebay.workers.hot.resolving import StepResolver
from forebay.workers.ranks.messages import Step, Table


def pack_step(batch: Batch) -> Step:
    """`batch`, whose tensors are in this process's memory. What its resolver has to tell can be packed once."""
    return Step(
        tokens=_bytes(batch.token_ids),
        rows=_bytes(batch.logits_rows),
        spans=[(span.query_len, span.context_len) for span in batch.spans],
        groups={
            name: Table(_bytes(tables.block_tables.to(torch.int32)), _bytes(tables.slots))
            for name, tables in batch.groups.items()
        },
        hot=batch.resolver.told if isinstance(batch.resolver, StepResolver) else None,
    )


def unpack_step(step: Step, device: torch.device) -> Batch:
    """The same batch on `device`."""
    spans: list[SequenceSpan] = []
    row = 0
    for count, context in step.spans:
        spans.append(SequenceSpan(row, count, context))
        row += count
    positions = np.concatenate([np.arange(s.context_len, s.total_len, dtype=np.int64) for s in spans])
    groups = {}
    for name, table in step.groups.items():
        blocks = np.frombuffer(table.blocks, dtype="<i4").reshape(len(spans), -1).astype(np.int64)
        groups[name] = GroupTables(torch.from_numpy(blocks).to(device), _tensor(table.slots, device))
    return Batch(
        token_ids=_tensor(step.tokens, device),
        positions=torch.from_numpy(positions).to(device),
        spans=tuple(spans),
        groups=groups,
        logits_rows=_tensor(step.rows, device),
    )


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """The same batch on `device`."""
    if device.type == "cpu":
        return batch
    groups = {
        name: GroupTables(tables.block_tables.to(device), tables.slots.to(device))
        for name, tables in batch.groups.items()
    }
    return Batch(
        batch.token_ids.to(device), batch.positions.to(device), batch.spans, groups, batch.logits_rows.to(device)
    )


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


def _tensor(packed: bytes, device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(packed, dtype="<i8").astype(np.int64)).to(device)
