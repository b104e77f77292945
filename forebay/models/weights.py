"""Taking tensors out of a directory of safetensors, one at a time, each with the shape that it must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forebay.models.errors import CheckpointBroken, ModelNotFound, UnsupportedArchitecture
from forebay.models.json_file import read_json
from forebay.models.layers import Linear, accumulate_dtype
from forebay.models.quantised import MX_GROUP, Quantisation, scale_shape, unpack_mxfp4, unscale_fp8

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, done, total)."""


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted. Raises ModelNotFound or CheckpointBroken."""
    index = directory / INDEX_FILE
    if index.exists():
        named = read_json(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(n, str) for n in named.values()):
            raise CheckpointBroken(f"{index} has no weight_map; restore it from the model's source")
        names = sorted(set(named.values()))
        if any("/" in name or name.startswith(".") for name in names):
            raise CheckpointBroken(f"{index} names files outside its directory")
    else:
        names = [SINGLE_FILE] if (directory / SINGLE_FILE).exists() else []
        names = names or sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ModelNotFound(
            f"{directory} holds no .safetensors files; pass a directory with config.json and "
            "model.safetensors, or a .gguf file"
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointBroken(f"{directory} lacks {', '.join(missing[:3])}, which its index names; download it again")
    return [directory / name for name in names]


@contextmanager
def open_safetensors(path: Path) -> Iterator[safe_open]:
    """An open file. What the library raises becomes CheckpointBroken."""
    with _read_errors(path), safe_open(str(path), framework="pt") as file:
        yield file


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise CheckpointBroken(f"{path} is cut short or damaged ({error}); download it again") from error
    except OSError as error:
        raise CheckpointBroken(f"{path} can't be read: {error}") from error


class _Reader:
    """Tensors of several files. The last one stays open: to open a file of 2,000 tensors takes 2 ms, each time."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: safe_open | None = None

    def tensor(self, path: Path, name: str) -> Tensor:
        """Possibly a view of the mapped file. Raises CheckpointBroken."""
        with _read_errors(path):
            if self._file is None or path != self._path:
                self._file = safe_open(str(path), framework="pt")
                self._path = path
            found: Tensor = self._file.get_tensor(name)
            return found


class Weights:
    """The tensors of a checkpoint, by name without the family's outer prefix (`layers.0.mlp...`, `lm_head...`)."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        quantisation: Quantisation,
    ) -> None:
        self.directory, self.dtype, self.device = directory, dtype, device
        self.quantisation = quantisation
        self._progress = progress
        self._taken = 0
        self._reader = _Reader()
        self._files: dict[str, tuple[Path, str]] = {}
        for path in weight_files(directory):
            with open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    self._files[_short_name(name)] = (path, name)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of the tensor, on the device, in `dtype` (default: the model's). Blocks on the disk.

        What is stored in FP8 comes multiplied by its scales. Raises CheckpointBroken if it is missing or has another
        shape, UnsupportedArchitecture if it is quantised in a way that isn't known.
        """
        tensor = self._read(name, shape)
        if tensor.dtype == torch.float8_e4m3fn and f"{name}_scale_inv" in self and len(shape) == 2:
            block = self.quantisation.block
            scales = self._read(f"{name}_scale_inv", scale_shape(shape, block))
            tensor = unscale_fp8(tensor, scales, block)
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise UnsupportedArchitecture(
                f"{self._files[name][0]}: tensor {name!r} is {tensor.dtype} without scales that are known here; "
                "quantised safetensors are supported in block-scaled FP8 and in MXFP4: use such a model, an "
                "unquantised one, or a GGUF"
            )
        # Never a view of the mapped file: a file that is cut while it is mapped kills the process.
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def take_mxfp4(self, name: str, *shape: int) -> Tensor:
        """The tensor [..., k] that is stored as `name`_blocks and `name`_scales. Raises CheckpointBroken."""
        groups = -(-shape[-1] // MX_GROUP)
        blocks = self._read(f"{name}_blocks", (*shape[:-1], groups, MX_GROUP // 2))
        scales = self._read(f"{name}_scales", (*shape[:-1], groups))
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or shape[-1] % MX_GROUP:
            raise CheckpointBroken(
                f"{self.directory}: {name} isn't MXFP4 (bytes, groups of {MX_GROUP}), as config.json says"
            )
        return unpack_mxfp4(blocks, scales).to(device=self.device, dtype=self.dtype)

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as it is stored, possibly a view of the mapped file."""
        if name not in self._files:
            raise CheckpointBroken(
                f"{self.directory} has no tensor {name!r}; the checkpoint is incomplete or of another "
                "architecture than its config.json says"
            )
        path, full_name = self._files[name]
        tensor = self._reader.tensor(path, full_name)
        if tuple(tensor.shape) != shape:
            raise CheckpointBroken(
                f"{path}: tensor {full_name!r} has shape {list(tensor.shape)}, but config.json wants "
                f"{list(shape)}; the files don't belong together"
            )
        self._taken += 1
        if self._progress is not None:
            self._progress("loading weights", self._taken, max(self._taken, len(self._files)))
        return tensor

    def exact(self, name: str, *shape: int) -> Tensor:
        """Like `take`, in the dtype that norms are computed in."""
        return self.take(name, *shape, dtype=accumulate_dtype(self.dtype))

    def linear(self, name: str, out: int, into: int, *, bias: bool = False) -> Linear:
        """The projection `name`, from `into` to `out` features."""
        return self.merged_linear({name: out}, into, bias=bias)

    def merged_linear(self, outs: Mapping[str, int], into: int, *, bias: bool = False) -> Linear:
        """Several projections (name -> out features) of the same input as one, their results side by side."""
        weight = torch.cat([self.take(f"{name}.weight", out, into) for name, out in outs.items()])
        if not bias:
            return Linear(weight)
        return Linear(weight, torch.cat([self.take(f"{n}.bias", out) for n, out in outs.items()]))


def _short_name(name: str) -> str:
    for prefix in sorted(PREFIXES, key=len, reverse=True):
        if name.startswith(prefix):
            return name.removeprefix(prefix).removeprefix("language_model.")
    return name
