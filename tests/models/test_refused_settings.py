"""A configuration that asks for something that its family doesn't compute is refused by the setting's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forebay.models.base import ModelInfo
from forebay.models.config import Config
from forebay.models.errors import UnsupportedArchitecture
from forebay.models.registry import find_family, text_config
from tests.parity.families import FAMILIES

FOREIGN: Mapping[str, object] = {
    "alibi": True,
    "attention_chunk_size": 8192,
    "attention_multiplier": 0.0078125,
    "attn_logit_softcapping": 50.0,
    "clip_qkv": 8.0,
    "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0,
    "is_causal": False,
    "logits_scaling": 16.0,
    "no_rope_layers": [1, 1, 0, 1],
    "num_kv_shared_layers": 2,
    "residual_multiplier": 0.22,
    "scale_emb": 12,
    "sliding_window": 4096,
    "use_bidirectional_attention": True,
}
COMPUTED = {
    "gemma3_text": {"sliding_window", "final_logit_softcapping"},
    "gpt_oss": {"sliding_window"},
    "qwen2": {"sliding_window"},  # not used without use_sliding_window
    "qwen3": {"sliding_window"},
    "qwen3_moe": {"sliding_window"},
}
OF_ONE_FAMILY = [
    ("llama", "use_sliding_window", True),
    ("qwen2", "use_sliding_window", True),
    ("qwen2", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("llama", "layer_types", ["linear_attention"] * 3),
    ("deepseek_v3", "mlp_bias", True),
    ("deepseek_v3", "layer_types", "all"),
    ("minimax_m2", "attn_type_list", [1, 0, 1]),
    ("minimax_m2", "qk_norm_type", "per_head"),
    ("minimax_m2", "layernorm_full_attention_beta", 0.5),
    ("minimax_m2", "use_routing_bias", False),
    ("minimax_m2", "scoring_func", "softmax"),
    ("minimax_m2", "shared_intermediate_size", 64),
    ("gemma3_text", "attention_bias", True),
    ("glm4_moe", "scoring_func", "softmax"),
    ("glm4_moe", "topk_method", "greedy"),
    ("gpt_oss", "hidden_act", "gelu"),
]
IN_ROUTERS = [
    ("deepseek_v2", "scoring_func", "sigmoid"),
    ("deepseek_v2", "topk_method", "noaux_tc"),
    ("deepseek_v2", "norm_topk_prob", True),
    ("deepseek_v2", "moe_layer_freq", 2),
    ("deepseek_v3", "scoring_func", "softmax"),
    ("deepseek_v3", "topk_method", "greedy"),
]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Of every family a small configuration, as transformers writes it."""
    folder = tmp_path_factory.mktemp("configs")
    paths = {name: family.make(folder / name) / "config.json" for name, family in FAMILIES.items()}
    return {name: Config(json.loads(path.read_text()), path) for name, path in paths.items()}


def info(config: Config) -> ModelInfo:
    return find_family(config).info(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_other_models_compute_is_refused(family: str, configs: dict[str, Config]) -> None:
    wanted = info(configs[family])
    for name in FOREIGN.keys() - COMPUTED.get(family, set()):
        with pytest.raises(UnsupportedArchitecture, match=f"{name} .*not supported"):
            info(configs[family].having(**{name: FOREIGN[name]}))
    neutral = {"embedding_multiplier": 1.0, "is_causal": True, "no_rope_layers": [], "clip_qkv": None}
    assert info(configs[family].having(**neutral)) == wanted, "without an effect it may be there"


@pytest.mark.parametrize(("family", "name", "value"), OF_ONE_FAMILY)
def test_what_a_family_does_not_compute_is_refused(
    family: str, name: str, value: object, configs: dict[str, Config]
) -> None:
    said = {"use_routing_bias": "use_routing_bias", "attention_bias": "attention bias", "hidden_act": "gelu"}
    with pytest.raises(UnsupportedArchitecture, match=said.get(name, "not supported")):
        info(configs[family].having(**{name: value}))


@pytest.mark.parametrize(("family", "name", "value"), IN_ROUTERS)
def test_another_router_is_refused(family: str, name: str, value: object, configs: dict[str, Config]) -> None:
    from forebay.models.deepseek import read_routing

    with pytest.raises(UnsupportedArchitecture, match="not supported"):
        read_routing(configs[family].having(**{name: value}))


def test_a_whole_models_tie_goes_before_its_text_parts() -> None:
    text: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": False}
    outer = {"model_type": "whatever", "text_config": text}
    at = Path("config.json")
    assert text_config(Config(outer, at)).flag("tie_word_embeddings", True) is False
    assert text_config(Config(outer | {"tie_word_embeddings": True}, at)).flag("tie_word_embeddings", False) is True
