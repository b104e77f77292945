"""Converting a GGUF file, once, to a directory of safetensors with configuration and tokenizer.

Matrices that were quantised are stored in bf16: it is what they are computed in by default, and quantisation
has taken more from them. Vectors keep fp32, other tensors the dtype that they have.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file

from forebay.models.cache_dir import exclusive, new_directory
from forebay.models.errors import CheckpointBroken, UnsupportedArchitecture
from forebay.models.gguf_config import ROPE_FACTORS, gguf_config, rename_tensor
from forebay.models.gguf_file import GGUFFile, GGUFTensor, read_gguf
from forebay.models.gguf_tokenizer import write_tokenizer
from forebay.models.weights import INDEX_FILE, Progress

CONVERTER_VERSION = 2
SHARD_BYTES = 2**30
SOURCE_FILE = "source.json"

_STORED = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
}


def converted_directory(path: Path, cache_dir: Path) -> Path:
    """Where the conversion of the file at `path`, as it is now, is or will be."""
    stat = path.stat()
    identity = (CONVERTER_VERSION, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return cache_dir / f"{path.stem}-{digest}"


def convert_gguf(path: Path, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The directory with the converted model; converts if nobody has yet. Blocks for seconds to minutes.

    Safe when several processes do it at once, and when one is killed. Earlier conversions of the same path
    are removed. Raises CheckpointBroken, UnsupportedArchitecture, NoSpace, NotWritable.
    """
    final = converted_directory(path, cache_dir)
    if final.is_dir():
        return final
    file = read_gguf(path)
    _check_data(file)
    with exclusive(cache_dir):
        if not final.is_dir():
            with new_directory(cache_dir, final) as directory:
                _convert(file, directory, progress)
            _remove_older(path, final, cache_dir)
    return final


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The configuration of the model in a GGUF file, without converting it."""
    file = read_gguf(path)
    return gguf_config(file, _rope_factors(file))


def _convert(file: GGUFFile, directory: Path, progress: Progress | None) -> None:
    config = gguf_config(file, _rope_factors(file))
    shards = _Shards(directory)
    total = len(file.tensors)
    for done, tensor in enumerate(file.tensors.values(), start=1):
        renamed = rename_tensor(tensor.name, file, config)
        if renamed is not None:
            values = renamed.convert(_values(file, tensor))
            shards.add(renamed.name, _stored(values, tensor))
        if progress is not None:
            progress("converting weights", done, total)
    shards.finish()
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if progress is not None:
        progress("converting tokenizer", 0, 1)
    write_tokenizer(file, directory)
    if progress is not None:
        progress("converting tokenizer", 1, 1)
    source = {"path": str(file.path.resolve()), "converter": CONVERTER_VERSION}
    (directory / SOURCE_FILE).write_text(json.dumps(source))


def _remove_older(path: Path, final: Path, cache_dir: Path) -> None:
    # So that the cache holds one conversion a file, however often the file is replaced.
    for source in cache_dir.glob(f"*/{SOURCE_FILE}"):
        try:
            same = json.loads(source.read_text()).get("path") == str(path.resolve())
        except (OSError, ValueError):
            continue
        if same and source.parent != final:
            shutil.rmtree(source.parent, ignore_errors=True)


# --- tensors -------------------------------------------------------------------------------------------------


def _byte_shape(file: GGUFFile, tensor: GGUFTensor) -> tuple[int, ...]:
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
    except (ValueError, KeyError) as error:
        raise UnsupportedArchitecture(
            f"{file.path}: tensor {tensor.name!r} has the unknown quantisation {tensor.type_id}; use a "
            "common one such as Q8_0 or Q4_K_M"
        ) from error
    if tensor.shape[-1] % block:
        raise CheckpointBroken(
            f"{file.path}: tensor {tensor.name!r} has rows of {tensor.shape[-1]}, not whole blocks of "
            f"{block}; download it again"
        )
    return (*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)


def _check_data(file: GGUFFile) -> None:
    """Raise CheckpointBroken unless every tensor's bytes are in the file."""
    end = max((t.offset + _count(_byte_shape(file, t)) for t in file.tensors.values()), default=0)
    if end > file.size:
        raise CheckpointBroken(
            f"{file.path} is cut short: it has {file.size} bytes, its tensors end at {end}; download it again"
        )


def _count(shape: tuple[int, ...]) -> int:
    product = 1  # in Python's own integers: a damaged shape may overflow numpy's
    for size in shape:
        product *= size
    return product


def _values(file: GGUFFile, tensor: GGUFTensor) -> NDArray[np.float32]:
    shape = _byte_shape(file, tensor)
    with file.path.open("rb") as source:
        source.seek(tensor.offset)
        raw = np.fromfile(source, dtype=np.uint8, count=_count(shape))
    if raw.size != _count(shape):
        raise CheckpointBroken(f"{file.path} was cut short while it was read; download it again")
    kind = GGMLQuantizationType(tensor.type_id)
    try:
        if kind in _STORED:
            plain = np.float32 if kind == GGMLQuantizationType.F32 else np.float16
            return raw.view(plain).reshape(tensor.shape).astype(np.float32)
        values: NDArray[np.float32] = dequantize(raw.reshape(shape), kind)
    except NotImplementedError as error:
        raise UnsupportedArchitecture(
            f"{file.path}: tensor {tensor.name!r} is {kind.name}, which can't be dequantised; use a "
            "common quantisation such as Q8_0 or Q4_K_M"
        ) from error
    return values.reshape(tensor.shape)


def _stored(values: NDArray[np.float32], tensor: GGUFTensor) -> torch.Tensor:
    stored = _STORED.get(GGMLQuantizationType(tensor.type_id), torch.bfloat16)
    if len(tensor.shape) == 1:
        stored = torch.float32
    return torch.from_numpy(np.ascontiguousarray(values)).to(stored)


def _rope_factors(file: GGUFFile) -> tuple[float, ...]:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    _check_data(file)
    return tuple(_values(file, tensor).reshape(-1).tolist())


@dataclass
class _Shards:
    """Writes tensors as they come, in files of about SHARD_BYTES: a large model needn't fit in memory."""

    directory: Path
    _pending: dict[str, torch.Tensor] = field(default_factory=dict)
    _bytes: int = 0
    _where: dict[str, str] = field(default_factory=dict)
    _written: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._pending[name] = tensor.contiguous()
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        self._write()
        index = {"metadata": {}, "weight_map": self._where}
        (self.directory / INDEX_FILE).write_text(json.dumps(index, indent=1))

    def _write(self) -> None:
        if not self._pending:
            return
        self._written += 1
        name = f"model-{self._written:05}.safetensors"
        try:
            save_file(self._pending, self.directory / name, metadata={"format": "pt"})
        except SafetensorError as error:
            # The library hides the system's error number in its text.
            full = "os error 28" in str(error) or "os error 27" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
        self._where |= dict.fromkeys(self._pending, name)
        self._pending, self._bytes = {}, 0
