"""`python -m tests.workers.fake_worker LISTEN STORE [NAME=VALUE ...]`: a worker process around the fake model."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from forebay.models.base import CausalLM
from forebay.workers.config import WorkerConfig
from forebay.workers.worker import run_worker
from tests.workers.fake_model import FakeModel


def load(config: WorkerConfig) -> tuple[CausalLM, bytes]:
    return FakeModel(), b"w" * 32


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    listen, store, *more = sys.argv[1:]
    settings: dict[str, object] = {"chunk_tokens": 32, "max_tokens": 2048, "max_batch_tokens": 64, "max_running": 8}
    for item in more:
        name, _, value = item.partition("=")
        settings[name] = int(value) if value.isdigit() else value
    run_worker(WorkerConfig(Path("fake"), listen, store=store or None, **settings), load)  # type: ignore[arg-type]
