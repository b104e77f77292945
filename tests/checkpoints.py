"""Tiny checkpoints with random weights, the same on every run, in the form that published models have.

Their ratios are awkward on purpose: heads that share, head sizes that aren't hidden / heads, a window that is not
a multiple of a block. Their weights are large enough that the best two logits are seldom close.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

VOCAB = 512
MAX_POSITIONS = 4096
SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
EOS_ID, BOS_ID = 1, 2

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tiny_gemma3(
    path: Path,
    *,
    window: int = 40,
    seed: int = 0,
    chat_template: str | None = None,
    shard_size: str = "1GB",
    **settings: Any,
) -> Path:
    """Six layers, the third and the sixth full, the others with a sliding window. Returns `path`."""
    config = transformers.Gemma3TextConfig(
        **_sizes(layers=6, kv_heads=1, head_dim=24, settings=settings),
        sliding_window=window,
        query_pre_attn_scalar=settings.pop("query_pre_attn_scalar", 20),
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **settings,
    )
    model = transformers.Gemma3ForCausalLM(config)
    return _write(model, path, seed, shard_size, adds_bos=True, chat_template=chat_template)


def tiny_qwen3(
    path: Path,
    *,
    seed: int = 0,
    chat_template: str | None = None,
    shard_size: str = "1GB",
    **settings: Any,
) -> Path:
    """Three layers; its tokenizer adds no bos. Returns `path`."""
    sizes = _sizes(layers=3, kv_heads=2, head_dim=24, settings=settings)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **settings))
    return _write(model, path, seed, shard_size, adds_bos=False, chat_template=chat_template)


def tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    chat_template: str | None = None,
    shard_size: str = "1GB",
    **settings: Any,
) -> Path:
    """Three layers, untied head. Returns `path`."""
    sizes = _sizes(layers=3, kv_heads=2, head_dim=20, settings=settings)
    settings.setdefault("tie_word_embeddings", False)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **settings))
    return _write(model, path, seed, shard_size, adds_bos=True, chat_template=chat_template)


def tiny_qwen2(path: Path, *, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Three layers, with a bias on q, k and v. Returns `path`."""
    sizes = _sizes(layers=3, kv_heads=1, head_dim=16, settings=settings)
    del sizes["head_dim"]
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **settings))
    return _write(model, path, seed, shard_size, adds_bos=False, chat_template=None)


def tiny_qwen3_moe(path: Path, *, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Three layers, the second dense; three of seven experts a token. Returns `path`."""
    sizes = _sizes(layers=3, kv_heads=2, head_dim=24, settings=settings)
    experts = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
    config = transformers.Qwen3MoeConfig(**sizes, **({"norm_topk_prob": True} | experts | settings))
    return _write(transformers.Qwen3MoeForCausalLM(config), path, seed, shard_size, adds_bos=False, chat_template=None)


def tiny_gpt_oss(path: Path, *, window: int = 40, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Four layers, sliding and full in turn, with sinks; two of five experts a token; YaRN. Returns `path`."""
    sizes = _sizes(layers=4, kv_heads=2, head_dim=20, settings=settings)
    rope = {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False,
        "rope_theta": 150_000.0, "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": rope}
    config = transformers.GptOssConfig(**sizes, **({"sliding_window": window} | experts | settings))
    return _write(transformers.GptOssForCausalLM(config), path, seed, shard_size, adds_bos=False, chat_template=None)


def tiny_glm4_moe(path: Path, *, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Three layers, the first dense; half of a head rotated; three of ten experts in two groups, two shared."""
    sizes = _sizes(layers=3, kv_heads=2, head_dim=20, settings=settings)
    experts = {
        "n_routed_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2,
        "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True,
    }  # fmt: skip
    config = transformers.Glm4MoeConfig(**sizes, **(experts | settings))
    return _write(transformers.Glm4MoeForCausalLM(config), path, seed, shard_size, adds_bos=False, chat_template=None)


def tiny_minimax_m2(path: Path, *, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Three layers, half of a head rotated, two of five experts a token. Returns `path`."""
    sizes = _sizes(layers=3, kv_heads=2, head_dim=24, settings=settings)
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": rope}
    config = transformers.MiniMaxM2Config(**sizes, **(experts | settings))
    model = transformers.MiniMaxM2ForCausalLM(config)
    return _write(model, path, seed, shard_size, adds_bos=False, chat_template=None)


_LATENT = {
    "kv_lora_rank": 28, "q_lora_rank": 36, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 16,
    "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "first_k_dense_replace": 1,
    "n_group": 3, "topk_group": 2,
}  # fmt: skip


def tiny_deepseek_v3(path: Path, *, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Three layers, the first dense; latent attention with YaRN; three of twelve experts in groups, one shared."""
    rope = {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0,
        "mscale": 0.7, "mscale_all_dim": 1.2,
    }  # fmt: skip
    sizes = _sizes(layers=3, kv_heads=4, head_dim=12, settings=settings)
    del sizes["head_dim"]
    config = transformers.DeepseekV3Config(**sizes, **(_LATENT | {"rope_parameters": rope} | settings))
    model = transformers.DeepseekV3ForCausalLM(config)
    return _write(model, path, seed, shard_size, adds_bos=False, chat_template=None)


def tiny_deepseek_v2(path: Path, *, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Like V3's, with queries that have no latent, V2's router and two shared experts. Returns `path`."""
    sizes = _sizes(layers=3, kv_heads=4, head_dim=12, settings=settings)
    del sizes["head_dim"]
    own = {"topk_method": "group_limited_greedy", "q_lora_rank": None, "n_shared_experts": 2}
    config = transformers.DeepseekV2Config(**sizes, **(_LATENT | own | {"routed_scaling_factor": 1.5} | settings))
    model = transformers.DeepseekV2ForCausalLM(config)
    return _write(model, path, seed, shard_size, adds_bos=False, chat_template=None)


_SPARSE = _LATENT | {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 3}


def tiny_deepseek_v32(path: Path, *, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Three layers, the first dense; V3's latents and experts, and in each an index that chooses 24 positions."""
    sizes = _sizes(layers=3, kv_heads=4, head_dim=12, settings=settings)
    del sizes["head_dim"]
    model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**sizes, **(_SPARSE | settings)))
    return _write(model, path, seed, shard_size, adds_bos=False, chat_template=None)


def tiny_glm_moe_dsa(path: Path, *, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Four layers, the first dense; the last two share what the second one chooses. Returns `path`."""
    sizes = _sizes(layers=4, kv_heads=4, head_dim=12, settings=settings)
    del sizes["head_dim"]
    own = {"index_topk_freq": 3, "n_group": 1, "topk_group": 1}
    model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**sizes, **(_SPARSE | own | settings)))
    return _write(model, path, seed, shard_size, adds_bos=False, chat_template=None)


def tiny_minimax_m3(path: Path, *, seed: int = 0, shard_size: str = "1GB", **settings: Any) -> Path:
    """Four layers, the first full and dense; the others choose 3 blocks of 12 positions for each KV head. Returns
    `path`."""
    sizes = _sizes(layers=4, kv_heads=2, head_dim=24, settings=settings)
    own = {
        "intermediate_size": 40, "dense_intermediate_size": 96, "shared_intermediate_size": 56,
        "num_local_experts": 5, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 20,
        "index_block_size": 12, "index_topk_blocks": 3, "index_local_blocks": 1,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    config = transformers.MiniMaxM3VLTextConfig(**(sizes | own | settings))
    model = transformers.AutoModelForCausalLM.from_config(config)
    return _write(model, path, seed, shard_size, adds_bos=False, chat_template=None)


def _sizes(*, layers: int, kv_heads: int, head_dim: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Common settings; what is in `settings` wins and is taken out of it."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }
    return {key: settings.pop(key, value) for key, value in sizes.items()}


def _write(
    model: transformers.PreTrainedModel,
    path: Path,
    seed: int,
    shard_size: str,
    *,
    adds_bos: bool,
    chat_template: str | None,
) -> Path:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=rng)
            if weight.dim() == 1:
                center = 0.0 if "bias" in name or isinstance(model, transformers.Gemma3ForCausalLM) else 1.0
                weight.copy_(center + 0.2 * noise)
            elif "embed_tokens" in name:
                weight.copy_(noise)
            else:
                stacked = weight.dim() == 3 and not isinstance(model, transformers.GptOssForCausalLM)
                weight.copy_(noise * 1.5 * weight.shape[2 if stacked else 1] ** -0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):  # some of the biased scores are negative
                buffer.copy_(0.5 * torch.randn(buffer.shape, generator=rng) - 0.5)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, max_shard_size=shard_size)
    write_tokenizer(path, adds_bos=adds_bos, chat_template=chat_template)
    return path


# --- quantised forms of a checkpoint -------------------------------------------------------------------------


def to_fp8(path: Path, block: tuple[int, int] = (32, 24)) -> Path:
    """Rewrite the checkpoint at `path` in block-scaled FP8: its projections, but for head, embedding and router.

    Returns a sibling directory with the same numbers unquantised: what the quantised ones must compute.
    """
    tensors, plain = load_file(path / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        projection = name.endswith("_proj.weight") or name.endswith("_with_mqa.weight") or ".experts." in name
        if weight.dim() != 2 or not projection:
            continue
        rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
        padded = torch.zeros(rows * block[0], columns * block[1])
        padded[: weight.shape[0], : weight.shape[1]] = weight
        tiles = padded.view(rows, block[0], columns, block[1])
        scales = tiles.abs().amax(dim=(1, 3)).clamp_min(1e-6) / 448.0
        values = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        whole = (values.float() * scales[:, None, :, None]).view(padded.shape)
        cut = (slice(weight.shape[0]), slice(weight.shape[1]))
        tensors[name] = values.view(padded.shape)[cut].contiguous()
        tensors[f"{name}_scale_inv"] = scales
        plain[name] = whole[cut].contiguous()
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return _write_quantised(path, tensors, plain, method)


def to_mxfp4(path: Path) -> Path:
    """Rewrite a gpt_oss checkpoint at `path` with its experts in MXFP4, as it is published; returns what `to_fp8`
    returns."""
    tensors, plain = load_file(path / "model.safetensors"), {}
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for name, weight in list(tensors.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))  # published: [experts, out, in]
        exponents = (groups.abs().amax(dim=-1).clamp_min(1e-6).log2().floor() - 2).clamp(-127, 127)
        scaled = groups / exponents.exp2()[..., None]
        codes = (scaled.abs()[..., None] - grid).abs().argmin(dim=-1)
        signed = torch.where(scaled < 0, codes + 8, codes).to(torch.uint8)
        del tensors[name]
        tensors[f"{name}_blocks"] = (signed[..., 0::2] | (signed[..., 1::2] << 4)).contiguous()
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8).contiguous()
        whole = torch.where(scaled < 0, -grid[codes], grid[codes]) * exponents.exp2()[..., None]
        plain[name] = whole.flatten(-2).transpose(1, 2).contiguous()
    return _write_quantised(path, tensors, plain, {"quant_method": "mxfp4"})


def _write_quantised(
    path: Path, tensors: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], method: dict[str, Any]
) -> Path:
    assert plain, "nothing in this checkpoint was quantised"
    sibling = path.with_name(f"{path.name}-plain")
    shutil.copytree(path, sibling)
    save_file(load_file(path / "model.safetensors") | plain, sibling / "model.safetensors", {"format": "pt"})
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": method}
    (path / "config.json").write_text(json.dumps(config))
    return sibling


def write_tokenizer(path: Path, *, adds_bos: bool, chat_template: str | None = None) -> None:
    """A byte-level BPE of VOCAB tokens: four specials, 256 bytes, and pairs of frequent letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(_pairs(VOCAB - len(SPECIALS) - len(alphabet)))
    texts = [*SPECIALS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(BPE({text: index for index, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "add_bos_token": adds_bos,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": chat_template,
    }
    kept = {key: value for key, value in settings.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(kept))


def _pairs(count: int) -> Iterator[tuple[str, str]]:
    letters = "Ġetaoinshrdlucmf"
    pairs = [(a, b) for a in letters for b in letters]
    assert len(pairs) >= count, (len(pairs), count)
    yield from pairs[:count]
