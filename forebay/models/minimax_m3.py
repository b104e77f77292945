"""MiniMax-M3, text: some layers attend to blocks that an index chooses; norms whose weights are stored minus one; a
clamped SwiGLU everywhere; a sigmoid router with a bias for the choice, and one shared expert.

Both spellings of the weights are read, that of the published files and transformers' own. Images and videos aren't.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import ConfigError
from forebay.kernels.blocks import Blocks
from forebay.kernels.experts import Activation
from forebay.kernels.moe import Routing
from forebay.models.base import CausalLM, KVGroup, ModelInfo, Sparsity
from forebay.models.block_sparse import BlockSparseAttention, HeadParts
from forebay.models.clamped import clamped_experts, clamped_mlp
from forebay.models.config import INDEX_KEYS, Config
from forebay.models.foreign import refuse_foreign
from forebay.models.layers import Attention, Decoder, Layer, Mixer, PreNormLayer, RMSNorm
from forebay.models.moe import MLP, MoE, Router, check_routing
from forebay.models.ranks import held_group
from forebay.models.rope_config import read_rope
from forebay.models.standard import FULL, AttentionShape, build_vocabulary, read_heads, read_info
from forebay.models.weights import Weights

SPARSE = "minimax_m3_sparse"


@dataclass(frozen=True, slots=True)
class M3Shape:
    """`kinds` says of every layer whether its attention is FULL or SPARSE, `dense` whether its MLP is. `index_dim`:
    values of an index key, `scaled`: it is stored as FP8."""

    attention: AttentionShape
    kinds: tuple[str, ...]
    dense: tuple[bool, ...]
    blocks: Blocks
    index_dim: int
    scaled: bool
    act: Activation


def read_shape(config: Config) -> M3Shape:
    """From a configuration of type minimax_m3_vl_text. Published ones name things otherwise than transformers does."""
    sizes, index = read_heads(config, head_dim=128), config.section("sparse_attention_config")
    refuse_foreign(config, ("layer_types",))
    if config.text("hidden_act", "silu") not in ("silu", "swigluoai"):
        raise config.unsupported(f"activation {config.get('hidden_act')!r} is not supported")
    rotated = min(config.size("rotary_dim", 64), sizes.head_dim)
    rope = read_rope(config, sizes.head_dim, theta=5_000_000.0, partial=rotated / sizes.head_dim)
    attention = AttentionShape(
        sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, config.number("rms_norm_eps", 1e-6), rope,
        qk_norm="head",
    )  # fmt: skip

    def size(name: str, older: str, default: int) -> int:
        return index.size(older) if older in index else config.size(name, default)

    blocks = Blocks(
        size("index_block_size", "sparse_block_size", 128), size("index_topk_blocks", "sparse_topk_blocks", 16),
        index.count("sparse_local_block") if "sparse_local_block" in index else config.count("index_local_blocks", 1),
    )  # fmt: skip
    heads, dim = size("index_n_heads", "sparse_num_index_heads", 4), size("index_head_dim", "sparse_index_dim", 128)
    kinds, dense = _read_kinds(config, index), _read_dense(config)
    if SPARSE in kinds and heads != sizes.kv_heads:
        raise config.unsupported(f"{heads} index heads for {sizes.kv_heads} KV heads: each must have its own")
    if SPARSE in kinds and dim < rope.dim:
        raise config.broken(f"an index key of {dim} is less than the {rope.dim} dimensions that are rotated")
    act = Activation("clamped", config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    return M3Shape(attention, kinds, dense, blocks, dim, config.text(INDEX_KEYS, "model") == "fp8", act)


def _read_kinds(config: Config, index: Config) -> tuple[str, ...]:
    layers = config.size("num_hidden_layers")
    flags = index.get("sparse_attention_freq", [0] * layers)
    kinds = config.get("layer_types", [SPARSE if flag else FULL for flag in flags])
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {FULL, SPARSE}:
        raise config.broken(f"layer_types must name {layers} layers, each {FULL} or {SPARSE}")
    return tuple(kinds)


def _read_dense(config: Config) -> tuple[bool, ...]:
    layers = config.size("num_hidden_layers")
    flags = config.get("moe_layer_freq", [1] * layers)
    kinds = config.get("mlp_layer_types", ["sparse" if flag else "dense" for flag in flags])
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
        raise config.broken(f"mlp_layer_types must name {layers} layers, each dense or sparse")
    return tuple(kind == "dense" for kind in kinds)


def minimax_m3_info(config: Config) -> ModelInfo:
    """Facts of a minimax_m3_vl_text configuration."""
    shape = read_shape(config)
    layers, rope = range(len(shape.kinds)), shape.attention.rope
    sparse = tuple(i for i in layers if shape.kinds[i] == SPARSE)
    groups = [shape.attention.group(layers)]
    if sparse:
        groups.append(KVGroup("index", "indexer", sparse, 1, shape.index_dim, scaled=shape.scaled))
    leaders = tuple(i if i in sparse else -1 for i in layers)
    blocks = shape.blocks
    told = rope.describe("full") | {"index.blocks": f"{blocks.top_k} of {blocks.size}, {blocks.local} local"}
    return read_info(
        config, "minimax_m3", groups, told, rope.reach(config.size("max_position_embeddings")),
        sparse=Sparsity("full", blocks.top_k, leaders, blocks.size) if sparse else None,
    )  # fmt: skip


def build_minimax_m3(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape, info = read_shape(config), minimax_m3_info(config)
    if weights.ranks.context is not None:
        raise ConfigError("decode_context_parallel_size: this family's layers need all positions; set it to 1")
    attention = shape.attention
    ends = build_vocabulary(
        weights, info.vocab_size, attention.hidden, tied=config.flag("tie_word_embeddings", False)
    )

    def layer(index: int) -> Layer:
        at = f"layers.{index}."
        return PreNormLayer(
            attention_norm=_norm(weights, f"{at}input_layernorm", shape),
            attention=_attention(shape, info, index, weights),
            mlp_norm=_norm(weights, f"{at}post_attention_layernorm", shape),
            mlp=_mlp(config, shape, index, weights),
            dtype=weights.dtype,
        )

    return Decoder(
        info,
        embedding=ends.embedding,
        layers=[layer(index) for index in range(info.num_layers)],
        norm=_norm(weights, "norm", shape),
        head=ends.head,
        ranks=weights.ranks,
    )


def _norm(weights: Weights, name: str, shape: M3Shape) -> RMSNorm:
    return RMSNorm(weights.exact(f"{name}.weight", shape.attention.hidden) + 1, shape.attention.eps)


def _attention(shape: M3Shape, info: ModelInfo, index: int, weights: Weights) -> Mixer:
    if shape.kinds[index] == SPARSE:
        values, keys = info.kv_groups
        return BlockSparseAttention(shape.attention, shape.blocks, (values, keys), index, weights)
    parts = HeadParts(shape.attention, index, weights)
    return Attention(
        qkv=parts.qkv, out=parts.out, heads=parts.heads, group=held_group(info.kv_groups[0], weights.ranks),
        layer=index, rope=shape.attention.rope, scale=shape.attention.head_dim**-0.5, qk_norm=parts.norm,
    )  # fmt: skip


def _mlp(config: Config, shape: M3Shape, index: int, weights: Weights) -> MLP:
    hidden, at, published = shape.attention.hidden, f"layers.{index}.mlp", f"layers.{index}.block_sparse_moe"
    if shape.dense[index]:
        ffn = config.size("dense_intermediate_size", 12_288)
        return clamped_mlp(weights, at, hidden, ffn, shape.act)
    bias = f"{at}.gate.e_score_correction_bias"
    if f"{published}.gate.weight" in weights:
        at, bias = published, f"{published}.e_score_correction_bias"
    experts, top_k = config.size("num_local_experts", 128), config.size("num_experts_per_tok", 4)
    scale = config.number("routed_scaling_factor", 2.0)
    routing = Routing(top_k, "sigmoid", renormalise=True, scale=scale)
    router = Router(
        weights.exact(f"{at}.gate.weight", experts, hidden),
        check_routing(config, routing, experts),
        choice_bias=weights.exact(bias, experts),
    )
    ffn, shared = config.size("intermediate_size", 3072), config.size("shared_intermediate_size", 3072)
    dealt = weights.ranks.experts != "inside"
    return MoE(
        router,
        clamped_experts(weights, f"{at}.experts", experts, hidden, ffn, shape.act),
        clamped_mlp(weights, f"{at}.shared_experts", hidden, shared, shape.act, partial=True, whole=dealt),
        weights.ranks,
    )
