"""Writes tiny GGUF files from tiny safetensors checkpoints, as converters in the field do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PLAIN = {"post_attention_layernorm": "ffn_norm"}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "abc", "aa", "aaa"]


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_factors: list[float] | None = None,
) -> Path:
    """Convert the checkpoint in a directory. Matrices are stored as `kind`, vectors as F32."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_settings(writer, config, architecture)
    if architecture == "gemma3":
        _write_sentencepiece(writer, config["vocab_size"])
    else:
        _write_byte_level(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    with safe_open(str(checkpoint / "model.safetensors"), "np") as file:
        for name in file.keys():  # noqa: SIM118
            values = file.get_tensor(name).astype(np.float32)
            _write_tensor(writer, name, values, config, architecture, kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_settings(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    ropes = config["rope_parameters"]
    if architecture == "gemma3":
        writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        writer.add_sliding_window(config["sliding_window"])
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_array("gemma3.attention.sliding_window_pattern", sliding)
    else:
        writer.add_rope_freq_base(ropes["rope_theta"])


def _write_byte_level(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if text in special else 1 for text in vocab])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)


def _write_sentencepiece(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", *PIECES]
    types = [3, 3, 3, 3, *[6] * 256, 4, *[1] * len(PIECES)]
    scores = [-1000.0] * 261 + [-float(index) for index in range(len(PIECES))]
    unused = size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"<unused{i}>" for i in range(unused)])
    writer.add_token_types(types + [3] * unused)
    writer.add_token_scores(scores + [-1000.0] * unused)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _write_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: np.ndarray,
    config: dict[str, Any],
    architecture: str,
    kind: gguf.GGMLQuantizationType,
) -> None:
    if name.endswith("norm.weight") and architecture == "gemma3":
        values = values + 1
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    base, _, end = name.rpartition(".")
    if base in whole:
        new = f"{whole[base]}.{end}"
    else:
        _, _, layer, part = base.split(".", 3)
        names = LAYER_NAMES | (GEMMA if architecture == "gemma3" else PLAIN)
        new = f"blk.{layer}.{names[part]}.{end}"
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(names[part])
        if architecture == "llama" and heads is not None:
            count = config[heads]
            values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    kind = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
    data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
    writer.add_tensor(new, data, raw_dtype=kind)
