"""A fingerprint of a checkpoint by its contents: names and paths prove nothing.

    tensors = SHA256(domain, then of every tensor in the order of names: its description as JSON, then its bytes)
    SHA256(domain, tensors, config.json as sorted JSON without COSMETIC)

Shards, file names and the order of tensors in a file don't matter. The configuration counts because the same tensors
compute something else beside, say, another epsilon; a field that nobody knows is taken to matter.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.models.cache_dir import exclusive, new_file
from forebay.models.errors import CheckpointBroken
from forebay.models.weights import weight_files

FINGERPRINT_BYTES = 32
MAX_CACHED = 256

COSMETIC = frozenset((
    "_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "id2label", "label2id", "_attn_implementation_autoset",
))  # fmt: skip
"""Fields of a configuration that change nothing about KV bytes, or (the dtype) are said elsewhere."""

_DOMAIN = b"forebay/weights/1\0"
_WITH_CONFIG = b"forebay/checkpoint/1\0"
_MAX_HEADER = 100 * 2**20
_STEP = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _Tensor:
    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def fingerprint_weights(directory: Path, cache_dir: Path) -> bytes:
    """32 bytes for the tensors in `directory` and what its configuration says of them. Reads them all, unless it has
    before.

    Cached in `cache_dir` by the files' device, inode, size and modification time. Raises CheckpointBroken.
    """
    return hashlib.sha256(_WITH_CONFIG + _of_tensors(directory, cache_dir) + _of_config(directory)).digest()


def _of_config(directory: Path) -> bytes:
    path = directory / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return b""
    except ValueError as error:
        raise CheckpointBroken(f"{path} isn't JSON: {error}") from error
    return json.dumps(_telling(found), sort_keys=True).encode()


def _telling(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _telling(part) for name, part in value.items() if name not in COSMETIC}
    return value


def _of_tensors(directory: Path, cache_dir: Path) -> bytes:
    files = weight_files(directory)
    folder = cache_dir / "fingerprints"
    cached = folder / _identity(files)
    known = _read_cached(cached)
    if known is not None:
        return known
    found = _fingerprint(files)
    with exclusive(cache_dir):
        folder.mkdir(exist_ok=True)
        with new_file(cache_dir, cached) as temporary:
            temporary.write_text(found.hex())
        by_age = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for old in by_age[:-MAX_CACHED]:
            old.unlink(missing_ok=True)
    return found


def _identity(files: list[Path]) -> str:
    facts = []
    for path in files:
        stat = path.stat()
        facts.append((path.name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(_DOMAIN + repr(facts).encode()).hexdigest()


def _read_cached(path: Path) -> bytes | None:
    try:
        found = bytes.fromhex(path.read_text())
    except (OSError, ValueError):
        return None
    return found if len(found) == FINGERPRINT_BYTES else None


def _fingerprint(files: list[Path]) -> bytes:
    digest = hashlib.sha256(_DOMAIN)
    tensors = [tensor for path in files for tensor in _tensors(path)]
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(json.dumps([tensor.name, tensor.dtype, list(tensor.shape)]).encode())
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            left = tensor.end - tensor.start
            while left:
                part = file.read(min(left, _STEP))
                if not part:
                    raise CheckpointBroken(f"{tensor.path} is cut short; download it again")
                digest.update(part)
                left -= len(part)
    return digest.digest()


def _tensors(path: Path) -> Iterator[_Tensor]:
    """What a safetensors file holds, from its header: u64 length, JSON, then the data."""
    broken = CheckpointBroken(f"{path} is cut short or damaged; download it again")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise broken
        raw = file.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                base = 8 + length
                if not 0 <= first <= last <= size - base:
                    raise broken
                shape = tuple(entry["shape"])
                yield _Tensor(path, name, entry["dtype"], shape, base + first, base + last)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise broken from error
