"""Checkpoints that benchmarks make for themselves: random weights, one token a byte. Needs the package transformers."""

from __future__ import annotations

from pathlib import Path

LETTERS = 256


def write_tokenizer(path: Path) -> None:
    """A token for each byte, in the directory `path`."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(letters) == LETTERS, len(letters)
    tokenizer = Tokenizer(BPE({letter: token for token, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


def small_model(folder: Path) -> Path:
    """A Qwen3 of some 10 M parameters, 3 KiB of KV a token in bf16: for CPUs on which a real model takes hours."""
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=LETTERS, hidden_size=384, intermediate_size=1152, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1 << 16, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    path = folder / "small-qwen3"
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)
    return path
