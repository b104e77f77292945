"""From a path to a model: a directory of safetensors, or a GGUF file, which is converted once and cached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from forebay.errors import ConfigError
from forebay.models import fingerprint
from forebay.models.base import CausalLM, ModelInfo
from forebay.models.cache_dir import default_cache_dir
from forebay.models.config import CONFIG_FILE, INDEX_KEYS, Config, read_config
from forebay.models.convert import convert_gguf, read_gguf_config
from forebay.models.errors import ModelNotFound, UnsupportedArchitecture
from forebay.models.json_file import read_json
from forebay.models.parallel import ExpertSplit
from forebay.models.quantised import read_quantisation
from forebay.models.ranks import ALONE, Ranks, check_split
from forebay.models.registry import find_family, text_config
from forebay.models.weights import Progress, Weights

GENERATION_FILE = "generation_config.json"
DTYPES = (torch.bfloat16, torch.float32, torch.float64)

IndexKeys = Literal["model", "fp8"]
"""How sparse layers' index keys are stored: in the model's dtype, or as FP8 with a scale a key."""


def checkpoint_directory(path: Path, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The directory with config.json, safetensors and tokenizer.json: `path` itself, or a GGUF file's conversion.

    May block for the conversion. Raises ModelNotFound, CheckpointBroken, UnsupportedArchitecture, NoSpace,
    NotWritable.
    """
    _check_path(path)
    if path.is_dir():
        return path
    return convert_gguf(path, cache_dir or default_cache_dir(), progress)


def read_info(path: Path, index_keys: IndexKeys = "model") -> ModelInfo:
    """Facts about the model at `path`, without reading weights. Raises as `checkpoint_directory` does."""
    _check_path(path)
    if path.is_dir():
        config, generation = read_config(path), _generation(path)
    else:
        config, generation = Config(read_gguf_config(path), path), None
    return _info(config, generation, index_keys)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    ranks: Ranks = ALONE,
    index_keys: IndexKeys = "model",
    kv_dtype: torch.dtype | None = None,
) -> CausalLM:
    """The model at `path`, its weights in memory; with several `ranks` this one's part of it, which computes together
    with the others'. `kv_dtype`: the FP8 that KV is kept in; None: it is in `dtype`. Blocks for as long as reading the
    weights takes.

    `progress` is called with (what, done, total). Raises ModelNotFound, CheckpointBroken,
    UnsupportedArchitecture, NoSpace, NotWritable, ConfigError.
    """
    if dtype not in DTYPES:
        raise UnsupportedArchitecture(f"models can't be computed in {dtype}; choose bfloat16, float32 or float64")
    directory = checkpoint_directory(path, cache_dir=cache_dir, progress=progress)
    config = read_config(directory)
    text = _text(config, index_keys)
    family, info = find_family(text), _info(config, _generation(directory), index_keys)
    if kv_dtype is not None:
        _check_narrow(info)
    quantisation = read_quantisation(config if "quantization_config" in config else text_config(config))
    weights = Weights(
        directory, dtype=dtype, device=device, progress=progress, quantisation=quantisation, ranks=ranks,
        kv_dtype=kv_dtype,
    )
    with torch.inference_mode():
        model = family.build(text, weights)
    weights.refuse_leftovers(info)
    model.info, model.narrow_kv = info, kv_dtype
    return model


def _check_narrow(info: ModelInfo) -> None:
    odd = sorted({group.kind for group in info.kv_groups} - {"full", "window", "latent"})
    if odd:
        raise ConfigError(
            f"kv_cache_dtype: KV in FP8 isn't supported beside a group of kind {odd[0]!r}, which {info.family} has; "
            "use auto"
        )


def check_ranks(directory: Path, size: int, experts: ExpertSplit = "inside") -> None:
    """May `size` tensor parallel ranks share the checkpoint in `directory`? Raises ConfigError; reads no weights."""
    config = read_config(directory)
    check_split(text_config(config), _info(config, None, "model"), size, experts)


def fingerprint_weights(path: Path, cache_dir: Path | None = None, progress: Progress | None = None) -> bytes:
    """32 bytes for the contents of the tensors that `load_model(path)` would load. See `fingerprint`."""
    cache_dir = cache_dir or default_cache_dir()
    directory = checkpoint_directory(path, cache_dir=cache_dir, progress=progress)
    return fingerprint.fingerprint_weights(directory, cache_dir)


def _text(config: Config, index_keys: IndexKeys) -> Config:
    """The language model's configuration, with what isn't a matter of the checkpoint."""
    text = text_config(config)
    return text if index_keys == "model" else text.having(**{INDEX_KEYS: index_keys})


def _info(config: Config, generation: Config | None, index_keys: IndexKeys) -> ModelInfo:
    nested = _text(config, index_keys)
    info = find_family(nested).info(nested)
    if index_keys != "model" and not any(group.scaled for group in info.kv_groups):
        raise ConfigError(f"index_cache_dtype {index_keys}: this model has no index keys; leave it out")
    # What ends an answer: the generation settings know more (the end of a turn) than the architecture's.
    eos = generation.token_ids("eos_token_id") if generation is not None else ()
    eos = eos or config.token_ids("eos_token_id") or info.eos_ids
    return replace(info, eos_ids=eos)


def _generation(directory: Path) -> Config | None:
    path = directory / GENERATION_FILE
    return Config(read_json(path), path) if path.is_file() else None


def _check_path(path: Path) -> None:
    if not path.exists():
        raise ModelNotFound(
            f"there is no model at {path}; pass a .gguf file, or a directory with {CONFIG_FILE} and safetensors"
        )
    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        raise ModelNotFound(f"{path} has no {CONFIG_FILE}; pass the directory that holds it beside the safetensors")
