"""GLM-4.5 and its kin: half of every head is rotated, a sigmoid router with a bias for the choice, shared experts.

The first layers are dense. The layers behind the last, which predict further tokens, aren't used.
"""

from __future__ import annotations

from forebay.kernels.moe import Routing
from forebay.models.base import CausalLM, ModelInfo
from forebay.models.config import Config
from forebay.models.layers import Layer
from forebay.models.moe import refuse_other_routers, sparse_mlp
from forebay.models.rope_config import read_rope
from forebay.models.standard import (
    AttentionShape,
    build_attention,
    build_decoder,
    pre_norm_layer,
    read_heads,
    read_info,
    refuse_settings,
)
from forebay.models.weights import Weights


def read_shape(config: Config) -> AttentionShape:
    """From a configuration of type glm4_moe."""
    sizes = read_heads(config)
    refuse_settings(config)
    refuse_other_routers(config)
    return AttentionShape(
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        eps=config.number("rms_norm_eps", 1e-5),
        rope=read_rope(config, sizes.head_dim, theta=10_000.0, partial=0.5),
        qkv_bias=config.flag("attention_bias", False),
        qk_norm="head" if config.flag("use_qk_norm", False) else "none",
    )


def glm4_moe_info(config: Config) -> ModelInfo:
    """Facts of a glm4_moe configuration."""
    shape = read_shape(config)
    group = shape.group(range(config.size("num_hidden_layers")))
    context = shape.rope.reach(config.size("max_position_embeddings"))
    return read_info(config, "glm4_moe", [group], shape.rope.describe("full"), context)


def build_glm4_moe(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape, info = read_shape(config), glm4_moe_info(config)
    routing = Routing(
        config.size("num_experts_per_tok"),
        "sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        groups=config.size("n_group", 1),
        kept_groups=config.size("topk_group", 1),
    )

    def layer(index: int) -> Layer:
        attention = build_attention(shape, info.kv_groups[0], index, weights)
        mlp = sparse_mlp(config, weights, index, routing, dense_layers=1)
        return pre_norm_layer(weights, index, shape.hidden, shape.eps, attention=attention, mlp=mlp)

    return build_decoder(config, info, weights, shape.eps, layer)
