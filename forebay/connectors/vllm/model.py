"""What of vLLM's configuration changes KV bytes: as a namespace, and as layers of its caches."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from forebay.connectors.grouping import EngineLayer, Grouping, group_layers
from forebay.errors import ConfigError, ForebayError
from forebay.kvstore.geometry import GroupKind
from forebay.kvstore.identity import Namespace, check_namespace
from forebay.models.cache_dir import default_cache_dir
from forebay.models.config import Config
from forebay.models.errors import UnsupportedArchitecture
from forebay.models.fingerprint import fingerprint_weights
from forebay.models.registry import find_family

log = logging.getLogger(__name__)

UNNAMED = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Of a configuration, what says nothing about KV bytes, or is said elsewhere."""


def grouping_of(config: VllmConfig, caches: KVCacheConfig) -> Grouping:
    """vLLM's cache groups and ours. Raises ConfigError for what can't be stored, with what to change."""
    _check_parallel(config)
    total = int(config.model_config.get_total_num_kv_heads())
    layers = [
        _layer(name, spec, place, total, config.parallel_config.tensor_parallel_size)
        for place, group in enumerate(caches.kv_cache_groups)
        for name, spec in _specs(group.layer_names, group.kv_cache_spec)
    ]
    if any(group.is_eagle_group for group in caches.kv_cache_groups):
        raise ConfigError("a draft model with a KV cache of its own can't be used with Forebay: leave it away")
    return group_layers(layers)


def _check_parallel(config: VllmConfig) -> None:
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"{name} {getattr(parallel, name)} can't be used with Forebay's connector: set it to 1")


def _specs(names: list[str], spec: KVCacheSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    for name in names:
        yield name, spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _layer(name: str, spec: KVCacheSpec, place: int, total_heads: int, ranks: int) -> EngineLayer:
    kind, window = _kind(name, spec)
    assert isinstance(spec, AttentionSpec)
    if spec.kv_quant_mode is not KVQuantMode.NONE or spec.state_content_bytes is not None or spec.tokens_per_state != 1:
        raise ConfigError(f"the cache of {name} is quantised or packed: run with --kv-cache-dtype auto")
    latent = kind == "latent"
    heads = 1 if latent else spec.num_kv_heads * ranks if total_heads >= ranks else total_heads
    return EngineLayer(
        name=name,
        layer=extract_layer_index(name),
        kind=kind,
        kv_heads=heads,
        head_dim=spec.head_size,
        value_dim=None if latent else spec.head_size_v,
        dtype=str(spec.dtype).removeprefix("torch."),
        window=window,
        engine_group=place,
        block_tokens=spec.block_size,
    )


def _kind(name: str, spec: KVCacheSpec) -> tuple[GroupKind, int | None]:
    if type(spec) is MLAAttentionSpec:
        return "latent", None
    if type(spec) is FullAttentionSpec and spec.attention_chunk_size is None and not spec.non_causal:
        return ("window", spec.sliding_window) if spec.sliding_window is not None else ("full", None)
    if type(spec) is SlidingWindowSpec:
        return "window", spec.sliding_window
    raise ConfigError(f"the cache of {name} is a {type(spec).__name__}, which Forebay's connector can't store")


def namespace_of(config: VllmConfig, grouping: Grouping, chunk_tokens: int, cache_dir: str) -> Namespace:
    """Everything that changes KV bytes. Blocks while weights are read that haven't been before. Raises ForebayError."""
    model = config.model_config
    if config.load_config.load_format == "dummy":
        raise ConfigError("weights that are made up have no contents to tell them by: --load-format dummy has no cache")
    directory = _directory(model.model, model.revision, config.load_config.download_dir)
    weights = fingerprint_weights(directory, Path(cache_dir) if cache_dir else default_cache_dir())
    namespace = Namespace(
        weights=weights,
        groups=grouping.geometries,
        chunk_tokens=chunk_tokens,
        compute=str(model.dtype).removeprefix("torch."),
        quantisation=str(model.quantization or "none"),
        positions=_positions(config, directory),
    )
    refusal = check_namespace(namespace)
    if refusal:
        raise ConfigError(f"this model's cache can't be stored: {refusal}")
    return namespace


def _directory(model: str, revision: str | None, download_dir: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the files of model {model} aren't found ({error}); give its directory") from error
    return Path(found)


def _positions(config: VllmConfig, directory: Path) -> tuple[tuple[str, str], ...]:
    """As our own worker describes the families that it knows; else all of the configuration, as a hash."""
    model = config.model_config
    values = model.hf_text_config.to_dict()
    ours = Config(values, directory / "config.json")
    try:
        rope = find_family(ours).info(ours).rope
        if any(name.endswith(".dynamic") for name in rope):
            raise UnsupportedArchitecture("vLLM stretches positions dynamically by another rule than our worker")
        if model.hf_overrides or model.hf_config_path:
            raise UnsupportedArchitecture("vLLM computes by another configuration than our worker reads")
        return tuple(sorted((name, str(value)) for name, value in rope.items()))
    except UnsupportedArchitecture:
        kept = {name: value for name, value in values.items() if name not in UNNAMED}
        if "longrope" in repr(values):
            kept["max_model_len"] = model.max_model_len  # by it vLLM chooses between a model's two sets of factors
        text = json.dumps(kept, sort_keys=True, default=str)
        return (("config", hashlib.sha256(text.encode()).hexdigest()),)
    except ForebayError as error:
        raise ConfigError(f"the model's configuration can't be read: {error}") from error
