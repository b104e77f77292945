"""A worker takes its tokens from the kernel where that is asked for, the same ones, and other rows to its sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.kernels.dispatch import configure
from forebay.workers.choosing import choose_rows
from forebay.workers.protocol import Sampling
from tests.workers.fake_model import FakeModel
from tests.workers.harness import Harness

PLAIN: list[dict[str, Any]] = [
    {}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_k": 7, "seed": 4},
    {"temperature": 1.2, "top_p": 0.7, "seed": 5},
]  # fmt: skip
MORE: list[dict[str, Any]] = [{"logprobs": 2}, {"temperature": 1.0, "min_p": 0.1, "seed": 6}, {"presence_penalty": 1.0}]
TOKENS = 2


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    configure("auto")


class Single(FakeModel):
    """Logits in fp32; a third of the vocabulary ties with another third."""

    def forward(self, batch: Batch, kv: Mapping[str, Tensor]) -> Tensor:
        return super().forward(batch, kv).float()


def answers(mode: str) -> tuple[list[list[int]], dict[str, float]]:
    """Of all requests at a time, and what ran."""
    present = configure(mode)
    harness = Harness(Single(), None)
    harness.start()
    keys = [harness.submit([5, 6, 7 + i], TOKENS, **asked) for i, asked in enumerate(PLAIN + MORE)]
    heard = [harness.wait(key).tokens for key in keys]
    harness.stop()
    return heard, present.figures()


def test_a_worker_chooses_the_same_tokens_by_the_kernel() -> None:
    wanted, before = answers("torch")
    found, after = answers("triton")
    assert found == wanted
    assert before["kernels.choose.torch.executed"] == len(wanted) * TOKENS
    assert after["kernels.choose.triton.executed"] > 0
    assert after["kernels.choose.torch.executed"] == len(MORE) * TOKENS, "what needs more than the kernel has"


def step_of(asked: list[Sampling]) -> tuple[list[Any], list[Any]]:
    works = [SimpleNamespace(samples=True, scored=range(0)) for _ in asked]
    generations = [
        SimpleNamespace(ask=SimpleNamespace(sampling=sampling), adjustment=None, request=SimpleNamespace(tokens=[1, 2]))
        for sampling in asked
    ]
    return works, generations


def test_a_row_that_is_no_numbers_comes_back_as_it_is() -> None:
    """Whoever looks at it says what is wrong."""
    configure("triton")
    logits = torch.randn(3, 40)
    logits[1, 3] = torch.nan
    works, generations = step_of([Sampling(max_tokens=1, temperature=0)] * 3)
    found = choose_rows(logits, works, generations)
    assert found[0] == int(logits[0].argmax()) and found[2] == int(logits[2].argmax())
    assert isinstance(found[1], np.ndarray) and bool(np.isnan(found[1][3]))


def test_rows_of_a_prompt_that_are_scored_come_back_in_their_places() -> None:
    configure("triton")
    logits = torch.randn(4, 40)
    works, generations = step_of([Sampling(max_tokens=1, temperature=0)] * 2)
    works[0].scored, works[1].scored = range(2), range(0)
    found = choose_rows(logits, works, generations)
    assert [isinstance(row, int) for row in found] == [False, False, True, True]
    assert np.array_equal(found[1], logits[1].numpy())
    assert found[2:] == [int(logits[2].argmax()), int(logits[3].argmax())]


def test_without_the_kernel_all_rows_come_back() -> None:
    configure("torch")
    logits = torch.randn(2, 40)
    works, generations = step_of([Sampling(max_tokens=1, temperature=0)] * 2)
    found = choose_rows(logits, works, generations)
    assert np.array_equal(np.stack(found), logits.numpy())
