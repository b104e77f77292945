"""Chosen tokens are those of the definition, and of the workers' sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forebay.kernels import choose
from forebay.kernels.choose import Choices
from forebay.kernels.gpu import choose as gpu
from forebay.workers.protocol import Sampling
from forebay.workers.sampling import sample, uniform


def choices(temperature: float, top_k: int, top_p: float, uniforms: list[float]) -> Choices:
    rows = len(uniforms)
    return Choices(
        torch.full((rows,), temperature, dtype=torch.float64), torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p, dtype=torch.float64), torch.tensor(uniforms, dtype=torch.float64),
    )  # fmt: skip


def tied_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Few different values, of both signs, and some tokens that a grammar has ruled out."""
    found = torch.randint(-6, 7, (rows, vocab), generator=torch.Generator().manual_seed(seed)) / 2.0
    found[:, ::11] = -math.inf
    return found


SETTINGS = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 9, 1.0), (1.3, 0, 0.6), (1.0, 40, 0.8), (1.0, 1, 0.5)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_ties_go_to_the_smaller_id(setting: tuple[float, int, float]) -> None:
    logits = tied_logits(3, 150)
    given = choices(*setting, [0.0, 0.37, 0.9999999])
    found = gpu.choose(logits, given, block=64)
    assert found.tolist() == choose.choose(logits, given).tolist()
    assert not (found % 11 == 0).any()


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_workers_sampler_chooses_the_same(setting: tuple[float, int, float]) -> None:
    temperature, top_k, top_p = setting
    logits = torch.randn(2, 90, generator=torch.Generator().manual_seed(4)) * 3
    logits[1] = tied_logits(1, 90, seed=5)[0]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=7, max_tokens=1)
    wanted = [sample(row, sampling, 20 + at).token for at, row in enumerate(logits.numpy().astype(np.float32))]
    given = choices(*setting, [uniform(7, 0, 20 + at) for at in range(2)])
    assert gpu.choose(logits, given, block=64).tolist() == wanted
    assert choose.choose(logits, given).tolist() == wanted


def test_a_row_of_equal_logits_is_divided_evenly() -> None:
    rows = 8
    found = gpu.choose(torch.zeros(rows, 64), choices(1.0, 0, 1.0, [(i + 0.5) / rows for i in range(rows)]))
    assert found.tolist() == [8 * i + 4 for i in range(rows)]
