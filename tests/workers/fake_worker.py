"""`python -m tests.workers.fake_worker LISTEN STORE [NAME=VALUE ...]`: a worker process around the fake model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.models.base import CausalLM
from forebay.workers.config import WorkerConfig
from forebay.workers.worker import run_worker
from tests.workers.fake_model import FakeModel


class FragileModel(FakeModel):
    """Fails on one token, as a bug would."""

    def forward(self, batch: Batch, kv: Mapping[str, Tensor]) -> Tensor:
        if bool((batch.token_ids == 13).any()):
            raise RuntimeError("thirteen")
        return super().forward(batch, kv)


def load(config: WorkerConfig) -> tuple[CausalLM, bytes]:
    return FragileModel() if config.label == "fragile" else FakeModel(), b"w" * 32


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
