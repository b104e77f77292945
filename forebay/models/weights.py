"""Taking tensors out of a directory of safetensors, one at a time, each with the shape that it must have.

A rank that has only a part of a tensor reads only that part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forebay.models.base import ModelInfo
from forebay.models.errors import CheckpointBroken, ModelNotFound, UnsupportedArchitecture
from forebay.models.json_file import read_json
from forebay.models.layers import Linear, SummedLinear, accumulate_dtype
from forebay.models.quantised import MX_GROUP, Quantisation, scale_shape, unpack_mxfp4, unscale_fp8
from forebay.models.ranks import ALONE, Ranks

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, done, total)."""

Cut = Mapping[int, range]
"""Of a tensor's axes the parts that are wanted; the others are wanted whole."""

WHOLE: Cut = {}

_PART = re.compile(r"(layers\.(?P<layer>\d+)|norm|lm_head|embed_tokens)\.")
"""What a model is made of."""

_NO_PART = re.compile(r"rotary_emb\.|(input|[qkv]|kv)_scale$")
"""What is derived from other numbers, and scales for a narrower computation than this one."""

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")

_INDEX = re.compile(r"\.indexer\.")
"""A layer that takes another one's choice may have an index all the same."""


def read_index(directory: Path) -> dict[str, str]:
    """Which file of a checkpoint has which tensor, as its index says; empty without an index. Raises
    CheckpointBroken."""
    index = directory / INDEX_FILE
    if not index.exists():
        return {}
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(n, str) for n in named.values()):
        raise CheckpointBroken(f"{index} has no weight_map; restore it from the model's source")
    if any("/" in name or name.startswith(".") for name in named.values()):
        raise CheckpointBroken(f"{index} names files outside its directory")
    return named


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted. Raises ModelNotFound or CheckpointBroken."""
    names = sorted(set(read_index(directory).values()))
    if not names:
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

    def shape(self, path: Path, name: str) -> tuple[int, ...]:
        """From the file's header. Raises CheckpointBroken."""
        with _read_errors(path):
            return tuple(self._opened(path).get_slice(name).get_shape())

    def tensor(self, path: Path, name: str, cut: Cut) -> Tensor:
        """What `cut` leaves of it, possibly a view of the mapped file. Raises CheckpointBroken."""
        with _read_errors(path):
            if not cut:
                whole: Tensor = self._opened(path).get_tensor(name)
                return whole
            axes = [slice(None)] * (max(cut) + 1)
            for axis, wanted in cut.items():
                axes[axis] = slice(wanted.start, wanted.stop)
            part: Tensor = self._opened(path).get_slice(name)[tuple(axes)]
            return part

    def _opened(self, path: Path) -> safe_open:
        if self._file is None or path != self._path:
            self._file = safe_open(str(path), framework="pt")
            self._path = path
        return self._file


class Weights:
    """The tensors of a checkpoint, by name without the family's outer prefix (`layers.0.mlp...`, `lm_head...`).

    `ranks` says which of those that share the model this one is: whoever builds it asks for its parts alone.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        quantisation: Quantisation,
        ranks: Ranks = ALONE,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`kv_dtype`: what KV is kept in, if not in `dtype`."""
        self.ranks = ranks
        self.kv_dtype = kv_dtype or dtype
        self.directory, self.dtype, self.device = directory, dtype, device
        self.quantisation = quantisation
        self._progress = progress
        self._taken = 0
        self._reader = _Reader()
        self._files = _find_tensors(directory)
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is here, from its file's header. Raises CheckpointBroken."""
        path, full_name = self._files[name]
        return self._reader.shape(path, full_name)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, cut: Cut = WHOLE) -> Tensor:
        """A copy of the tensor of this shape, or of what `cut` leaves of it, on the device, in `dtype` (default: the
        model's). Blocks on the disk.

        What is stored in FP8 comes multiplied by its scales. Raises CheckpointBroken if it is missing or has another
        shape, UnsupportedArchitecture if it is quantised in a way that isn't known.
        """
        if f"{name}_scale_inv" in self and len(shape) == 2:
            tensor = self._read_fp8(name, shape, cut)
        else:
            tensor = self._read(name, shape, cut)
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise UnsupportedArchitecture(
                f"{self._files[name][0]}: tensor {name!r} is {tensor.dtype} without scales that are known here; "
                "quantised safetensors are supported in block-scaled FP8 and in MXFP4: use such a model, an "
                "unquantised one, or a GGUF"
            )
        # Never a view of the mapped file: a file that is cut while it is mapped kills the process.
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def _read_fp8(self, name: str, shape: tuple[int, ...], cut: Cut) -> Tensor:
        """A matrix times the scales of its blocks; whole blocks are read around what is wanted."""
        block = self.quantisation.block
        blocks = {axis: _around(part, block[axis]) for axis, part in cut.items()}
        wide = {
            axis: range(part.start * block[axis], min(part.stop * block[axis], shape[axis]))
            for axis, part in blocks.items()
        }
        values = self._read(name, shape, wide)
        if values.dtype != torch.float8_e4m3fn:
            return values
        scales = self._read(f"{name}_scale_inv", scale_shape(shape, block), blocks)
        return _within(unscale_fp8(values, scales, block), cut, wide)

    def take_fp8(self, name: str, *shape: int, cut: Cut = WHOLE) -> tuple[Tensor, Tensor]:
        """The FP8 values [n, k] of a matrix and the fp32 scales of its blocks, as they are stored, or what `cut`, which
        begins with a block, leaves of them. Raises CheckpointBroken."""
        block = self.quantisation.block
        values = self._read(name, shape, cut)
        blocks = {axis: _around(part, block[axis]) for axis, part in cut.items()}
        scales = self._read(f"{name}_scale_inv", scale_shape(shape, block), blocks)  # type: ignore[arg-type]
        if values.dtype != torch.float8_e4m3fn:
            raise CheckpointBroken(f"{self.directory}: {name} isn't FP8 (e4m3), as config.json says")
        return values.to(device=self.device, copy=True), scales.to(device=self.device, dtype=torch.float32, copy=True)

    def take_codes(self, name: str, *shape: int, cut: Cut = WHOLE) -> tuple[Tensor, Tensor]:
        """Of the MXFP4 tensor [..., k] its codes uint8 [..., k / 2] and scales uint8 [..., k / 32], as they are stored,
        or what `cut` leaves of them, of k whole groups. Raises CheckpointBroken."""
        last = len(shape) - 1
        stored = {axis: _around(part, MX_GROUP) if axis == last else part for axis, part in cut.items()}
        blocks, scales = self._read_mxfp4(name, shape, stored)
        return blocks.flatten(-2).to(device=self.device, copy=True), scales.to(device=self.device, copy=True)

    def take_mxfp4(self, name: str, *shape: int, cut: Cut = WHOLE) -> Tensor:
        """The tensor [..., k], or what `cut` leaves of it, that is stored as `name`_blocks and `name`_scales. Raises
        CheckpointBroken."""
        last = len(shape) - 1
        stored = {axis: _around(part, MX_GROUP) if axis == last else part for axis, part in cut.items()}
        blocks, scales = self._read_mxfp4(name, shape, stored)
        wide = {last: range(stored[last].start * MX_GROUP, stored[last].stop * MX_GROUP)} if last in cut else {}
        values = _within(unpack_mxfp4(blocks, scales), {axis: cut[axis] for axis in wide}, wide)
        return values.to(device=self.device, dtype=self.dtype)

    def _read_mxfp4(self, name: str, shape: tuple[int, ...], stored: Cut) -> tuple[Tensor, Tensor]:
        groups = -(-shape[-1] // MX_GROUP)
        blocks = self._read(f"{name}_blocks", (*shape[:-1], groups, MX_GROUP // 2), stored)
        scales = self._read(f"{name}_scales", (*shape[:-1], groups), stored)
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or shape[-1] % MX_GROUP:
            raise CheckpointBroken(
                f"{self.directory}: {name} isn't MXFP4 (bytes, groups of {MX_GROUP}), as config.json says"
            )
        return blocks, scales

    def _read(self, name: str, shape: tuple[int, ...], cut: Cut = WHOLE) -> Tensor:
        """The tensor as it is stored, or what `cut` leaves of it, possibly a view of the mapped file."""
        if name not in self._files:
            raise CheckpointBroken(
                f"{self.directory} has no tensor {name!r}; the checkpoint is incomplete or of another "
                "architecture than its config.json says"
            )
        self._asked.add(name)
        path, full_name = self._files[name]
        cut = {axis: part for axis, part in cut.items() if part != range(shape[axis])}
        found = self._reader.shape(path, full_name)
        if found != shape:
            raise CheckpointBroken(
                f"{path}: tensor {full_name!r} has shape {list(found)}, but config.json wants "
                f"{list(shape)}; the files don't belong together"
            )
        tensor = self._reader.tensor(path, full_name, cut)
        self._taken += 1
        if self._progress is not None:
            self._progress("loading weights", self._taken, max(self._taken, len(self._files)))
        return tensor

    def refuse_leftovers(self, info: ModelInfo) -> None:
        """Once the model of these facts is built: raise UnsupportedArchitecture for a tensor of its layers, its last
        norm or its ends that it hasn't taken. It would be computed with something less than the checkpoint has."""
        dealt = self.ranks.experts != "inside"
        for name in self._files.keys() - self._asked:
            part, index = _PART.match(name), info.sparse is not None and _INDEX.search(name)
            elsewhere = dealt and _ONE_EXPERT.search(name)
            if part is None or int(part["layer"] or 0) >= info.num_layers:
                continue
            if not (_NO_PART.search(name) or index or elsewhere):
                path, full_name = self._files[name]
                raise UnsupportedArchitecture(
                    f"{path}: tensor {full_name!r} has no part in {info.family} as config.json describes it; choose "
                    "another model, or the config.json that belongs to these files"
                )

    def exact(self, name: str, *shape: int, cut: Cut = WHOLE) -> Tensor:
        """Like `take`, in the dtype that norms are computed in."""
        return self.take(name, *shape, dtype=accumulate_dtype(self.dtype), cut=cut)

    def linear(self, name: str, out: int, into: int, *, bias: bool = False, rows: range | None = None) -> Linear:
        """The projection `name`, from `into` to `out` features, or to `rows` of these."""
        return self.merged_linear({name: out}, into, bias=bias, rows={} if rows is None else {name: rows})

    def merged_linear(
        self, outs: Mapping[str, int], into: int, *, bias: bool = False, rows: Mapping[str, range] | None = None
    ) -> Linear:
        """Several projections (name -> out features) of the same input as one, their results side by side; of those
        in `rows` only that part."""
        cuts: dict[str, Cut] = {name: {0: part} for name, part in (rows or {}).items()}
        weight = torch.cat([self.take(f"{n}.weight", out, into, cut=cuts.get(n, WHOLE)) for n, out in outs.items()])
        if not bias:
            return Linear(weight)
        biases = [self.take(f"{n}.bias", out, cut=cuts.get(n, WHOLE)) for n, out in outs.items()]
        return Linear(weight, torch.cat(biases))

    def summed_linear(
        self, name: str, out: int, into: int, columns: range, *, bias: bool = False, partial: bool = False
    ) -> Linear:
        """The projection `name` of an input of which each rank has its `columns`: all ranks' products are summed, or
        left to be, if only a `partial` sum is wanted. The first rank's part has the bias."""
        weight = self.take(f"{name}.weight", out, into, cut={1: columns})
        added = self.take(f"{name}.bias", out) if bias and self.ranks.rank == 0 else None
        self._asked |= {f"{name}.bias"} if bias else set()
        if partial or self.ranks.size == 1:
            return Linear(weight, added)
        return SummedLinear(weight, added, self.ranks)


def _around(part: range, step: int) -> range:
    """The blocks of `step` that have any of `part`."""
    return range(part.start // step, -(-part.stop // step))


def _within(tensor: Tensor, cut: Cut, wide: Cut) -> Tensor:
    """Cut out of `tensor`, which holds the parts `wide`, the parts `cut`."""
    for axis, part in cut.items():
        tensor = tensor.narrow(axis, part.start - wide[axis].start, len(part))
    return tensor


def _find_tensors(directory: Path) -> dict[str, tuple[Path, str]]:
    """By short name each tensor's file and full name. Where there is an index, it says in which file a tensor is."""
    named, found = read_index(directory), dict[str, tuple[Path, str]]()
    for path in weight_files(directory):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if named.get(name, path.name) != path.name:
                    continue
                twice = found.setdefault(_short_name(name), (path, name))
                if twice != (path, name):
                    raise CheckpointBroken(
                        f"{path} has tensor {name!r}, which is {twice[1]!r} in {twice[0].name} already; keep the files "
                        "of one checkpoint in a directory"
                    )
    lacking = [name for name in named if found.get(_short_name(name), (None, ""))[1] != name]
    if lacking:
        raise CheckpointBroken(
            f"{directory / named[lacking[0]]} has no tensor {lacking[0]!r}, which its index says it has; download it "
            "again"
        )
    return found


def _short_name(name: str) -> str:
    for prefix in sorted(PREFIXES, key=len, reverse=True):
        if name.startswith(prefix):
            return name.removeprefix(prefix).removeprefix("language_model.")
    return name
