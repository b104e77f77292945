"""MiniMax-M3 as it is published, inside of a multimodal checkpoint and with other names, is what transformers saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.errors import ConfigError
from forebay.models.loading import load_model, read_info
from forebay.models.ranks import Alone
from tests import checkpoints
from tests.parity.reference import Runner

CPU = torch.device("cpu")
RENAMED = {
    ".mlp.gate.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias",
    ".mlp.gate.weight": ".block_sparse_moe.gate.weight",
    ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
    ".self_attn.indexer.q_": ".self_attn.index_q_",
    ".self_attn.indexer.k_": ".self_attn.index_k_",
}


def publish(path: Path) -> Path:
    """The checkpoint at `path` in the published spelling, in a directory beside it."""
    tensors: dict[str, torch.Tensor] = {}
    for saved, tensor in load_file(path / "model.safetensors").items():
        name = saved
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        name = f"language_model.{name}"
        if ".mlp.experts." in name:
            of_layer = name.partition(".mlp.")[0] + ".block_sparse_moe.experts"
            for index, expert in enumerate(tensor):
                if name.endswith("down_proj"):
                    tensors[f"{of_layer}.{index}.w2.weight"] = expert.contiguous()
                else:
                    gate, up = expert.chunk(2)
                    tensors[f"{of_layer}.{index}.w1.weight"] = gate.contiguous()
                    tensors[f"{of_layer}.{index}.w3.weight"] = up.contiguous()
        elif ".gate_up_proj." in name:
            for side, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                tensors[name.replace("gate_up_proj", side)] = half.contiguous()
        else:
            tensors[name] = tensor
    config = json.loads((path / "config.json").read_text())
    config["sparse_attention_config"] = {
        "sparse_num_index_heads": config.pop("index_n_heads"), "sparse_index_dim": config.pop("index_head_dim"),
        "sparse_block_size": config.pop("index_block_size"), "sparse_topk_blocks": config.pop("index_topk_blocks"),
        "sparse_local_block": config.pop("index_local_blocks"),
        "sparse_attention_freq": [int(kind != "full_attention") for kind in config.pop("layer_types")],
    }  # fmt: skip
    config["moe_layer_freq"] = [int(kind == "sparse") for kind in config.pop("mlp_layer_types")]
    config["hidden_act"] = "swigluoai"
    published = path.with_name("published")
    published.mkdir()
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    (published / "config.json").write_text(json.dumps({"model_type": "minimax_m3_vl", "text_config": config}))
    return published


def test_published_names_and_settings_mean_the_same(tmp_path: Path) -> None:
    path = checkpoints.tiny_minimax_m3(tmp_path / "saved")
    published = publish(path)
    assert read_info(published) == read_info(path)
    found, wanted = (
        Runner(load_model(where, dtype=torch.float32, device=CPU)).step({0: list(range(4, 94))})
        for where in (published, path)
    )
    assert torch.equal(found, wanted)


def test_each_kv_head_has_its_own_choice_and_a_token_one_key(tmp_path: Path) -> None:
    info = read_info(checkpoints.tiny_minimax_m3(tmp_path))
    values, keys = info.kv_groups
    assert (values.kind, values.layers, values.kv_heads) == ("full", (0, 1, 2, 3), 2)
    assert (keys.kind, keys.layers, keys.kv_heads, keys.head_dim) == ("indexer", (1, 2, 3), 1, 20)
    assert info.sparse is not None
    assert (info.sparse.group, info.sparse.block, info.sparse.top_k) == ("full", 12, 3)
    assert info.sparse.leaders == (-1, 1, 2, 3)


def test_positions_are_not_shared_out_even_where_every_layer_sees_all(tmp_path: Path) -> None:
    path = checkpoints.tiny_minimax_m3(tmp_path, layer_types=["full_attention"] * 4)
    with pytest.raises(ConfigError, match="layers need all positions"):
        load_model(path, dtype=torch.float32, device=CPU, ranks=Alone(context=object()))  # type: ignore[arg-type]
