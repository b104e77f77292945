"""gpt-oss: sliding and full layers in turn, attention sinks, biases everywhere, experts with a clamped activation.

The sliding layers and the full ones are two cache groups. Published weights hold the experts in MXFP4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from forebay.kernels.experts import Activation, Stack
from forebay.kernels.formats import MX_GROUP
from forebay.kernels.moe import Routing
from forebay.models.base import CausalLM, KVGroup, ModelInfo
from forebay.models.config import Config
from forebay.models.expert_weights import StackedProjection, clear, stacked, stacks, widened
from forebay.models.experts import Experts, ExpertShare, PackedExperts, StackedExperts, expert_share
from forebay.models.layers import Layer, Linear
from forebay.models.moe import MLP, MoE, Router, check_routing
from forebay.models.ranks import share_heads
from forebay.models.rope_config import read_rope
from forebay.models.standard import (
    FULL,
    SLIDING,
    AttentionShape,
    build_attention,
    build_decoder,
    pre_norm_layer,
    read_heads,
    read_info,
    read_kinds,
    refuse_settings,
)
from forebay.models.weights import Weights

_ONE = 127
"""A scale of one in MXFP4."""


@dataclass(frozen=True, slots=True)
class GptOssShape:
    """`kinds` says of every layer whether it is full or sliding, with `window`."""

    attention: AttentionShape
    kinds: tuple[str, ...]
    window: int


def read_shape(config: Config) -> GptOssShape:
    """From a configuration of type gpt_oss."""
    sizes = read_heads(config, head_dim=64)
    refuse_settings(config, computed=("sliding_window", "layer_types"))
    bias = config.flag("attention_bias", True)
    attention = AttentionShape(
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        eps=config.number("rms_norm_eps", 1e-5),
        rope=read_rope(config, sizes.head_dim, theta=150_000.0),
        qkv_bias=bias,
        out_bias=bias,
    )
    default = [FULL if index % 2 else SLIDING for index in range(config.size("num_hidden_layers"))]
    return GptOssShape(attention, read_kinds(config, default), config.size("sliding_window", 128))


def _groups(shape: GptOssShape) -> dict[str, KVGroup]:
    """Layer type -> cache group. A model may have only one of them."""
    layers = {kind: [i for i, k in enumerate(shape.kinds) if k == kind] for kind in (FULL, SLIDING)}
    windows = {FULL: None, SLIDING: shape.window}
    return {kind: shape.attention.group(layers[kind], windows[kind]) for kind in layers if layers[kind]}


def gpt_oss_info(config: Config) -> ModelInfo:
    """Facts of a gpt_oss configuration."""
    shape = read_shape(config)
    rope = shape.attention.rope
    context = rope.reach(config.size("max_position_embeddings"))
    return read_info(config, "gpt_oss", _groups(shape).values(), rope.describe("full"), context)


def build_gpt_oss(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape = read_shape(config)
    attention, groups = shape.attention, _groups(shape)

    def layer(index: int) -> Layer:
        mine = share_heads(attention.heads, attention.kv_heads, weights.ranks).q
        sinks = weights.exact(f"layers.{index}.self_attn.sinks", attention.heads, cut={0: mine})
        mixer = build_attention(attention, groups[shape.kinds[index]], index, weights, sinks=sinks)
        mlp = _moe(config, weights, f"layers.{index}.mlp")
        return pre_norm_layer(weights, index, attention.hidden, attention.eps, attention=mixer, mlp=mlp)

    return build_decoder(config, gpt_oss_info(config), weights, attention.eps, layer)


def _moe(config: Config, weights: Weights, at: str) -> MLP:
    hidden, experts = config.size("hidden_size"), config.size("num_local_experts", config.get("num_experts"))
    top_k = config.size("num_experts_per_tok", config.get("experts_per_token"))
    router = Router(
        weights.exact(f"{at}.router.weight", experts, hidden),
        check_routing(config, Routing(top_k, "top_softmax"), experts),
        bias=weights.exact(f"{at}.router.bias", experts),
    )
    ffn = config.size("intermediate_size")
    ups = StackedProjection(weights, f"{at}.experts.gate_up_proj", experts, 2 * ffn, hidden)
    downs = StackedProjection(weights, f"{at}.experts.down_proj", experts, hidden, ffn)
    act = Activation("clamped", config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    mine = expert_share(experts, ffn, weights.ranks)
    return MoE(router, _experts(weights, ups, downs, mine, act), ranks=weights.ranks)


def _experts(
    weights: Weights, ups: StackedProjection, downs: StackedProjection, mine: ExpertShare, act: Activation
) -> Experts:
    columns, hidden = mine.columns, range(downs.out)
    # Gate and up alternate, so a part of the columns has both of its own.
    both = range(2 * columns.start, 2 * columns.stop)
    added = ups.bias(mine.ids, both), downs.bias(mine.ids, hidden)
    if len(columns) < downs.into and weights.ranks.rank:  # the first rank's part of the sum has the bias
        added[1].zero_()
    if ups.packed and columns and stacks(weights, torch.uint8):
        return StackedExperts(*_packed_stacks(ups, downs, mine, added), act)
    pairs = zip(
        ups.matrices(mine.ids, both, range(ups.into)), downs.matrices(mine.ids, hidden, columns), strict=True
    )
    if stacks(weights):
        return StackedExperts(*stacked(pairs, added), act)
    biased = zip(pairs, *added, strict=True)
    return PackedExperts([(Linear(up, a.clone()), Linear(down, b.clone())) for (up, down), a, b in biased], act)


def _packed_stacks(
    ups: StackedProjection, downs: StackedProjection, mine: ExpertShare, added: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Stack, Stack]:
    """Experts as they are stored in MXFP4. A part of the columns is widened to whole groups: of the first projection by
    rows of zeros, so that it doesn't matter what the second one has there."""
    columns, wide = mine.columns, widened(mine.columns, MX_GROUP)
    both, part = (range(2 * r.start, 2 * r.stop) for r in (wide, columns))
    values, scales = ups.codes(mine.ids, both, range(ups.into))
    clear(values, 1, part, both)
    clear(scales, 1, part, both, _ONE)
    bias = F.pad(added[0], (part.start - both.start, both.stop - part.stop))
    down = downs.codes(mine.ids, range(downs.out), wide)
    return Stack(values, "mxfp4", scales, bias), Stack(down[0], "mxfp4", down[1], added[1])
