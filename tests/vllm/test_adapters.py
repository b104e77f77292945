"""LoRA adapters are told by what is in their files: not by their names, and not once the files are others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forebay.testing.cluster import Cluster
from tests.vllm.conftest import PATIENT, server
from tests.vllm.prompts import Prompt, longest_hit, sharing
from tests.vllm.servers import Engine, running, settle, wait

RANK = 8


def adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter of the keys' projections, far from doing nothing."""
    config = json.loads((model / "config.json").read_text())
    hidden, width = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=rng)
        tensors[f"{name}.lora_B.weight"] = torch.randn(width, RANK, generator=rng)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["k_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folders(qwen: Cluster) -> dict[str, Path]:
    """`copy` is `one` under another name."""
    seeds = {"one": 1, "copy": 1, "two": 2}
    return {name: adapter(qwen.folder / f"lora-{name}", qwen.model, seed) for name, seed in seeds.items()}


@pytest.fixture(scope="module")
def adapted(qwen: Cluster, folders: dict[str, Path]) -> Iterator[Engine]:
    """vLLM with all of them."""
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    one = server(
        qwen, "adapted", "--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "3", "--lora-modules", *modules,
        settings=PATIENT,
    )  # fmt: skip
    with running(one):
        yield one


def cached(engine: Engine, prompt: Prompt, **more: str) -> int:
    engine.forget_device()
    return engine.complete(prompt, 1, **more).cached_tokens


def test_an_adapter_is_found_under_any_name_and_nothing_else_is(qwen: Cluster, adapted: Engine) -> None:
    (prompt,) = sharing(1, seed=51)
    first = adapted.complete(prompt, model="one")
    settle(qwen)
    wait("a hit", lambda: cached(adapted, prompt, model="copy") == longest_hit(prompt))
    assert cached(adapted, prompt, model="two") == 0
    assert cached(adapted, prompt) == 0
    adapted.forget_device()
    again = adapted.complete(prompt, model="copy")
    assert again.cached_tokens == longest_hit(prompt) and again.token_ids == first.token_ids
    assert settle(qwen)["store.leases"] == 0


def test_an_adapter_whose_files_are_written_anew_is_served_without_the_store(
    qwen: Cluster, adapted: Engine, folders: dict[str, Path]
) -> None:
    (prompt,) = sharing(1, seed=52)
    adapted.complete(prompt, model="two")
    wait("a hit", lambda: cached(adapted, prompt, model="two") == longest_hit(prompt))
    adapter(folders["two"], qwen.model, seed=1)
    # vLLM still has what it has read. By its files it would be `one`, whose chunks it must neither get nor give.
    (fresh,) = sharing(1, seed=53)
    adapted.complete(fresh, model="one")
    wait("a hit", lambda: cached(adapted, fresh, model="one") == longest_hit(fresh))
    assert cached(adapted, fresh, model="two") == 0
    (last,) = sharing(1, seed=54)
    adapted.complete(last, model="two")
    settle(qwen)
    assert cached(adapted, last, model="one") == 0
    assert "isn't what it was when the engine read it" in adapted.log.read_text()
