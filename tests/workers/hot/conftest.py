"""Tiny sparse models in fp64, and a worker around one whose device holds a fraction of what is asked of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.models.base import CausalLM
from forebay.models.loading import load_model
from tests.checkpoints import tiny_deepseek_v32, tiny_glm_moe_dsa
from tests.workers.fake_store import FakeStore
from tests.workers.harness import Harness

MAKERS: dict[str, Callable[..., Path]] = {"deepseek_v32": tiny_deepseek_v32, "glm_moe_dsa": tiny_glm_moe_dsa}
SQUEEZED = {"hot_buffers": True, "hot_buffer_rows": 96, "hot_buffer_pool_tokens": 448}
"""Four tokens a step of a hot request, and room for two of those of any length, or for 450 tokens of others."""
TIGHT = SQUEEZED | {"hot_buffer_pool_tokens": 224}
"""Room for one hot request."""


@dataclass
class Sparse:
    """One family's tiny checkpoint, and answers of workers that hold everything."""

    path: Path
    model: CausalLM
    answers: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def text(self, length: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(self.model.info.vocab_size) for _ in range(length)]

    def expected(self, prompt: list[int], count: int) -> list[int]:
        """What a worker without a store says that holds all of it."""
        key = (tuple(prompt), count)
        if key not in self.answers:
            with self.worker(None, max_tokens=4096) as whole:
                self.answers[key] = whole.ask(prompt, count).tokens
        return self.answers[key]

    @contextmanager
    def worker(self, store: FakeStore | None, **settings: Any) -> Iterator[Harness]:
        """A running worker; its books are checked at the end, those of hot buffers too."""
        harness = Harness(self.model, store, **({"max_tokens": 2048} | settings))
        harness.start()
        try:
            yield harness
            harness.check_books()
            for gauge in ("requests", "regions", "host_pages", "leases", "pages_lent", "promised"):
                assert harness.stat(f"hot.{gauge}") == 0, gauge
        finally:
            harness.stop()


def load_sparse(make: Callable[..., Path], folder: Path, **more: Any) -> Sparse:
    """A family's tiny checkpoint, made in `folder` with `more` settings."""
    path = folder / "model"
    path.mkdir()
    make(path, max_position_embeddings=2048, **more)
    return Sparse(path, load_model(path, dtype=torch.float64, device=torch.device("cpu")))


@pytest.fixture(scope="session", params=list(MAKERS))
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return load_sparse(MAKERS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    """The family whose layers share what one has chosen."""
    return load_sparse(tiny_glm_moe_dsa, tmp_path_factory.mktemp("glm"))
