"""Reading GGUF: the metadata, and where each tensor's bytes are. Nothing here trusts the file.

    "GGUF" | version u32 | tensors u64 | entries u64 | entries... | tensor descriptions... | padding | data

Everything is little-endian. A string is a u64 length and its bytes; an entry is a key, a type and a value; a
tensor is a name, its dimensions (innermost first), a type and an offset into the data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forebay.models.errors import CheckpointBroken, UnsupportedArchitecture

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMENSIONS: Final = 4
MAX_DEPTH: Final = 2

_STRING, _ARRAY = 8, 9
_SCALARS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's description. `shape` is outermost first; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a GGUF file. Values are plain: int, float, bool, str, or lists of them."""

    path: Path
    size: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """What kind of model this is, in GGUF's words."""
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(path: Path) -> GGUFFile:
    """Read the header. Raises CheckpointBroken for anything cut short or inconsistent."""
    size = path.stat().st_size
    if size < 24:
        raise _cut_short(path, size)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, data).read()


def _cut_short(path: Path, size: int) -> CheckpointBroken:
    return CheckpointBroken(f"{path} is cut short: it ends after {size} bytes, inside its header; download it again")


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size, self._at = path, data, len(data), 0

    def read(self) -> GGUFFile:
        if self._data[:4] != MAGIC:
            raise CheckpointBroken(
                f"{self._path} is not a GGUF file (it does not begin with 'GGUF'); "
                "pass a .gguf file or a directory of safetensors"
            )
        self._at = 4
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise UnsupportedArchitecture(
                f"{self._path} is GGUF version {version}; versions 2 and 3 are supported: "
                "convert it again with a current tool"
            )
        tensor_count, entry_count = self._scalar("<Q"), self._scalar("<Q")
        self._expect(entry_count * 12 + tensor_count * 24)
        metadata = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"), depth=0)
        described = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._broken(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {t.name: GGUFTensor(t.name, t.shape, t.type_id, start + t.offset) for t in described}
        if len(tensors) != tensor_count:
            raise self._broken("two of its tensors have the same name")
        return GGUFFile(self._path, self._size, metadata, tensors)

    def _broken(self, why: str) -> CheckpointBroken:
        return CheckpointBroken(f"{self._path} is damaged: {why}; download it again")

    def _expect(self, count: int) -> None:
        if count > self._size - self._at:
            raise _cut_short(self._path, self._size)

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        self._expect(size)
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += size
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._expect(length)
        raw = self._data[self._at : self._at + length]
        self._at += length
        return raw.decode("utf-8", "surrogateescape")

    def _value(self, type_id: int, depth: int) -> Any:
        if type_id in _SCALARS:
            return self._scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY and depth < MAX_DEPTH:
            return self._array(depth)
        raise self._broken(f"a metadata value has the unknown type {type_id}")

    def _array(self, depth: int) -> list[Any]:
        type_id, count = self._scalar("<I"), self._scalar("<Q")
        if type_id not in _SCALARS:
            self._expect(count * 8)
            return [self._value(type_id, depth + 1) for _ in range(count)]
        code = _SCALARS[type_id]
        size = struct.calcsize(code) * count
        self._expect(size)
        values = struct.unpack_from(f"<{count}{code[1]}", self._data, self._at)
        self._at += size
        return list(values)

    def _tensor(self) -> GGUFTensor:
        name, dimensions = self._string(), self._scalar("<I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(dimensions))
        type_id, offset = self._scalar("<I"), self._scalar("<Q")
        return GGUFTensor(name, shape[::-1], type_id, offset)
