"""Loads what a worker was told to serve, and shows how it goes."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from forebay.errors import ConfigError
from forebay.kernels.formats import own_fp8
from forebay.models.base import CausalLM
from forebay.models.config import read_config
from forebay.models.loading import IndexKeys, checkpoint_directory, fingerprint_weights, load_model
from forebay.models.ranks import ALONE, Ranks
from forebay.models.registry import text_config
from forebay.workers.config import WorkerConfig

BAR_WIDTH = 30
REDRAW_S = 0.1

_STORED = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Half precision is loaded wider: its exponents don't fit into bfloat16's fewer digits without loss.
_COMPUTED = _STORED | {"float16": torch.float32}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is to be loaded: safetensors in `directory`, to be computed in `dtype` on `device`; how index keys are to be
    stored, and in what KV, if not in `dtype`."""

    directory: Path
    dtype: torch.dtype
    device: torch.device
    index_keys: IndexKeys = "model"
    kv_dtype: torch.dtype | None = None


def load_checkpoint(config: WorkerConfig) -> tuple[CausalLM, bytes]:
    """The model and the fingerprint of its weights. Blocks for as long as that takes.

    Raises ForebayError with the remedy for whatever is wrong with path, file, dtype or device.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    found = find_checkpoint(config)
    weights = fingerprint(config)
    return load_found(found), weights


def find_checkpoint(config: WorkerConfig) -> Checkpoint:
    """Where the model's weights are, a GGUF file being converted first. Raises as `load_checkpoint` does."""
    device, progress = _device(config.device), Progress()
    directory = checkpoint_directory(config.model, cache_dir=config.cache_dir, progress=progress)
    progress.finish()
    kv_dtype = _kv_dtype(config.kv_cache_dtype, device)
    return Checkpoint(directory, _dtype(config.dtype, directory), device, config.index_cache_dtype, kv_dtype)


def fingerprint(config: WorkerConfig) -> bytes:
    """Of the weights' contents, which are all read, unless it is known."""
    progress = Progress()
    found = fingerprint_weights(config.model, config.cache_dir, progress)
    progress.finish()
    return found


def load_found(found: Checkpoint, ranks: Ranks = ALONE) -> CausalLM:
    """The model, or this rank's part of it."""
    progress = Progress()
    model = load_model(
        found.directory, dtype=found.dtype, device=found.device, progress=progress, ranks=ranks,
        index_keys=found.index_keys,
        kv_dtype=found.kv_dtype,
    )  # fmt: skip
    progress.finish()
    kinds = f"{found.dtype}, KV in {model.kv_dtype}"
    log.info("loaded %s: %s, %s on %s", found.directory, model.info.family, kinds, found.device)
    return model


def _dtype(name: str, directory: Path) -> torch.dtype:
    """What to compute in: as told, or what the checkpoint is stored in."""
    if name != "auto":
        return torch.float16 if name == "float16" else _STORED[name]
    config = read_config(directory)
    stored = text_config(config).get("dtype") or text_config(config).get("torch_dtype")
    stored = stored or config.get("dtype") or config.get("torch_dtype")
    return _COMPUTED.get(str(stored), torch.bfloat16)


def _kv_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """What KV is kept in; None: in what is computed in."""
    if name == "auto":
        return None
    return own_fp8(device) if name == "fp8_e4m3" else torch.float8_e4m3fnuz


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch finds no CUDA device here; use cpu, or install a CUDA build")
    return device


class Progress:
    """A bar on a terminal, a line a stage in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._stage = ""
        self._drawn = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of `stage` are behind us."""
        now = time.monotonic()
        if not self._terminal:
            if stage != self._stage:
                log.info("%s", stage)
        elif stage != self._stage or done >= total or now - self._drawn >= REDRAW_S:
            filled = BAR_WIDTH * done // max(total, 1)
            line = f"\r{stage:<22} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {100 * done // max(total, 1):3d} %"
            print(line, end="", file=sys.stderr, flush=True)
            self._drawn = now
        self._stage = stage

    def finish(self) -> None:
        """End the bar's line."""
        if self._terminal and self._stage:
            print(file=sys.stderr)
