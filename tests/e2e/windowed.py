"""A tiny model with sliding windows whose answers depend on all that it has read.

The usual tiny Gemma 3 answers with its prompt's last token for ever: its scaled embeddings, with a tied head, outweigh
all that attention adds. Equal answers of such a model prove nothing about a cache. Here attention has the last word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny_gemma3

GAIN = 6.0


def tiny_windowed(path: Path, **settings: Any) -> Path:
    """Six layers, the third and the sixth full, the others with a window of 40. Returns `path`."""
    tiny_gemma3(path, tie_word_embeddings=False, **settings)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("post_attention_layernorm.weight"):
            tensors[name] = tensors[name] + GAIN
    save_file(tensors, file, metadata={"format": "pt"})
    return path
