"""Whole models whose attention and cache movement are the kernels give the logits that they give with torch's forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from forebay.kernels.dispatch import configure
from forebay.models.loading import load_model
from tests import checkpoints
from tests.parity.reference import Runner

MAKERS: dict[str, Callable[[Path], Path]] = {
    "gpt-oss, window and sinks": partial(checkpoints.tiny_gpt_oss, window=10),
    "deepseek, latents": checkpoints.tiny_deepseek_v3,
}
IDS = torch.randint(4, checkpoints.VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    configure("auto")


def served(path: Path) -> list[torch.Tensor]:
    """A chunked prefill beside another sequence, decodes, and a sequence that goes on from stored units."""
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    first, second = Runner(model), Runner(model, seed=5)
    pieces = [{0: IDS[:14]}, {0: IDS[14:18], 1: IDS[:1]}, {0: IDS[18:19], 1: IDS[1:2]}]
    logits = [first.step(piece) for piece in pieces]
    second.adopt(0, [first.export(0, 0)])
    return [*logits, second.step({0: IDS[16:18]}), second.step({0: IDS[18:19]})]


@pytest.mark.parametrize("family", MAKERS)
def test_the_same_logits_by_kernels_alone(family: str, tmp_path: Path) -> None:
    path = MAKERS[family](tmp_path)
    configure("torch")
    wanted = served(path)
    present = configure("triton")
    found = served(path)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    figures = present.figures()
    assert figures["kernels.attend.triton.executed"] + figures["kernels.latent.triton.executed"] > 0
    assert figures["kernels.move.triton.executed"] > 0
    assert not any(count for name, count in figures.items() if name.endswith("torch.executed"))
