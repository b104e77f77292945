"""MiniMax-M2: a norm over all query heads together and one over all key heads, partly rotated heads, a sigmoid router
with a bias for the choice, no shared expert and no dense layer.
"""

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
    pre_norm_layer,
    read_heads,
    read_info,
    refuse_settings,
)
from forebay.models.weights import Weights


def read_shape(config: Config) -> AttentionShape:
    """From a configuration of type minimax_m2. Published ones name the rotated values, `rotary_dim`."""
    sizes = read_heads(config, head_dim=128)
    refuse_settings(config, use_qk_norm=True, use_routing_bias=True)
    if config.text("scoring_func", "sigmoid") != "sigmoid" or config.count("shared_intermediate_size", 0):
        raise config.unsupported("scoring_func other than sigmoid and shared experts are not supported in this family")
    kinds = config.get("attn_type_list", [])
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise config.unsupported("attn_type_list other than 1 (linear attention) is not supported in this family")
    if config.text("qk_norm_type", "per_layer") != "per_layer":
        raise config.unsupported(f"qk_norm_type {config.get('qk_norm_type')!r} is not supported in this family")
    rotated = config.size("rotary_dim", sizes.head_dim)
    return AttentionShape(
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, sizes.head_dim, theta=5_000_000.0, partial=rotated / sizes.head_dim),
        qk_norm="whole",
    )


def minimax_m2_info(config: Config) -> ModelInfo:
    """Facts of a minimax_m2 configuration."""
    shape = read_shape(config)
    group = shape.group(range(config.size("num_hidden_layers")))
    context = shape.rope.reach(config.size("max_position_embeddings"))
    return read_info(config, "minimax_m2", [group], shape.rope.describe("full"), context)


def build_minimax_m2(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape, info = read_shape(config), minimax_m2_info(config)

    def layer(index: int) -> Layer:
        attention = build_attention(shape, info.kv_groups[0], index, weights)
        mlp = _moe(config, weights, f"layers.{index}.block_sparse_moe")
        return pre_norm_layer(weights, index, shape.hidden, shape.eps, attention=attention, mlp=mlp)

    return build_decoder(config, info, weights, shape.eps, layer)


def _moe(config: Config, weights: Weights, at: str) -> MLP:
    hidden, experts = config.size("hidden_size"), config.size("num_local_experts")
    routing = Routing(config.size("num_experts_per_tok"), "sigmoid", renormalise=True)
    router = Router(
        weights.exact(f"{at}.gate.weight", experts, hidden),
        check_routing(config, routing, experts),
        choice_bias=weights.exact(f"{at}.e_score_correction_bias", experts),
    )
    ffn = config.size("intermediate_size")
    return gated_moe(weights, router, GatedExperts(f"{at}.experts", experts, hidden, ffn, names=("w1", "w3", "w2")))
