"""What most families share: heads over K and V, a pre-norm layer, embedding and head around the layers.

A family's file says what its configuration means and which of these parts it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forebay.errors import ConfigError
from forebay.models.base import KVGroup, ModelInfo, RopeValue, Sparsity
from forebay.models.config import Config
from forebay.models.context import context_of, query_heads
from forebay.models.foreign import refuse_foreign
from forebay.models.kv_scales import read_kv_scales
from forebay.models.layers import (
    Attention,
    Decoder,
    GatedMLP,
    HeadNorm,
    Layer,
    Linear,
    Mixer,
    PreNormLayer,
    RMSNorm,
    WholeNorm,
)
from forebay.models.ranks import Embedding, HeadShare, held_group, share, share_heads, vocabulary_share
from forebay.models.rope import Rope
from forebay.models.weights import Weights

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one attention layer. `qk_norm`: none, of every head by itself, or of all heads together."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "whole"] = "none"

    def group(self, layers: Iterable[int], window: int | None = None) -> KVGroup:
        """The cache group of these layers: "full", or "window" if they have one."""
        kind: Literal["full", "window"] = "full" if window is None else "window"
        return KVGroup(kind, kind, tuple(layers), self.kv_heads, self.head_dim, window)


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """`hidden`, `heads`, `kv_heads`, `head_dim` of a configuration, fitting together."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


def read_heads(config: Config, head_dim: int | None = None) -> HeadSizes:
    """Sizes by their usual names. `head_dim` is the family's default, else it is hidden / heads."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    dim = config.size("head_dim", head_dim or max(1, hidden // heads))
    if heads % kv_heads or dim % 2:
        raise config.broken(f"{heads} heads, {kv_heads} KV heads of {dim} don't fit together")
    return HeadSizes(hidden, heads, kv_heads, dim)


def read_kinds(config: Config, default: Sequence[str]) -> tuple[str, ...]:
    """Of every layer whether it is full or sliding, from `layer_types`."""
    kinds = config.get("layer_types", list(default))
    if not isinstance(kinds, list) or len(kinds) != len(default) or not set(kinds) <= {FULL, SLIDING}:
        raise config.broken(f"layer_types must name {len(default)} layers, each {FULL} or {SLIDING}")
    return tuple(kinds)


def refuse_settings(
    config: Config, *, act: str = "silu", computed: Collection[str] = (), kind: str = FULL, **refused: bool
) -> None:
    """Raise UnsupportedArchitecture for another activation than `act`, for flags that are not as given here, and for
    settings of other models (`foreign.py`) that aren't `computed`, or layers that aren't of this `kind`."""
    refuse_foreign(config, computed, kind)
    if config.text("hidden_act", act) != act:
        raise config.unsupported(f"activation {config.get('hidden_act')!r} is not supported")
    for name, wanted in refused.items():
        if config.flag(name, wanted) is not wanted:
            raise config.unsupported(f"{name} = {str(not wanted).lower()} is not supported in this family")


def read_info(
    config: Config, family: str, groups: Iterable[KVGroup], rope: Mapping[str, RopeValue], max_context: int,
    *, sparse: Sparsity | None = None,
) -> ModelInfo:  # fmt: skip
    """Facts, most of them by their usual names."""
    return ModelInfo(
        family=family,
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        num_layers=config.size("num_hidden_layers"),
        max_context=max_context,
        kv_groups=tuple(groups),
        rope=rope,
        bos_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_ids=config.token_ids("eos_token_id"),
        sparse=sparse,
    )


def build_attention(
    shape: AttentionShape, group: KVGroup, index: int, weights: Weights, *, sinks: Tensor | None = None
) -> Attention:
    """The attention of layer `index`, which is one of `group`: with this rank's heads, of which `sinks` are."""
    at = f"layers.{index}.self_attn."
    mine = share_heads(shape.heads, shape.kv_heads, weights.ranks)
    context = context_of(group, weights.ranks)
    asking = HeadShare(query_heads(mine.q, context), mine.kv)
    sizes = (shape.heads, shape.kv_heads, shape.head_dim)
    return Attention(
        qkv=heads_linear(weights, at, shape.hidden, sizes, bias=shape.qkv_bias, queries=asking.q),
        out=weights.summed_linear(
            f"{at}o_proj", shape.hidden, shape.heads * shape.head_dim, columns(mine.q, shape.head_dim),
            bias=shape.out_bias,
        ),
        heads=len(asking.q),
        group=held_group(group, weights.ranks),
        layer=index,
        rope=shape.rope,
        scale=shape.head_dim**-0.5,
        qk_norm=_qk_norm(shape, at, weights, asking),
        sinks=sinks,
        context=context,
        kv_scales=read_kv_scales(weights, at, shape.kv_heads, mine.kv),
    )  # fmt: skip


def columns(heads: range, dim: int) -> range:
    """Which features those of `heads` are."""
    return range(heads.start * dim, heads.stop * dim)


def heads_linear(
    weights: Weights, at: str, hidden: int, sizes: tuple[int, int, int], *, bias: bool = False,
    queries: range | None = None,
) -> Linear:  # fmt: skip
    """The projections q, k and v under `at` side by side, of this rank's heads, or of the query heads `queries`.
    `sizes`: heads, KV heads, head_dim."""
    heads, kv_heads, dim = sizes
    mine = share_heads(heads, kv_heads, weights.ranks)
    outs = {f"{at}{x}_proj": (heads if x == "q" else kv_heads) * dim for x in "qkv"}
    rows = {f"{at}{x}_proj": columns((queries or mine.q) if x == "q" else mine.kv, dim) for x in "qkv"}
    return weights.merged_linear(outs, hidden, bias=bias, rows=rows)


def _qk_norm(shape: AttentionShape, at: str, weights: Weights, mine: HeadShare) -> HeadNorm | WholeNorm | None:
    if shape.qk_norm == "none":
        return None
    if shape.qk_norm == "head":
        q, k = (weights.exact(f"{at}{x}_norm.weight", shape.head_dim) for x in "qk")
        return HeadNorm(q, k, len(mine.q), len(mine.kv), shape.eps)
    if len(mine.q) != len(share_heads(shape.heads, shape.kv_heads, weights.ranks).q):
        raise ConfigError("dcp_q_replicate: this family norms all query heads together; leave it out for this model")
    dim = shape.head_dim
    q = weights.exact(f"{at}q_norm.weight", shape.heads * dim, cut={0: columns(mine.q, dim)})
    k = weights.exact(f"{at}k_norm.weight", shape.kv_heads * dim, cut={0: columns(mine.kv, dim)})
    return WholeNorm(q, k, len(mine.q), shape.eps, weights.ranks)


def dense_mlp(
    weights: Weights, at: str, hidden: int, ffn: int, *, bias: bool = False, partial: bool = False,
    whole: bool = False, act: Literal["silu", "gelu_tanh"] = "silu",
) -> GatedMLP:  # fmt: skip
    """gate, up and down projections under the name `at`. With several ranks each has its part of the columns between
    them, and gives the sum of all, or its part of the sum if only that is wanted (`partial`). If it is `whole` on every
    rank, each computes it by itself."""
    gate, up, down = (f"{at}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    if whole:
        gate_up = weights.merged_linear({gate: ffn, up: ffn}, hidden, bias=bias)
        return GatedMLP(gate_up, weights.linear(down, hidden, ffn, bias=bias), act=act)
    mine = share(ffn, weights.ranks)
    gate_up = weights.merged_linear({gate: ffn, up: ffn}, hidden, bias=bias, rows={gate: mine, up: mine})
    return GatedMLP(gate_up, weights.summed_linear(down, hidden, ffn, mine, bias=bias, partial=partial), act=act)


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Both ends of a model: this rank's part of the table of tokens, and of the head."""

    embedding: Embedding
    head: Linear


def build_vocabulary(weights: Weights, vocab: int, hidden: int, *, tied: bool) -> Vocabulary:
    """The head is the embedding if they are `tied`, unless the checkpoint has another one all the same."""
    mine = vocabulary_share(vocab, weights.ranks)
    embedding = weights.take("embed_tokens.weight", vocab, hidden, cut={0: mine})
    head = embedding
    if not tied or "lm_head.weight" in weights:
        head = weights.take("lm_head.weight", vocab, hidden, cut={0: mine})
        head = embedding if tied and torch.equal(head, embedding) else head
    return Vocabulary(Embedding(embedding, mine, weights.ranks), Linear(head))


def pre_norm_layer(
    weights: Weights, index: int, hidden: int, eps: float, *, attention: Mixer, mlp: Callable[[Tensor], Tensor]
) -> PreNormLayer:
    """Layer `index` with its two norms."""
    at = f"layers.{index}."
    return PreNormLayer(
        attention_norm=RMSNorm(weights.exact(f"{at}input_layernorm.weight", hidden), eps),
        attention=attention,
        mlp_norm=RMSNorm(weights.exact(f"{at}post_attention_layernorm.weight", hidden), eps),
        mlp=mlp,
        dtype=weights.dtype,
    )


def build_decoder(
    config: Config, info: ModelInfo, weights: Weights, eps: float, layer: Callable[[int], Layer]
) -> Decoder:
    """The whole model; `layer` builds one."""
    ends = build_vocabulary(
        weights, info.vocab_size, info.hidden_size, tied=config.flag("tie_word_embeddings", False)
    )
    return Decoder(
        info,
        embedding=ends.embedding,
        layers=[layer(index) for index in range(info.num_layers)],
        norm=RMSNorm(weights.exact("norm.weight", info.hidden_size), eps),
        head=ends.head,
        ranks=weights.ranks,
    )
