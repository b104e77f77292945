"""Gemma 3, text: sliding and full layers, norms around every part, scaled embeddings, tied head.

Norm weights are stored minus one. Sliding layers have a rotary base of their own. The sliding layers and the
full ones are two cache groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.models.base import CausalLM, KVGroup, ModelInfo
from forebay.models.config import Config
from forebay.models.context import context_of, query_heads
from forebay.models.foreign import refuse_foreign
from forebay.models.kv_scales import read_kv_scales
from forebay.models.layers import Attention, Decoder, HeadNorm, RMSNorm
from forebay.models.ranks import HeadShare, held_group, share_heads
from forebay.models.rope import Rope
from forebay.models.rope_config import read_rope
from forebay.models.standard import FULL, SLIDING, build_vocabulary, columns, dense_mlp, heads_linear, read_kinds
from forebay.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Gemma3Shape:
    """Sizes and settings. `kinds` says of every layer whether it is full or sliding."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    scale: float
    window: int
    kinds: tuple[str, ...]
    full_rope: Rope
    local_rope: Rope
    logit_cap: float | None
    tied: bool


def read_shape(config: Config) -> Gemma3Shape:
    """From a configuration of type gemma3_text, or the text part of gemma3."""
    heads, head_dim = config.size("num_attention_heads"), config.size("head_dim", 256)
    kv_heads = config.size("num_key_value_heads")
    if heads % kv_heads or head_dim % 2:
        raise config.broken(f"{heads} heads, {kv_heads} KV heads of {head_dim} don't fit together")
    if config.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise config.unsupported(f"activation {config.get('hidden_activation')!r} is not supported")
    if config.flag("attention_bias", False):
        raise config.unsupported("attention bias is not supported")
    refuse_foreign(config, ("sliding_window", "layer_types", "final_logit_softcapping"))
    full, local = _read_ropes(config, head_dim)
    capped = "final_logit_softcapping" in config
    return Gemma3Shape(
        hidden=config.size("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.size("intermediate_size"),
        vocab=config.size("vocab_size", 262_208),
        eps=config.number("rms_norm_eps", 1e-6),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        window=config.size("sliding_window", 4096),
        kinds=_read_kinds(config),
        full_rope=full,
        local_rope=local,
        logit_cap=config.number("final_logit_softcapping") if capped else None,
        tied=config.flag("tie_word_embeddings", True),
    )


def _read_kinds(config: Config) -> tuple[str, ...]:
    layers = config.size("num_hidden_layers")
    every = config.size("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return read_kinds(config, [SLIDING if (i + 1) % every else FULL for i in range(layers)])


def _read_ropes(config: Config, dim: int) -> tuple[Rope, Rope]:
    """Of full and of sliding layers. Newer files nest them by layer type, older ones have two bases."""
    by_type = config.section("rope_parameters")
    if FULL in by_type or SLIDING in by_type:
        full, local = by_type.section(FULL), by_type.section(SLIDING)
        return (
            read_rope(config, dim, theta=1_000_000.0, settings=full),
            read_rope(Config({}, config.origin), dim, theta=10_000.0, settings=local),
        )
    base = config.number("rope_local_base_freq", 10_000.0)
    return read_rope(config, dim, theta=1_000_000.0), Rope(base, dim)


def gemma3_info(config: Config) -> ModelInfo:
    """Facts of a gemma3_text configuration."""
    shape = read_shape(config)
    return ModelInfo(
        family="gemma3",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_layers=len(shape.kinds),
        max_context=config.size("max_position_embeddings", 131_072),
        kv_groups=tuple(_groups(shape).values()),
        rope=shape.full_rope.describe("full") | shape.local_rope.describe("window"),
        bos_id=next(iter(config.token_ids("bos_token_id")), 2),
        eos_ids=config.token_ids("eos_token_id") or (1,),
    )


def _groups(shape: Gemma3Shape) -> dict[str, KVGroup]:
    """Layer type -> cache group. A model may have only one of them."""
    layers = {kind: tuple(i for i, k in enumerate(shape.kinds) if k == kind) for kind in (FULL, SLIDING)}
    heads, dim = shape.kv_heads, shape.head_dim
    groups = {
        FULL: KVGroup("full", "full", layers[FULL], heads, dim),
        SLIDING: KVGroup("window", "window", layers[SLIDING], heads, dim, shape.window),
    }
    return {kind: group for kind, group in groups.items() if group.layers}


def build_gemma3(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape, groups = read_shape(config), _groups(read_shape(config))
    ends = build_vocabulary(weights, shape.vocab, shape.hidden, tied=shape.tied)
    # The scale is a constant of fp32 that is rounded to the model's dtype: so the weights were trained.
    scale = torch.tensor(shape.hidden**0.5, dtype=torch.float32).to(weights.dtype)
    return Decoder(
        gemma3_info(config),
        embedding=ends.embedding,
        layers=[_Layer(shape, groups[kind], index, weights) for index, kind in enumerate(shape.kinds)],
        norm=_norm(weights, "norm", shape),
        head=ends.head,
        embed_scale=float(scale),
        logit_cap=shape.logit_cap,
        ranks=weights.ranks,
    )


def _norm(weights: Weights, name: str, shape: Gemma3Shape) -> RMSNorm:
    return RMSNorm(weights.exact(f"{name}.weight", shape.hidden) + 1, shape.eps)


class _Layer:
    def __init__(self, shape: Gemma3Shape, group: KVGroup, index: int, weights: Weights) -> None:
        at, hidden = f"layers.{index}.", shape.hidden
        mine = share_heads(shape.heads, shape.kv_heads, weights.ranks)
        context = context_of(group, weights.ranks)
        asking = HeadShare(query_heads(mine.q, context), mine.kv)
        sizes = (shape.heads, shape.kv_heads, shape.head_dim)
        self._dtype = weights.dtype
        self._before_attention = _norm(weights, f"{at}input_layernorm", shape)
        self._after_attention = _norm(weights, f"{at}post_attention_layernorm", shape)
        self._before_mlp = _norm(weights, f"{at}pre_feedforward_layernorm", shape)
        self._after_mlp = _norm(weights, f"{at}post_feedforward_layernorm", shape)
        self._attention = Attention(
            qkv=heads_linear(weights, f"{at}self_attn.", hidden, sizes, queries=asking.q),
            out=weights.summed_linear(
                f"{at}self_attn.o_proj", hidden, shape.heads * shape.head_dim, columns(mine.q, shape.head_dim)
            ),
            heads=len(asking.q),
            group=held_group(group, weights.ranks),
            layer=index,
            rope=shape.full_rope if group.window is None else shape.local_rope,
            scale=1.0,
            qk_norm=_head_norm(shape, at, weights, asking),
            context=context,
            kv_scales=read_kv_scales(weights, f"{at}self_attn.", shape.kv_heads, mine.kv),
        )
        self._mlp = dense_mlp(weights, f"{at}mlp", hidden, shape.ffn, act="gelu_tanh")

    def __call__(self, hidden: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None) -> Tensor:
        mixed = self._attention(self._before_attention(hidden, self._dtype), batch, kv, keep)
        hidden = hidden if keep is None else hidden.index_select(0, keep)
        self._after_attention.add_to(hidden, mixed)
        mixed = self._mlp(self._before_mlp(hidden, self._dtype))
        return self._after_mlp.add_to(hidden, mixed)


def _head_norm(shape: Gemma3Shape, at: str, weights: Weights, mine: HeadShare) -> HeadNorm:
    """The scale of the scores goes into the queries' norm: a rotation keeps it, and it costs nothing there."""
    q, k = (weights.exact(f"{at}self_attn.{x}_norm.weight", shape.head_dim) + 1 for x in "qk")
    return HeadNorm(q * shape.scale, k, len(mine.q), len(mine.kv), shape.eps)
