"""Every family computes what transformers computes, however the tokens are cut into batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from forebay.kernels.batch import pack_batch
from forebay.models.base import CausalLM
from forebay.models.loading import load_model
from tests import checkpoints
from tests.parity.reference import TOLERANCE, Runner, reference_logits

LENGTH = 90
CPU = torch.device("cpu")

MAKERS: dict[str, Callable[[Path], Path]] = {
    "gemma3": checkpoints.tiny_gemma3,
    "qwen3": checkpoints.tiny_qwen3,
    "llama": checkpoints.tiny_llama,
}
VARIANTS: dict[str, Callable[[Path], Path]] = {
    **MAKERS,
    "qwen2": checkpoints.tiny_qwen2,
    "gemma3-two-kv-heads": partial(checkpoints.tiny_gemma3, num_key_value_heads=2, head_dim=18),
    "gemma3-window-of-a-block": partial(checkpoints.tiny_gemma3, window=16),
    "gemma3-logit-cap": partial(checkpoints.tiny_gemma3, final_logit_softcapping=8.0),
    "gemma3-untied": partial(checkpoints.tiny_gemma3, tie_word_embeddings=False),
    "qwen3-one-kv-head-tied": partial(checkpoints.tiny_qwen3, num_key_value_heads=1, tie_word_embeddings=True),
    "llama-no-sharing": partial(checkpoints.tiny_llama, num_key_value_heads=4),
    "llama-biases": partial(checkpoints.tiny_llama, attention_bias=True, mlp_bias=True),
    "llama-sharded": partial(checkpoints.tiny_llama, shard_size="100KB"),
}


def token_ids(length: int = LENGTH, seed: int = 1) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(4, checkpoints.VOCAB, (length,), generator=rng).tolist()


def load(path: Path, dtype: torch.dtype) -> CausalLM:
    return load_model(path, dtype=dtype, device=CPU)


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[wanted.dtype])


@pytest.fixture(scope="module", params=MAKERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = VARIANTS[variant](tmp_path)
    ids = token_ids()
    assert_same(Runner(load(path, dtype)).step({0: ids}), reference_logits(path, ids, dtype))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 5e5,
        },
    ],
    ids=["linear", "llama3"],
)
def test_rotary_scaling(scaling: dict[str, object], tmp_path: Path) -> None:
    path = checkpoints.tiny_llama(tmp_path, rope_parameters=scaling)
    ids = token_ids()
    wanted = reference_logits(path, ids, torch.float32)
    assert_same(Runner(load(path, torch.float32)).step({0: ids}), wanted)


def test_chunked_prefill_at_every_split(checkpoint: Path) -> None:
    ids = token_ids()
    wanted = reference_logits(checkpoint, ids, torch.float64)
    model = load(checkpoint, torch.float64)
    for split in range(1, LENGTH):
        runner = Runner(model, seed=split)
        found = torch.cat([runner.step({0: ids[:split]}), runner.step({0: ids[split:]})])
        assert_same(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_decode_token_by_token(checkpoint: Path, dtype: torch.dtype) -> None:
    ids = token_ids()
    wanted = reference_logits(checkpoint, ids, dtype)
    runner = Runner(load(checkpoint, dtype))
    found = torch.cat([runner.step({0: ids[:3]}), *(runner.step({0: [i]}) for i in ids[3:])])
    assert_same(found, wanted)


def test_sequences_of_all_lengths_in_one_batch(checkpoint: Path) -> None:
    prompts = {key: token_ids(length, seed=key) for key, length in enumerate((1, 90, 17, 40, 64))}
    runner = Runner(load(checkpoint, torch.float64))
    found: dict[int, list[torch.Tensor]] = {key: [] for key in prompts}
    # Each sequence advances by a step of its own, so that prefill chunks and decodes meet.
    at = dict.fromkeys(prompts, 0)
    strides = {0: 1, 1: 33, 2: 1, 3: 7, 4: 16}
    while any(at[key] < len(ids) for key, ids in prompts.items()):
        pieces = {key: ids[at[key] : at[key] + strides[key]] for key, ids in prompts.items() if at[key] < len(ids)}
        logits = runner.step(pieces)
        sizes = [len(piece) for piece in pieces.values()]
        for (key, piece), rows in zip(pieces.items(), logits.split(sizes), strict=True):
            found[key].append(rows)
            at[key] += len(piece)
    for key, ids in prompts.items():
        assert_same(torch.cat(found[key]), reference_logits(checkpoint, ids, torch.float64))


def test_only_the_wanted_rows_get_logits(checkpoint: Path) -> None:
    model = load(checkpoint, torch.float64)
    ids = token_ids(20)
    every = Runner(model).step({0: ids})
    runner = Runner(model)
    tables = {group.name: [[5, 2]] for group in model.info.kv_groups}
    for rows in ([19], [3, 0, 7], []):
        batch = pack_batch([(ids, 0)], tables, logits_rows=rows)
        found = model.forward(batch, runner.pools)
        assert found.shape == (len(rows), checkpoints.VOCAB)
        torch.testing.assert_close(found, every[rows], rtol=0, atol=1e-9)


def test_bf16_stays_near_fp32(checkpoint: Path) -> None:
    ids = token_ids()
    exact = Runner(load(checkpoint, torch.float32)).step({0: ids})
    rounded = Runner(load(checkpoint, torch.bfloat16)).step({0: ids})
    assert rounded.dtype == torch.float32
    correlation = torch.corrcoef(torch.stack((exact.flatten(), rounded.flatten())))[0, 1]
    assert correlation > 0.99
