"""Reading one JSON file of a checkpoint. Knows no torch: front ends read tokenizer settings without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay.models.errors import CheckpointBroken, ModelNotFound

MAX_JSON_BYTES = 256 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelNotFound or CheckpointBroken."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointBroken(f"{path} is over {MAX_JSON_BYTES} bytes; it can't be right")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelNotFound(
            f"{path} does not exist; pass a .gguf file, or a directory with config.json and safetensors"
        ) from error
    except OSError as error:
        raise CheckpointBroken(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointBroken(f"{path} is not valid JSON ({error}); restore it from the model's source") from error
    if not isinstance(value, dict):
        raise CheckpointBroken(f"{path} must hold a JSON object; restore it from the model's source")
    return value
