"""Quantised experts stay as they are stored whatever part of them a rank has; the parts' sum is the whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from forebay.kernels.dispatch import configure
from forebay.kernels.moe import Routes
from forebay.models.config import read_config
from forebay.models.experts import StackedExperts
from forebay.models.loading import load_model
from forebay.models.quantised import read_quantisation
from forebay.models.ranks import Alone
from forebay.models.registry import find_family
from forebay.models.weights import Weights
from tests import checkpoints

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": [], "num_hidden_layers": 1}
Made = tuple[Path, Path]


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    yield
    configure("auto")


def fp8(path: Path, ffn: int, block: tuple[int, int] = (128, 128)) -> Made:
    """The checkpoint, and one with the same numbers unquantised."""
    checkpoints.tiny_qwen3_moe(path, moe_intermediate_size=ffn, **EXPERTS)
    return path, checkpoints.to_fp8(path, block)


def mxfp4(path: Path) -> Made:
    checkpoints.tiny_gpt_oss(path, num_hidden_layers=1, layer_types=["full_attention"], num_local_experts=3)
    return path, checkpoints.to_mxfp4(path)


MAKERS: dict[str, Callable[[Path], Made]] = {
    "fp8": partial(fp8, ffn=256), "fp8, columns that are no whole blocks": partial(fp8, ffn=200), "mxfp4": mxfp4,
}  # fmt: skip


def experts_of(path: Path, rank: int = 0, size: int = 1) -> StackedExperts:
    """Those of the first layer that a rank has."""
    config = read_config(path)
    weights = Weights(
        path, dtype=torch.float32, device=CPU, progress=None, quantisation=read_quantisation(config),
        ranks=Alone(rank, size),
    )  # fmt: skip
    found = find_family(config).build(config, weights)._layers[0]._mlp._experts  # type: ignore[attr-defined]
    assert isinstance(found, StackedExperts)
    return found


@pytest.mark.parametrize("form", MAKERS)
def test_parts_of_quantised_experts_add_up(form: str, tmp_path: Path) -> None:
    stored, plain = MAKERS[form](tmp_path / "model")
    present = configure("triton")
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(3, 64, generator=rng)
    routes = Routes(torch.tensor([[0, 2], [1, 0], [2, 1]]), torch.rand(3, 2, generator=rng))
    wanted = experts_of(plain)(x, routes)
    for size in (1, 2):
        parts = [experts_of(stored, rank, size) for rank in range(size)]
        assert {stack.form for part in parts for stack in (part._up, part._down)} == {form.partition(",")[0]}
        found = torch.stack([part(x, routes) for part in parts]).sum(dim=0)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert present.figures()["kernels.experts.torch.executed"] == 0


def test_blocks_that_kernels_do_not_take_are_unpacked_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = fp8(tmp_path / "model", 64, (32, 24))
    configure("triton")
    with caplog.at_level(logging.WARNING, "forebay.models.expert_weights"):
        model = load_model(path, dtype=torch.float32, device=CPU)
    assert model._layers[0]._mlp._experts._up.form == "plain"  # type: ignore[attr-defined]
    assert "in FP8 with scales for 32 x 24 are unpacked to torch.float32" in caplog.text
