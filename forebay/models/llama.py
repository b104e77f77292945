"""Llama and Qwen2: pre-norm layers, gated SiLU, rotary positions, optional biases.

Qwen3 is the same with a norm on every query and key head: its file adds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.models.base import CausalLM, KVGroup, ModelInfo
from forebay.models.config import Config, read_rope
from forebay.models.layers import (
    Attention,
    Decoder,
    GatedMLP,
    HeadNorm,
    Linear,
    RMSNorm,
    Rope,
)
from forebay.models.weights import Weights


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes and settings of a Llama-like model. `qkv_bias`, `out_bias`, `mlp_bias`: which projections have one."""

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norm: bool


def read_shape(config: Config) -> LlamaShape:
    """From a configuration of type llama, qwen2 or qwen3."""
    family = config.text("model_type")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    head_dim = config.size("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise config.broken(f"{heads} heads, {kv_heads} KV heads of {head_dim} don't fit together")
    if config.text("hidden_act", "silu") != "silu":
        raise config.unsupported(f"activation {config.get('hidden_act')!r} is not supported")
    if config.flag("use_sliding_window", False):
        raise config.unsupported("a sliding window in this family is not supported")
    bias = config.flag("attention_bias", family == "qwen2")
    return LlamaShape(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.size("intermediate_size"),
        vocab=config.size("vocab_size"),
        eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim, theta=10_000.0),
        tied=config.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias and family != "qwen2",
        mlp_bias=config.flag("mlp_bias", False),
        head_norm=family == "qwen3",
    )


def llama_info(config: Config) -> ModelInfo:
    """Facts of a llama, qwen2 or qwen3 configuration."""
    shape, layers = read_shape(config), config.size("num_hidden_layers")
    group = KVGroup("full", "full", tuple(range(layers)), shape.kv_heads, shape.head_dim)
    return ModelInfo(
        family=shape.family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_layers=layers,
        max_context=config.size("max_position_embeddings"),
        kv_groups=(group,),
        rope=shape.rope.describe("full"),
        bos_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_ids=config.token_ids("eos_token_id"),
    )


def build_llama(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape, info = read_shape(config), llama_info(config)
    embedding = weights.take("embed_tokens.weight", shape.vocab, shape.hidden)
    tied = shape.tied or "lm_head.weight" not in weights
    head = embedding if tied else weights.take("lm_head.weight", shape.vocab, shape.hidden)
    return Decoder(
        info,
        embedding=embedding,
        layers=[_Layer(shape, info.kv_groups[0], i, weights) for i in range(info.num_layers)],
        norm=RMSNorm(weights.exact("norm.weight", shape.hidden), shape.eps),
        head=Linear(head),
    )


class _Layer:
    def __init__(self, shape: LlamaShape, group: KVGroup, index: int, weights: Weights) -> None:
        at, hidden = f"layers.{index}.", shape.hidden
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._dtype = weights.dtype
        self._attention_norm = RMSNorm(weights.exact(f"{at}input_layernorm.weight", hidden), shape.eps)
        self._mlp_norm = RMSNorm(weights.exact(f"{at}post_attention_layernorm.weight", hidden), shape.eps)
        self._attention = Attention(
            qkv=weights.merged_linear(
                {f"{at}self_attn.{x}_proj": q_size if x == "q" else kv_size for x in "qkv"},
                hidden,
                bias=shape.qkv_bias,
            ),
            out=weights.linear(f"{at}self_attn.o_proj", hidden, q_size, bias=shape.out_bias),
            heads=shape.heads,
            group=group,
            layer=index,
            rope=shape.rope,
            scale=shape.head_dim**-0.5,
            head_norm=_head_norm(shape, at, weights) if shape.head_norm else None,
        )
        self._mlp = GatedMLP(
            weights.merged_linear(
                {f"{at}mlp.{x}_proj": shape.ffn for x in ("gate", "up")}, hidden, bias=shape.mlp_bias
            ),
            weights.linear(f"{at}mlp.down_proj", hidden, shape.ffn, bias=shape.mlp_bias),
            act="silu",
        )

    def __call__(self, hidden: Tensor, batch: Batch, kv: Mapping[str, Tensor], keep: Tensor | None) -> Tensor:
        mixed = self._attention(self._attention_norm(hidden).to(self._dtype), batch, kv, keep)
        hidden = hidden if keep is None else hidden.index_select(0, keep)
        hidden.add_(mixed)
        return hidden.add_(self._mlp(self._mlp_norm(hidden).to(self._dtype)))


def _head_norm(shape: LlamaShape, at: str, weights: Weights) -> HeadNorm:
    q, k = (weights.exact(f"{at}self_attn.{x}_norm.weight", shape.head_dim) for x in "qk")
    return HeadNorm.of(q, k, shape.heads, shape.kv_heads, shape.eps)
