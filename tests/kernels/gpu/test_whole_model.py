"""Whole models whose attention and cache movement are the kernels give the logits that they give with torch's forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from forebay.errors import ConfigError
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


LAYER = {"attend", "norm", "turn"}
SMALL: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "gemma3, norms around every part, gelu": (checkpoints.tiny_gemma3, LAYER | {"activate"}),
    "qwen3_moe, norms of heads, a dense layer": (
        partial(checkpoints.tiny_qwen3_moe, num_hidden_layers=2), LAYER | {"activate", "route", "experts"},
    ),
    "minimax, norm of all heads": (
        partial(checkpoints.tiny_minimax_m2, num_hidden_layers=1), LAYER | {"route", "experts"},
    ),
    "glm, chosen positions": (
        partial(checkpoints.tiny_glm_moe_dsa, num_hidden_layers=2, index_topk=1, indexer_types=["full", "shared"]),
        {"norm", "turn", "index", "sparse", "activate", "route", "experts"},
    ),
    "glm4, shared experts as slots": (
        partial(checkpoints.tiny_glm4_moe, num_hidden_layers=2), LAYER | {"activate", "route", "experts"},
    ),
}  # fmt: skip


def stepped(path: Path, kv_dtype: torch.dtype | None = None) -> torch.Tensor:
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"), kv_dtype=kv_dtype)
    runner = Runner(model, blocks=2)
    return torch.cat([runner.step({0: IDS[:2]}), runner.step({0: IDS[2:3]})])


@pytest.mark.parametrize("family", SMALL)
def test_every_operation_of_a_layer_is_the_kernel(family: str, tmp_path: Path) -> None:
    make, operations = SMALL[family]
    path = make(tmp_path)
    configure("torch")
    wanted = stepped(path)
    present = configure("triton")
    torch.testing.assert_close(stepped(path), wanted, rtol=0, atol=1e-4)
    figures = present.figures()
    ran = {name.split(".")[1] for name, count in figures.items() if name.endswith("triton.executed") and count}
    assert ran == operations
    assert not any(count for name, count in figures.items() if name.endswith("torch.executed"))


LAYERS = ["sliding_attention", "full_attention"]


def test_quantised_experts_stay_as_they_are_stored(tmp_path: Path) -> None:
    """In FP8 with blocks of 128, and in MXFP4: the kernels read them, nothing is unpacked when they are loaded."""
    makers = {
        "fp8": partial(
            checkpoints.tiny_qwen3_moe, num_hidden_layers=1, mlp_only_layers=[], moe_intermediate_size=128,
            num_experts=3, num_experts_per_tok=2,
        ),
        "mxfp4": partial(checkpoints.tiny_gpt_oss, num_hidden_layers=1, layer_types=LAYERS[1:]),
    }  # fmt: skip
    for form, make in makers.items():
        path = make(tmp_path / form)
        checkpoints.to_mxfp4(path) if form == "mxfp4" else checkpoints.to_fp8(path, (128, 128))
        configure("torch")
        wanted = stepped(path)
        configure("triton")
        model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
        experts = model._layers[0]._mlp._experts  # type: ignore[attr-defined]
        assert (experts._up.form, experts._down.form) == (form, form)
        torch.testing.assert_close(stepped(path), wanted, rtol=0, atol=1e-3)


def test_weights_that_are_laid_out_for_torch_say_so(tmp_path: Path) -> None:
    """A kernel that is asked for too late is an error, not another form in silence."""
    path = checkpoints.tiny_qwen3_moe(tmp_path, num_hidden_layers=1, mlp_only_layers=[])
    configure("torch")
    model = load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    configure("triton")
    with pytest.raises(ConfigError, match="came after the experts' weights"):
        Runner(model, blocks=2).step({0: IDS[:2]})
