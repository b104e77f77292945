"""Whatever is wrong with a checkpoint, the error says what and what to do; nothing else comes through."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.models.errors import CheckpointBroken, ModelError, ModelNotFound, UnsupportedArchitecture
from forebay.models.loading import load_model, read_info
from tests import checkpoints
from tests.parity.reference import Runner, reference_logits

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def load(path: Path, dtype: torch.dtype = torch.float32) -> object:
    return load_model(path, dtype=dtype, device=CPU)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoints.tiny_qwen3(tmp_path / "model")


def edit_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def edit_weights(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS)


def test_facts_come_without_weights(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    info = read_info(checkpoint)
    assert (info.family, info.vocab_size, info.hidden_size, info.num_layers) == ("qwen3", 512, 64, 3)
    assert (info.max_context, info.bos_id, info.eos_ids) == (4096, 2, (1,))
    (group,) = info.kv_groups
    assert (group.kind, group.layers, group.kv_heads, group.head_dim) == ("full", (0, 1, 2), 2, 24)
    assert group.granule_bytes(torch.bfloat16) == 3 * 2 * 2 * 16 * 24 * 2


def test_gemma3_has_two_cache_groups(tmp_path: Path) -> None:
    info = read_info(checkpoints.tiny_gemma3(tmp_path))
    full, window = info.kv_groups
    assert (full.name, full.kind, full.layers, full.window) == ("full", "full", (2, 5), None)
    assert (window.name, window.kind, window.layers, window.window) == ("window", "window", (0, 1, 3, 4), 40)


def test_settings_that_change_keys_are_in_the_facts(tmp_path: Path) -> None:
    plain = checkpoints.tiny_llama(tmp_path / "plain")
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    scaled = checkpoints.tiny_llama(tmp_path / "scaled", rope_parameters=scaling)
    assert read_info(plain).rope != read_info(scaled).rope


def test_older_files_keep_rotary_settings_at_the_top(tmp_path: Path) -> None:
    checkpoint = checkpoints.tiny_gemma3(tmp_path)
    wanted = read_info(checkpoint)
    edit_config(checkpoint, rope_parameters="absent", rope_theta=1_000_000.0, rope_local_base_freq=10_000.0)
    assert read_info(checkpoint) == wanted
    edit_config(checkpoint, rope_local_base_freq=20_000.0)
    assert read_info(checkpoint).rope["window.theta"] == 20_000.0


def test_layer_types_may_be_left_to_the_pattern(tmp_path: Path) -> None:
    checkpoint = checkpoints.tiny_gemma3(tmp_path)
    wanted = read_info(checkpoint)
    edit_config(checkpoint, layer_types="absent", sliding_window_pattern=3)
    assert read_info(checkpoint) == wanted


def test_generation_settings_know_more_ends(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    assert read_info(checkpoint).eos_ids == (1, 106)


def test_the_text_part_of_a_multimodal_checkpoint_is_used(tmp_path: Path) -> None:
    checkpoint = checkpoints.tiny_gemma3(tmp_path)
    wanted = Runner(load_model(checkpoint, dtype=torch.float32, device=CPU)).step({0: [5, 6, 7]})
    text = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    edit_weights(checkpoint, rename)
    found = Runner(load_model(checkpoint, dtype=torch.float32, device=CPU)).step({0: [5, 6, 7]})
    assert torch.equal(found, wanted)


def test_progress_is_told(checkpoint: Path) -> None:
    told: list[tuple[str, int, int]] = []
    load_model(checkpoint, dtype=torch.float32, device=CPU, progress=lambda *step: told.append(step))
    stages, done, total = zip(*told, strict=True)
    assert set(stages) == {"loading weights"}
    assert list(done) == sorted(done)
    assert done[-1] == total[-1]


def test_loading_keeps_nothing_mapped(checkpoint: Path) -> None:
    model = load_model(checkpoint, dtype=torch.float32, device=CPU)
    with (checkpoint / WEIGHTS).open("r+b") as file:
        file.truncate(100)  # would kill the process if a weight were still a view of the file
    Runner(model).step({0: [5, 6, 7]})


@pytest.mark.parametrize("what", ["missing", "empty", "config-only", "weights-only"])
def test_nothing_there(what: str, checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint
    if what == "missing":
        path = tmp_path / "nowhere"
    elif what == "empty":
        path = tmp_path / "empty"
        path.mkdir()
    else:
        (checkpoint / (WEIGHTS if what == "config-only" else "config.json")).unlink()
    with pytest.raises(ModelNotFound, match="pass"):
        load(path)


def test_safetensors_cut_anywhere_are_refused(checkpoint: Path) -> None:
    whole = (checkpoint / WEIGHTS).read_bytes()
    for cut in (0, 4, 8, 9, 100, 2000, len(whole) // 2, len(whole) - 1):
        (checkpoint / WEIGHTS).write_bytes(whole[:cut])
        with pytest.raises(CheckpointBroken, match="download it again"):
            load(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', "\x00\xff", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(text: str, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(CheckpointBroken, match=r"config\.json"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model_type": "mamba2"}, UnsupportedArchitecture),
        ({"model_type": "absent"}, UnsupportedArchitecture),
        ({"model_type": 5}, CheckpointBroken),
        ({"hidden_size": "absent"}, CheckpointBroken),
        ({"hidden_size": "64"}, CheckpointBroken),
        ({"hidden_size": -64}, CheckpointBroken),
        ({"hidden_size": 32}, CheckpointBroken),
        ({"num_hidden_layers": 4}, CheckpointBroken),
        ({"num_hidden_layers": True}, CheckpointBroken),
        ({"num_key_value_heads": 3}, CheckpointBroken),
        ({"head_dim": 23}, CheckpointBroken),
        ({"vocab_size": 511}, CheckpointBroken),
        ({"eos_token_id": "end"}, CheckpointBroken),
        ({"hidden_act": "relu"}, UnsupportedArchitecture),
        ({"use_sliding_window": True}, UnsupportedArchitecture),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, UnsupportedArchitecture),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, CheckpointBroken),
        ({"rope_parameters": {"rope_type": "dynamic"}}, CheckpointBroken),
        ({"rope_parameters": {"rope_type": "linear"}}, CheckpointBroken),
        ({"rope_parameters": [1]}, CheckpointBroken),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, UnsupportedArchitecture),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    change: dict[str, Any], error: type[ModelError], checkpoint: Path
) -> None:
    edit_config(checkpoint, **change)
    with pytest.raises(error) as caught:
        load(checkpoint)
    assert str(checkpoint) in str(caught.value)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]

    edit_weights(checkpoint, drop)
    with pytest.raises(CheckpointBroken, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(checkpoint)


def test_a_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:60].clone()

    edit_weights(checkpoint, cut)
    with pytest.raises(CheckpointBroken, match=r"model\.norm\.weight.*\[60\].*\[64\]"):
        load(checkpoint)


def test_quantised_safetensors_are_refused(checkpoint: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    edit_weights(checkpoint, quantise)
    with pytest.raises(UnsupportedArchitecture, match="quantised safetensors"):
        load(checkpoint)


def test_half_precision_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match="bfloat16, float32 or float64"):
        load(checkpoint, torch.float16)


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": []}, {"weight_map": {"a": 5}}, {"weight_map": {"a": "gone.safetensors"}}],
)
def test_an_index_that_does_not_fit_is_refused(index: dict[str, Any], checkpoint: Path) -> None:
    (checkpoint / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointBroken):
        load(checkpoint)


def test_an_index_reaches_no_other_directory(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "../other/model.safetensors"}}
    (checkpoint / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointBroken, match="outside its directory"):
        load(checkpoint)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return checkpoints.tiny_llama(tmp_path / "model", shard_size="100KB")


def test_a_tensor_that_only_the_index_has_is_named(sharded: Path) -> None:
    """Such as the head: nothing else takes its place."""
    index = json.loads((sharded / INDEX).read_text())
    file = sharded / index["weight_map"]["lm_head.weight"]
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointBroken, match=rf"{file.name} has no tensor 'lm_head.weight'.*download it again"):
        load(sharded)


def test_the_index_says_which_of_two_copies_is_meant(sharded: Path) -> None:
    wanted = Runner(load_model(sharded, dtype=torch.float32, device=CPU)).step({0: [5, 6, 7]})
    index = json.loads((sharded / INDEX).read_text())
    ours = index["weight_map"]["model.norm.weight"]
    for other in {*index["weight_map"].values()} - {ours}:
        save_file(load_file(sharded / other) | {"model.norm.weight": torch.zeros(64)}, sharded / other)
    found = Runner(load_model(sharded, dtype=torch.float32, device=CPU)).step({0: [5, 6, 7]})
    assert torch.equal(found, wanted)
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointBroken, match=r"'model\.norm\.weight'.* already"):
        load(sharded)


def test_two_names_for_one_tensor_are_refused(checkpoint: Path) -> None:
    def twice(tensors: dict[str, torch.Tensor]) -> None:
        tensors["language_model.model.norm.weight"] = tensors["model.norm.weight"] * 2

    edit_weights(checkpoint, twice)
    with pytest.raises(CheckpointBroken, match="of one checkpoint"):
        load(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias", "model.layers.0.self_attn.sinks", "lm_head.bias", "model.norm.bias",
        "model.layers.2.self_attn.indexer.wk.weight", "model.layers.0.mlp.experts.0.up_proj.weight",
    ],
)  # fmt: skip
def test_a_tensor_that_the_configuration_does_not_ask_for_is_named(name: str, checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(UnsupportedArchitecture, match=f"tensor '{name}' has no part in qwen3"):
        load(checkpoint)


def test_what_is_not_of_the_model_may_be_there(checkpoint: Path) -> None:
    """Layers that predict further tokens, towers for pictures, and what is computed anew."""
    more = (
        "model.layers.3.mlp.up_proj.weight", "vision_tower.layers.0.mlp.up_proj.weight", "mtp.norm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.k_scale",
        "model.layers.1.mlp.up_proj.input_scale",
    )  # fmt: skip
    edit_weights(checkpoint, lambda tensors: tensors.update({name: torch.ones(2) for name in more}))
    load(checkpoint)


def test_a_head_of_its_own_must_be_there(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointBroken, match=r"no tensor 'lm_head\.weight'"):
        load(checkpoint)
    edit_config(checkpoint, tie_word_embeddings=True)
    load(checkpoint)


@pytest.mark.parametrize("alike", [True, False])
def test_a_tied_head_that_is_there_all_the_same_counts(alike: bool, checkpoint: Path) -> None:
    """As it does for transformers."""
    edit_config(checkpoint, tie_word_embeddings=True)
    if alike:
        edit_weights(checkpoint, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    found = Runner(load_model(checkpoint, dtype=torch.float32, device=CPU)).step({0: [5, 6, 7]})
    torch.testing.assert_close(found, reference_logits(checkpoint, [5, 6, 7], torch.float32), rtol=0, atol=1e-4)
