"""Qwen3 with experts: Qwen3's attention, a softmax router, no shared expert."""

from __future__ import annotations

from forebay.kernels.moe import Routing
from forebay.models.base import CausalLM, ModelInfo
from forebay.models.config import Config
from forebay.models.expert_weights import GatedExperts
from forebay.models.layers import Layer
from forebay.models.moe import MLP, Router, check_routing, gated_moe
from forebay.models.rope_config import read_rope
from forebay.models.standard import (
    AttentionShape,
    build_attention,
    build_decoder,
    dense_mlp,
    pre_norm_layer,
    read_heads,
    read_info,
    refuse_settings,
)
from forebay.models.weights import Weights


def read_shape(config: Config) -> AttentionShape:
    """From a configuration of type qwen3_moe."""
    sizes = read_heads(config)
    refuse_settings(config, computed=("sliding_window",), use_sliding_window=False)
    bias = config.flag("attention_bias", False)
    return AttentionShape(
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, sizes.head_dim, theta=10_000.0),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
    )


def qwen3_moe_info(config: Config) -> ModelInfo:
    """Facts of a qwen3_moe configuration."""
    shape = read_shape(config)
    group = shape.group(range(config.size("num_hidden_layers")))
    context = shape.rope.reach(config.size("max_position_embeddings"))
    return read_info(config, "qwen3_moe", [group], shape.rope.describe("full"), context)


def _sparse_layers(config: Config) -> frozenset[int]:
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise config.broken(f"mlp_only_layers must be a list, found {dense!r}")
    layers, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step", 1)
    return frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def build_qwen3_moe(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape, info, sparse = read_shape(config), qwen3_moe_info(config), _sparse_layers(config)

    def layer(index: int) -> Layer:
        attention = build_attention(shape, info.kv_groups[0], index, weights)
        at = f"layers.{index}.mlp"
        mlp = _moe(config, weights, at) if index in sparse else _dense(config, weights, at)
        return pre_norm_layer(weights, index, shape.hidden, shape.eps, attention=attention, mlp=mlp)

    return build_decoder(config, info, weights, shape.eps, layer)


def _dense(config: Config, weights: Weights, at: str) -> MLP:
    return dense_mlp(weights, at, config.size("hidden_size"), config.size("intermediate_size"))


def _moe(config: Config, weights: Weights, at: str) -> MLP:
    hidden, experts = config.size("hidden_size"), config.size("num_experts", config.get("num_local_experts"))
    routing = Routing(config.size("num_experts_per_tok"), "softmax", renormalise=config.flag("norm_topk_prob", False))
    router = Router(weights.exact(f"{at}.gate.weight", experts, hidden), check_routing(config, routing, experts))
    ffn = config.size("moe_intermediate_size")
    return gated_moe(weights, router, GatedExperts(f"{at}.experts", experts, hidden, ffn))
