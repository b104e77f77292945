"""Tiny checkpoints that vLLM's CPU backend takes: heads of 32, random weights, the same on every run."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.checkpoints import MAX_POSITIONS, VOCAB, tiny_gemma3, tiny_qwen3, write_tokenizer

WINDOW = 64


def qwen3(path: Path, seed: int = 0) -> Path:
    """Full attention alone."""
    return tiny_qwen3(path, seed=seed, head_dim=32)


def gemma3(path: Path) -> Path:
    """Sliding windows and full attention: two groups of ours, more of vLLM's."""
    return tiny_gemma3(path, head_dim=32, window=WINDOW)


def deepseek(path: Path) -> Path:
    """Latent attention; dense layers, so that no expert is chosen by a rounding error. `latent + rope` is what vLLM's
    kernel for CPUs is built for."""
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=3, q_lora_rank=32, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=MAX_POSITIONS, bos_token_id=2, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=rng)
            narrow = weight.dim() == 1
            weight.copy_(1.0 + 0.2 * noise if narrow else noise * (1.0 if "embed" in name else weight.shape[1] ** -0.5))
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path, adds_bos=False)
    return path
