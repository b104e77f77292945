"""DeepSeek V2 and V3: latent attention, which is a cache group of its own kind, and group-limited experts.

V2 routes by softmax and takes a group's best expert for its worth, V3 by sigmoid with a bias for the choice and a
group's best two. The first layers are dense. The layers behind the last, which predict further tokens, aren't used.
"""

from __future__ import annotations

from forebay.kernels.moe import Routing
from forebay.models.base import CausalLM, ModelInfo
from forebay.models.config import Config
from forebay.models.latent import LatentAttention, LatentShape
from forebay.models.layers import Layer
from forebay.models.moe import refuse_other_routers, sparse_mlp
from forebay.models.rope import Rope, yarn_magnitude
from forebay.models.rope_config import read_rope, rope_settings
from forebay.models.standard import build_decoder, pre_norm_layer, read_info, refuse_settings
from forebay.models.weights import Weights


def read_shape(config: Config) -> LatentShape:
    """From a configuration of type deepseek_v2 or deepseek_v3."""
    third = config.text("model_type") == "deepseek_v3"
    refuse_settings(config)
    if third and config.flag("mlp_bias", False):
        raise config.unsupported("mlp_bias = true is not supported in this family")
    nope, rope = config.size("qk_nope_head_dim", 128), read_rope(config, config.size("qk_rope_head_dim", 64), theta=1e4)
    return LatentShape(
        hidden=config.size("hidden_size"),
        heads=config.size("num_attention_heads"),
        q_rank=config.size("q_lora_rank") if "q_lora_rank" in config else None,
        rank=config.size("kv_lora_rank", 512),
        nope=nope,
        value=config.size("v_head_dim", 128),
        rope=rope,
        scale=(nope + rope.dim) ** -0.5 * sharpness(config, rope),
        pairs=config.flag("rope_interleave", True) if third else True,
        bias=config.flag("attention_bias", False),
    )


def sharpness(config: Config, rope: Rope) -> float:
    """Of scores: YaRN's magnitude, of both sides of a score, if the configuration wants it for all dimensions."""
    settings = rope_settings(config)
    if "factor" not in settings or not settings.get("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(settings.number("factor"), settings.number("mscale_all_dim")) ** 2


def read_routing(config: Config) -> Routing:
    """Of a configuration of type deepseek_v2 or deepseek_v3."""
    third = config.text("model_type") == "deepseek_v3"
    top_k = config.size("num_experts_per_tok", 8 if third else None)
    scale = config.number("routed_scaling_factor", 2.5 if third else 1.0)
    groups, kept = config.size("n_group", 8 if third else 1), config.size("topk_group", 4 if third else 1)
    if config.size("moe_layer_freq", 1) != 1:
        raise config.unsupported("experts in only some of the later layers are not supported in this family")
    if third:
        refuse_other_routers(config)
        normed = config.flag("norm_topk_prob", True)
        return Routing(top_k, "sigmoid", renormalise=normed, scale=scale, groups=groups, kept_groups=kept)
    refuse_settings(config, norm_topk_prob=False)
    if config.text("scoring_func", "softmax") != "softmax":
        raise config.unsupported(f"scoring_func {config.get('scoring_func')!r} is not supported in this family")
    match config.text("topk_method", "greedy"):
        case "greedy":
            return Routing(top_k, "softmax", scale=scale)
        case "group_limited_greedy":
            return Routing(top_k, "softmax", scale=scale, groups=groups, kept_groups=kept, group_worth="max")
        case method:
            raise config.unsupported(f"topk_method {method!r} is not supported in this family")


def deepseek_info(config: Config) -> ModelInfo:
    """Facts of a deepseek_v2 or deepseek_v3 configuration."""
    shape = read_shape(config)
    group = shape.group(config.size("num_hidden_layers"))
    rope = shape.rope.describe("latent") | {"latent.pairs": shape.pairs}
    context = shape.rope.reach(config.size("max_position_embeddings"))
    return read_info(config, config.text("model_type"), [group], rope, context)


def build_deepseek(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape, info, routing = read_shape(config), deepseek_info(config), read_routing(config)
    third = info.family == "deepseek_v3"
    eps, bias = config.number("rms_norm_eps", 1e-6), config.flag("mlp_bias", False)
    dense, shared = (3, 1) if third else (0, 2)

    def layer(index: int) -> Layer:
        attention = LatentAttention(shape, info.kv_groups[0], index, weights)
        mlp = sparse_mlp(config, weights, index, routing, dense_layers=dense, shared=shared, bias=bias)
        return pre_norm_layer(weights, index, shape.hidden, eps, attention=attention, mlp=mlp)

    return build_decoder(config, info, weights, eps, layer)
