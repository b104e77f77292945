"""`python -m tests.workers.fake_worker LISTEN STORE [NAME=VALUE ...]`: a worker process around the fake model."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from forebay.importing import nothing_collected

with nothing_collected():
    import torch
    from torch import Tensor

    from forebay.kernels.batch import Batch
    from forebay.models.base import CausalLM
    from forebay.workers.config import WorkerConfig
    from forebay.workers.worker import run_worker
    from tests.workers.fake_model import FakeModel

BUSY_S = 3.0


class FragileModel(FakeModel):
    """Fails on one token, as a bug would; waits for ever on another one, and on a third computes for long."""

    def forward(self, batch: Batch, kv: Mapping[str, Tensor]) -> Tensor:
        if bool((batch.token_ids == 13).any()):
            raise RuntimeError("thirteen")
        if bool((batch.token_ids == 14).any()):
            threading.Event().wait()
        if bool((batch.token_ids == 15).any()):
            until = time.monotonic() + BUSY_S
            while time.monotonic() < until:
                torch.ones(64, 64) @ torch.ones(64, 64)
        return super().forward(batch, kv)


def load(config: WorkerConfig) -> tuple[CausalLM, bytes]:
    return FragileModel() if "fragile" in (config.label, Path(config.listen).stem) else FakeModel(), b"w" * 32


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    listen, store, *more = sys.argv[1:]
    settings: dict[str, object] = {
        "chunk_tokens": 32, "max_tokens": 2048, "max_num_batched_tokens": 64, "max_num_seqs": 8,
    }  # fmt: skip
    for item in more:
        name, _, value = item.partition("=")
        settings[name] = int(value) if value.isdigit() else Path(value) if name == "trace" else value
    run_worker(WorkerConfig(Path("fake"), listen, store=store or None, **settings), load)  # type: ignore[arg-type]
