"""Every family with its variants: what the parity tests run, and what the table of families is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests import checkpoints

Maker = Callable[[Path], Path]


@dataclass(frozen=True)
class Family:
    """`make` writes the checkpoint on which everything is tried; `variants` ones that are only prefilled.

    `needs` says what a reader of the table wants to know of it.
    """

    make: Maker
    needs: str
    variants: Mapping[str, Maker] = field(default_factory=dict)


def _rope(kind: str, **settings: float) -> dict[str, object]:
    return {"rope_type": kind, "factor": 4.0, "rope_theta": 5e5, **settings}


_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
_YARN = _rope("yarn", original_max_position_embeddings=32)
_MSCALED_YARN = _rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.2)
_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        checkpoints.tiny_llama,
        "Llama-3, YaRN, linear and dynamic rope",
        {
            "linear": partial(checkpoints.tiny_llama, rope_parameters=_rope("linear")),
            "llama3": partial(checkpoints.tiny_llama, rope_parameters=_LLAMA3),
            "yarn": partial(checkpoints.tiny_llama, rope_parameters=_YARN),
            "yarn-truncated-not": partial(checkpoints.tiny_llama, rope_parameters=_YARN | {"truncate": False}),
            "yarn-own-magnitude": partial(checkpoints.tiny_llama, rope_parameters=_YARN | {"attention_factor": 0.8}),
            "dynamic": partial(checkpoints.tiny_llama, rope_parameters=_rope("dynamic")),
            "tied": partial(checkpoints.tiny_llama, tie_word_embeddings=True),
            "sharded": partial(checkpoints.tiny_llama, shard_size="100KB"),
        },
    ),
    "qwen2": Family(
        checkpoints.tiny_qwen2, "biases on q, k and v",
        {"yarn-tied": partial(checkpoints.tiny_qwen2, rope_parameters=_YARN, tie_word_embeddings=True)},
    ),
    "qwen3": Family(
        checkpoints.tiny_qwen3, "norm on every head",
        {"yarn": partial(checkpoints.tiny_qwen3, rope_parameters=_YARN)},
    ),
    "qwen3_moe": Family(
        checkpoints.tiny_qwen3_moe, "softmax router",
        {
            "not-renormalised": partial(checkpoints.tiny_qwen3_moe, norm_topk_prob=False),
            "every-second-layer": partial(checkpoints.tiny_qwen3_moe, decoder_sparse_step=2, mlp_only_layers=[]),
            "sharded": partial(checkpoints.tiny_qwen3_moe, shard_size="100KB"),
        },
    ),
    "gemma3_text": Family(
        checkpoints.tiny_gemma3, "norms around every part, two rotary bases",
        {"untied": partial(checkpoints.tiny_gemma3, tie_word_embeddings=False)},
    ),
    "gpt_oss": Family(
        checkpoints.tiny_gpt_oss, "sinks, softmax over the chosen, clamped SwiGLU, YaRN",
        {
            "window-of-a-block": partial(checkpoints.tiny_gpt_oss, window=16),
            "one-kv-head": partial(checkpoints.tiny_gpt_oss, num_key_value_heads=1),
            "clamp-that-bites": partial(checkpoints.tiny_gpt_oss, swiglu_limit=0.7, swiglu_alpha=1.1),
            "all-full": partial(checkpoints.tiny_gpt_oss, layer_types=["full_attention"] * 4),
        },
    ),
    "glm4_moe": Family(
        checkpoints.tiny_glm4_moe, "half of a head rotated, sigmoid router with a bias, shared experts",
        {
            "one-group": partial(checkpoints.tiny_glm4_moe, n_group=1),
            "no-norms-no-biases": partial(checkpoints.tiny_glm4_moe, use_qk_norm=False, attention_bias=False),
            "not-renormalised": partial(checkpoints.tiny_glm4_moe, norm_topk_prob=False, first_k_dense_replace=0),
        },
    ),
    "minimax_m2": Family(
        checkpoints.tiny_minimax_m2, "norm over all heads together, partly rotated heads, sigmoid router with a bias",
        {"all-rotated": partial(checkpoints.tiny_minimax_m2, rope_parameters=_PLAIN)},
    ),
    "minimax_m3_vl_text": Family(
        checkpoints.tiny_minimax_m3, "an index chooses blocks for each KV head, clamped SwiGLU, sigmoid router",
        {
            "two-local-blocks": partial(checkpoints.tiny_minimax_m3, index_local_blocks=2, index_block_size=7),
            "no-local-block": partial(checkpoints.tiny_minimax_m3, index_local_blocks=0, index_topk_blocks=2),
            "clamp-that-bites": partial(checkpoints.tiny_minimax_m3, swiglu_limit=0.7, swiglu_alpha=1.1),
            "all-full": partial(checkpoints.tiny_minimax_m3, layer_types=["full_attention"] * 4),
        },
    ),
    "deepseek_v2": Family(
        checkpoints.tiny_deepseek_v2, "latent attention, group-limited softmax router, shared experts",
        {
            "greedy-with-query-latent": partial(checkpoints.tiny_deepseek_v2, topk_method="greedy", q_lora_rank=36),
            "biases": partial(checkpoints.tiny_deepseek_v2, attention_bias=True, mlp_bias=True),
        },
    ),
    "deepseek_v3": Family(
        checkpoints.tiny_deepseek_v3, "latent attention, YaRN, group-limited sigmoid router, shared experts",
        {
            "halves": partial(checkpoints.tiny_deepseek_v3, rope_interleave=False),
            "plain-rope": partial(checkpoints.tiny_deepseek_v3, rope_parameters=_PLAIN),
            "no-query-latent-biases": partial(checkpoints.tiny_deepseek_v3, q_lora_rank=None, attention_bias=True),
            "sharded": partial(checkpoints.tiny_deepseek_v3, shard_size="100KB"),
        },
    ),
    "deepseek_v32": Family(
        checkpoints.tiny_deepseek_v32, "sparse latent attention: an index in every layer",
        {
            "yarn-biases": partial(checkpoints.tiny_deepseek_v32, attention_bias=True, rope_parameters=_MSCALED_YARN),
            "chooses-one": partial(checkpoints.tiny_deepseek_v32, index_topk=1),
            "chooses-all": partial(checkpoints.tiny_deepseek_v32, index_topk=90),
        },
    ),
    "glm_moe_dsa": Family(
        checkpoints.tiny_glm_moe_dsa, "sparse latent attention, whose choice several layers share",
        {
            "pattern": partial(checkpoints.tiny_glm_moe_dsa, index_topk_pattern="FSFS", index_head_dim=12),
            "every-layer-its-own": partial(checkpoints.tiny_glm_moe_dsa, index_topk_freq=1, index_topk=40),
        },
    ),
}  # fmt: skip
