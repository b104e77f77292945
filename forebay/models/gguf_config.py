"""From GGUF's metadata and tensor names to the configuration and names that the families read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.models.errors import CheckpointBroken, UnsupportedArchitecture
from forebay.models.gguf_file import GGUFFile

Array = NDArray[Any]

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""By what other engines choose the model's class; without it vLLM takes a checkpoint for an embedder."""

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN_NORMS = {"ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"
"""A tensor of divisors for the rotary frequencies, which goes into the configuration."""

_LARGEST_GEMMA3_LAYERS = 62

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (1.0,),
    "expert_count": (0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
"""Settings that no architecture here computes, and the values that change nothing."""

_GEMMA3_ONLY = ("attention.sliding_window", "final_logit_softcapping")


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Typed access to a GGUF file's metadata, under its architecture's prefix."""

    file: GGUFFile

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.file.architecture}.{key}", default)
        if value is None:
            raise CheckpointBroken(
                f"{self.file.path} lacks the entry {self.file.architecture}.{key}; convert it again "
                "from its source with a current tool"
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointBroken(
                f"{self.file.path}: {self.file.architecture}.{key} must be a positive whole number, found "
                f"{str(value)[:40]!r}; convert the file again from its source"
            )
        return value

    def has(self, key: str) -> bool:
        return f"{self.file.architecture}.{key}" in self.file.metadata


def gguf_config(file: GGUFFile, rope_factors: tuple[float, ...] = ()) -> dict[str, Any]:
    """The `config.json` of the model in `file`. Raises UnsupportedArchitecture or CheckpointBroken."""
    if file.architecture not in MODEL_TYPES:
        raise UnsupportedArchitecture(
            f"{file.path}: architecture {file.architecture!r} is not supported; supported are {', '.join(MODEL_TYPES)}"
        )
    found = _Metadata(file)
    _refuse(found)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointBroken(f"{file.path} has no token_embd.weight; download it again")
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise CheckpointBroken(
            f"{file.path}: {len(tokens)} tokens for {embedding.shape[0]} rows of token_embd.weight; convert it again "
            "from its source"
        )
    heads, hidden = found.size("attention.head_count"), found.size("embedding_length")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": MODEL_TYPES[file.architecture],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": found.size("feed_forward_length"),
        "num_hidden_layers": found.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": found.size("attention.head_count_kv", heads),
        "head_dim": found.size("attention.key_length", max(1, hidden // heads)),
        "max_position_embeddings": found.size("context_length"),
        "rms_norm_eps": found.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": found.get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    _check_rotated(found, config["head_dim"])
    if file.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    config |= _rope_scaling(found, rope_factors)
    if file.architecture == "gemma3":
        config |= _gemma3_settings(found, config)
    return config


def _refuse(found: _Metadata) -> None:
    """Raise UnsupportedArchitecture for a setting that isn't computed, a tensor that isn't known, or a part of a
    file."""
    file = found.file
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedArchitecture(f"{file.path} is one of several parts (split.count); merge them into one file")
    gemma = file.architecture == "gemma3"
    neutral = _NEUTRAL if gemma else {**_NEUTRAL, **dict.fromkeys(_GEMMA3_ONLY, (0, 0.0))}
    for key, values in neutral.items():
        if found.has(key) and found.get(key) not in values:
            raise UnsupportedArchitecture(
                f"{file.path}: {file.architecture}.{key} = {found.get(key)!r} is not supported; choose another model"
            )
    for name in file.tensors:
        if name != ROPE_FACTORS and _new_name(name, file) is None:
            raise UnsupportedArchitecture(
                f"{file.path}: tensor {name!r} has no part in {file.architecture} here; choose another model"
            )


def _check_rotated(found: _Metadata, head_dim: int) -> None:
    rotated = found.size("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedArchitecture(
            f"{found.file.path}: a rotation of {rotated} of {head_dim} dimensions (rope.dimension_count) is not "
            "supported; choose another model"
        )


def _rope_scaling(found: _Metadata, factors: tuple[float, ...]) -> dict[str, Any]:
    kind = found.get("rope.scaling.type", "linear" if found.has("rope.scaling.factor") else "none")
    stretched = kind != "none" and found.get("rope.scaling.factor", 0.0) not in (0.0, 1.0)
    if factors and stretched:
        raise UnsupportedArchitecture(
            f"{found.file.path}: {ROPE_FACTORS} beside rope.scaling.factor is not supported; choose another model"
        )
    if factors:
        return {"rope_scaling": {"rope_type": "factors", "factors": list(factors)}}
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": found.get("rope.scaling.factor")}
    if kind == "yarn":
        original = found.size("rope.scaling.original_context_length", found.size("context_length"))
        scaling["original_max_position_embeddings"] = original
        for side in ("beta_fast", "beta_slow"):
            if found.has(f"rope.scaling.yarn_{side}"):
                scaling[side] = found.get(f"rope.scaling.yarn_{side}")
    return {"rope_scaling": scaling}


def _gemma3_settings(found: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    largest = config["num_hidden_layers"] == _LARGEST_GEMMA3_LAYERS
    per_head = config["hidden_size"] // config["num_attention_heads"]
    pattern = found.get("attention.sliding_window_pattern", 6)
    settings: dict[str, Any] = {
        "sliding_window": found.size("attention.sliding_window"),
        "query_pre_attn_scalar": per_head if largest else config["head_dim"],
        "rope_theta": found.get("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": found.get("rope.freq_base_swa", 10_000.0),
    }
    if found.has("final_logit_softcapping"):
        settings["final_logit_softcapping"] = found.get("final_logit_softcapping")
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
        return settings | {"layer_types": kinds}
    return settings | {"sliding_window_pattern": pattern}


@dataclass(frozen=True, slots=True)
class Renamed:
    """A tensor's name in the families' words, and what turns its values into theirs."""

    name: str
    convert: Callable[[Array], Array]


def rename_tensor(name: str, file: GGUFFile, config: Mapping[str, Any]) -> Renamed | None:
    """None for a tensor that isn't part of the model (such as rope factors). What turns the values raises
    CheckpointBroken where they don't fit the configuration."""
    full = _new_name(name, file)
    if full is None:
        return None
    base = name.rpartition(".")[0].rpartition(".")[2]
    if file.architecture == "gemma3" and base.endswith("norm"):
        return Renamed(full, _minus_one)
    if file.architecture == "llama" and base in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if base == "attn_q" else "num_key_value_heads"]
        return Renamed(full, lambda values: _unpair(values, heads, f"{file.path}: tensor {name!r}"))
    return Renamed(full, _as_is)


def _new_name(name: str, file: GGUFFile) -> str | None:
    base, _, kind = name.rpartition(".")
    if base in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[base]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    names = _LAYER_NAMES | (_GEMMA_NORMS if file.architecture == "gemma3" else _PLAIN_NORMS)
    if match is None or match[2] not in names:
        return None
    return f"model.layers.{match[1]}.{names[match[2]]}.{kind}"


def _as_is(values: Array) -> Array:
    return values


def _minus_one(values: Array) -> Array:
    return values - 1


def _unpair(values: Array, heads: int, what: str) -> Array:
    """GGUF's Llama rotates neighbours (2i, 2i + 1), the families here rotate (i, i + dim / 2)."""
    if values.shape[0] % (2 * heads):
        raise CheckpointBroken(f"{what} has {values.shape[0]} rows, not {heads} heads; download the file again")
    paired = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(np.swapaxes(paired, 1, 2)).reshape(values.shape)
