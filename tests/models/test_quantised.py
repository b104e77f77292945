"""Quantised weights are read to the numbers that they stand for; what isn't understood is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.models.errors import CheckpointBroken, UnsupportedArchitecture
from forebay.models.loading import load_model
from forebay.models.quantised import scale_shape, unpack_mxfp4, unscale_fp8
from tests import checkpoints

CPU = torch.device("cpu")


def load(path: Path) -> object:
    return load_model(path, dtype=torch.float32, device=CPU)


def edit(path: Path, change: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(config))


def test_all_sixteen_codes_and_the_lower_half_first() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    blocks = (codes[0::2] | (codes[1::2] << 4)).view(1, 16)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    wanted = torch.tensor([*positive, *(-value for value in positive)] * 2)
    found = unpack_mxfp4(blocks, torch.tensor([127], dtype=torch.uint8))
    assert torch.equal(found, wanted)
    assert found[8].signbit(), "minus zero stays"


@pytest.mark.parametrize(("code", "factor"), [(127, 1.0), (128, 2.0), (120, 2.0**-7), (254, 2.0**127), (1, 2.0**-126)])
def test_a_scale_is_a_power_of_two(code: int, factor: float) -> None:
    blocks = torch.full((1, 16), 0x22, dtype=torch.uint8)
    assert torch.equal(unpack_mxfp4(blocks, torch.tensor([code], dtype=torch.uint8)), torch.full((32,), factor))


def test_the_scale_that_is_no_number_spoils_its_group_alone() -> None:
    blocks = torch.full((2, 16), 0x22, dtype=torch.uint8)
    found = unpack_mxfp4(blocks, torch.tensor([255, 127], dtype=torch.uint8))
    assert found[:32].isnan().all() and (found[32:] == 1).all()


@pytest.mark.parametrize("shape", [(128, 128), (129, 128), (1, 300), (256, 257), (40, 64)])
def test_blocks_at_the_edges_are_cut(shape: tuple[int, int]) -> None:
    rows, columns = scale_shape(shape, (128, 128))
    scales = torch.arange(1.0, 1 + rows * columns).view(rows, columns)
    found = unscale_fp8(torch.ones(shape).to(torch.float8_e4m3fn), scales, (128, 128))
    for row, column in itertools.product((0, shape[0] - 1), (0, shape[1] - 1)):
        assert found[row, column] == scales[row // 128, column // 128]
    assert found.shape == shape


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    path = checkpoints.tiny_qwen3(tmp_path / "model")
    checkpoints.to_fp8(path)
    return path


def test_other_methods_are_refused(fp8: Path) -> None:
    for change in (
        {"quant_method": "gptq"},
        {"fmt": "e5m2"},
        {"weight_block_size": None},
        {"weight_block_size": [0, 8]},
    ):
        edit(fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 24]} | change)
        with pytest.raises(UnsupportedArchitecture, match="FP8"):
            load(fp8)


def test_blocks_of_another_size_than_the_scales_are_refused(fp8: Path) -> None:
    edit(fp8, {"weight_block_size": [16, 16]})
    with pytest.raises(CheckpointBroken, match="scale_inv"):
        load(fp8)


def test_values_without_scales_are_refused(fp8: Path) -> None:
    tensors = load_file(fp8 / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, fp8 / "model.safetensors")
    with pytest.raises(UnsupportedArchitecture, match="without scales"):
        load(fp8)


def test_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = checkpoints.tiny_gpt_oss(tmp_path / "model")
    checkpoints.to_mxfp4(path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][:, :, :-1].contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointBroken, match="down_proj_blocks"):
        load(path)
