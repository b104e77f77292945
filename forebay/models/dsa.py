"""DeepSeek V3.2 and GLM-5: DeepSeek V3's layers with sparse latent attention.

V3.2 has an index in every layer and rotates halves in it; GLM rotates pairs, and its layers may share what another one
has chosen. The layers behind the last, which predict further tokens, aren't used.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import ConfigError
from forebay.kernels.moe import Routing
from forebay.models.base import CausalLM, ModelInfo, Sparsity
from forebay.models.config import INDEX_KEYS, Config
from forebay.models.deepseek import sharpness
from forebay.models.latent import LatentShape
from forebay.models.layers import Layer
from forebay.models.moe import MLP, refuse_other_routers, sparse_mlp
from forebay.models.rope_config import read_rope
from forebay.models.sparse import IndexShape, SparseLatentAttention
from forebay.models.standard import build_decoder, dense_mlp, pre_norm_layer, read_info, refuse_settings
from forebay.models.weights import Weights


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Of transformers' configuration classes, where the two differ."""

    eps: float
    q_rank: int
    nope: int
    value: int
    index_heads: int
    groups: int
    kept_groups: int
    pairs: bool


_DEFAULTS = {
    "deepseek_v32": _Defaults(1e-6, 1536, 128, 128, 64, 8, 4, pairs=False),
    "glm_moe_dsa": _Defaults(1e-5, 2048, 192, 256, 32, 1, 1, pairs=True),
}


@dataclass(frozen=True, slots=True)
class DsaShape:
    """Everything about the layers but their experts. `dense` says of every layer whether its MLP is."""

    latent: LatentShape
    index: IndexShape
    sparsity: Sparsity
    dense: tuple[bool, ...]
    eps: float


def read_shape(config: Config) -> DsaShape:
    """From a configuration of type deepseek_v32 or glm_moe_dsa."""
    refuse_settings(config, kind="indexed_attention", mlp_bias=False)
    known, layers = _DEFAULTS[config.text("model_type")], config.size("num_hidden_layers")
    nope, rope = config.size("qk_nope_head_dim", known.nope), read_rope(config, _rotated(config), theta=1e4)
    latent = LatentShape(
        hidden=config.size("hidden_size"),
        heads=config.size("num_attention_heads"),
        q_rank=config.size("q_lora_rank", known.q_rank),
        rank=config.size("kv_lora_rank", 512),
        nope=nope,
        value=config.size("v_head_dim", known.value),
        rope=rope,
        scale=(nope + rope.dim) ** -0.5 * sharpness(config, rope),
        pairs=True,
        bias=config.flag("attention_bias", False),
    )
    index = _read_index(config, known, rope.dim)
    sparsity = Sparsity("latent", index.top_k, _read_leaders(config, layers))
    return DsaShape(latent, index, sparsity, _read_dense(config, layers), config.number("rms_norm_eps", known.eps))


def _rotated(config: Config) -> int:
    return config.size("qk_rope_head_dim", 64)


def _read_index(config: Config, known: _Defaults, rotated: int) -> IndexShape:
    dim, keys = config.size("index_head_dim", 128), config.text(INDEX_KEYS, "model")
    if dim < rotated:
        raise config.broken(f"index_head_dim {dim} is less than the {rotated} dimensions that are rotated")
    if keys not in ("model", "fp8"):
        raise config.unsupported(f"index keys in {keys!r}, which is neither 'model' nor 'fp8', are not supported")
    if keys == "fp8" and dim % 4:
        raise config.unsupported(f"index keys of {dim} values, which isn't a multiple of 4, are not supported in FP8")
    heads = config.size("index_n_heads", known.index_heads)
    return IndexShape(heads, dim, config.size("index_topk", 2048), pairs=known.pairs, scaled=keys == "fp8")


def _read_leaders(config: Config, layers: int) -> tuple[int, ...]:
    """Whose choice each layer takes: `indexer_types`, or a pattern such as FSSF, or every so many layers a full one."""
    if config.text("model_type") == "deepseek_v32":
        return tuple(range(layers))
    types = config.get("indexer_types")
    if types is None and "index_topk_pattern" in config:
        pattern = config.get("index_topk_pattern")
        types = [{"F": "full", "S": "shared"}.get(c, c) for c in pattern] if isinstance(pattern, str) else pattern
    if types is None:
        every, offset = config.count("index_topk_freq", 1) or 1, config.count("index_skip_topk_offset", 2)
        types = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= {"full", "shared"}:
        raise config.broken(f"indexer_types must name {layers} layers, each full or shared")
    if types[0] != "full":
        raise config.broken("indexer_types must begin with a full layer: there is none before it to share with")
    leaders: list[int] = []
    for index, kind in enumerate(types):
        leaders.append(index if kind == "full" else leaders[-1])
    return tuple(leaders)


def _read_dense(config: Config, layers: int) -> tuple[bool, ...]:
    first = config.count("first_k_dense_replace", 3)
    kinds = config.get("mlp_layer_types", ["dense" if i < first else "sparse" for i in range(layers)])
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
        raise config.broken(f"mlp_layer_types must name {layers} layers, each dense or sparse")
    return tuple(kind == "dense" for kind in kinds)


def read_routing(config: Config) -> Routing:
    """Of a configuration of type deepseek_v32 or glm_moe_dsa."""
    known = _DEFAULTS[config.text("model_type")]
    refuse_other_routers(config)
    return Routing(
        config.size("num_experts_per_tok", 8),
        "sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 2.5),
        groups=config.size("n_group", known.groups),
        kept_groups=config.size("topk_group", known.kept_groups),
    )


def dsa_info(config: Config) -> ModelInfo:
    """Facts of a deepseek_v32 or glm_moe_dsa configuration."""
    shape = read_shape(config)
    latent, index, leaders = shape.latent, shape.index, shape.sparsity.leaders
    groups = [latent.group(len(leaders)), index.group(tuple(sorted(set(leaders))))]
    rope = latent.rope.describe("latent") | {"latent.pairs": latent.pairs, "index.pairs": index.pairs}
    rope |= {"index.turned": index.turned, "index.top_k": index.top_k}
    context = latent.rope.reach(config.size("max_position_embeddings"))
    family = config.text("model_type")
    return read_info(config, family, groups, rope, context, sparse=shape.sparsity)


def build_dsa(config: Config, weights: Weights) -> CausalLM:
    """The model, its weights taken from `weights`."""
    shape, info, routing = read_shape(config), dsa_info(config), read_routing(config)
    if weights.ranks.context is not None:
        raise ConfigError("decode_context_parallel_size: layers that choose positions need all of them; set it to 1")
    latents, keys = info.kv_groups

    def layer(index: int) -> Layer:
        attention = SparseLatentAttention(shape.latent, shape.index, (latents, keys), shape.sparsity, index, weights)
        mlp = _mlp(config, weights, index, routing, dense=shape.dense[index])
        return pre_norm_layer(weights, index, shape.latent.hidden, shape.eps, attention=attention, mlp=mlp)

    return build_decoder(config, info, weights, shape.eps, layer)


def _mlp(config: Config, weights: Weights, index: int, routing: Routing, *, dense: bool) -> MLP:
    if dense:
        return dense_mlp(weights, f"layers.{index}.mlp", config.size("hidden_size"), config.size("intermediate_size"))
    return sparse_mlp(config.having(first_k_dense_replace=0), weights, index, routing, dense_layers=0)
