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
from tests.parity.reference import Runner

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


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
