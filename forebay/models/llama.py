"""Llama, Qwen2 and Qwen3, dense: pre-norm layers, gated SiLU, rotary positions.

Qwen2 has biases on q, k and v, Qwen3 a norm on every query and key head.
"""

from __future__ import annotations

from forebay.models.base import CausalLM, ModelInfo
from forebay.models.config import Config
from forebay.models.layers import Layer
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
    """From a configuration of type llama, qwen2 or qwen3."""
    family, sizes = config.text("model_type"), read_heads(config)
    windowed = () if family == "llama" else ("sliding_window",)  # which Qwen's have, without using it
    refuse_settings(config, computed=windowed, use_sliding_window=False)
    bias = config.flag("attention_bias", family == "qwen2")
    return AttentionShape(
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, sizes.head_dim, theta=10_000.0),
        qkv_bias=bias,
        out_bias=bias and family != "qwen2",
        qk_norm="head" if family == "qwen3" else "none",
    )


def llama_info(config: Config) -> ModelInfo:
    """Facts of a llama, qwen2 or qwen3 configuration."""
    shape = read_shape(config)
    group = shape.group(range(config.size("num_hidden_layers")))
    context = shape.rope.reach(config.size("max_position_embeddings"))
    return read_info(config, config.text("model_type"), [group], shape.rope.describe("full"), context)


def build_llama(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape, info = read_shape(config), llama_info(config)
    ffn, bias = config.size("intermediate_size"), config.flag("mlp_bias", False)

    def layer(index: int) -> Layer:
        return pre_norm_layer(
            weights,
            index,
            shape.hidden,
            shape.eps,
            attention=build_attention(shape, info.kv_groups[0], index, weights),
            mlp=dense_mlp(weights, f"layers.{index}.mlp", shape.hidden, ffn, bias=bias),
        )

    return build_decoder(config, info, weights, shape.eps, layer)
