"""Copies between an engine's caches and payloads in the pool, whatever strides the engine's caches have.

Every layer's cache is seen as [blocks, heads, tokens, values], K's values before V's; only its strides differ between
backends. Layers that lie at equal distances in one storage are copied together. A payload's granules are
[layer, K/V, head, token, value], so that a copy is one strided assignment for each run of blocks:

    payload  [blocks x granules a block, layers, K/V, heads, 16, values]
    cache    [layers, blocks, heads, granules a block x 16, K/V x values]

On the CPU that is all. On an accelerator it goes through a device buffer of the payload's shape, on a stream of its
own: one strided copy on the device, one plain copy over the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import xxhash
from torch import Tensor

from forebay.connectors.blocks import Piece, pieces, split
from forebay.connectors.grouping import Part
from forebay.connectors.orders import Tables
from forebay.errors import ConfigError
from forebay.kvstore.geometry import MATCH_UNIT, GroupGeometry
from forebay.kvstore.layout.ownership import HeadPart


@dataclass(frozen=True, slots=True)
class Planes:
    """K and V as one array where they are equally wide, else each by itself: where they begin in a row of the cache and
    in a layer of a granule, in elements, and how many rows of how many values they are."""

    at: int
    offset: int
    rows: int
    dim: int


class LayerStack:
    """Caches of some layers of one group as one tensor [layers, blocks, heads, tokens, values]."""

    def __init__(self, part: Part, caches: Mapping[str, Tensor], blocks: int, geometry: GroupGeometry) -> None:
        self.part = part
        first = caches[part.names[0]]
        if first.dim() != 4 or first.shape[0] % blocks or first.shape[3] != sum(geometry.row_dims):
            shape = tuple(first.shape)
            raise ConfigError(f"cache {part.names[0]} of shape {shape} isn't [blocks, heads, tokens, values]")
        self.ratio = first.shape[0] // blocks
        self.block_tokens = first.shape[2]
        if self.block_tokens * self.ratio != part.block_tokens:
            raise ConfigError(f"cache {part.names[0]} has {self.block_tokens} tokens a block, not {part.block_tokens}")
        self.stacks = _stacked([caches[name] for name in part.names], part.places)


def _stacked(caches: Sequence[Tensor], places: Sequence[int]) -> list[tuple[slice, Tensor]]:
    """Layers at equal distances as one tensor, with the places that they have in a payload; else each by itself."""
    size = caches[0].element_size()
    steps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(caches)}
    jumps = {b - a for a, b in pairwise(places)}
    alike = all(cache.stride() == caches[0].stride() and cache.shape == caches[0].shape for cache in caches)
    storage = {cache.untyped_storage().data_ptr() for cache in caches}
    if len(caches) > 1 and alike and len(steps) == len(jumps) == len(storage) == 1 and (step := steps.pop()) > 0:
        first = caches[0]
        stacked = torch.as_strided(
            first, (len(caches), *first.shape), (step // size, *first.stride()), first.storage_offset()
        )
        return [(slice(places[0], places[-1] + 1, jumps.pop()), stacked)]
    return [(slice(place, place + 1), cache[None]) for place, cache in zip(places, caches, strict=True)]


class GroupCopier:
    """Copies chunks of one of our groups. `heads` are those that this rank holds."""

    def __init__(self, geometry: GroupGeometry, heads: HeadPart, stacks: Sequence[LayerStack]) -> None:
        self.geometry, self.heads = geometry, heads
        self._stacks = tuple(stacks)
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._planes = _planes(geometry)
        self._layers = len(geometry.layers)
        example = self._stacks[0].stacks[0][1]
        if example.shape[2] != heads.count or example.dtype is not self._dtype:
            found = f"{example.shape[2]} heads of {example.dtype}"
            raise ConfigError(f"the engine's caches have {found}, expected {heads.count} of {self._dtype}")
        self.device = example.device
        self._bounce = None if self.device.type == "cpu" else Bounce(self.device)

    def load(self, payload: memoryview, start: int, first: int, last: int, tables: Tables) -> None:
        """Copy tokens [first, last) of the chunk that begins at `start` into their blocks. Blocks for that time.

        Raises LookupError if the engine has no block for one of them; some may have been copied then.
        """
        if self._bounce is None:
            self._move(self._granules(payload), start, first, last, tables, into_cache=True, base=False)
            return
        with self._bounce.loading(self._granules(payload)) as granules:
            self._move(granules, start, first, last, tables, into_cache=True, base=False)

    def store(self, room: memoryview, start: int, end: int, tables: Tables) -> Callable[[], None]:
        """Copy the chunk [start, end) into `room`. `tables` are cut to it. Raises as `load`.

        The engine may overwrite the cache afterwards. The room is filled when what is returned has been called, on
        whatever thread; that may block.
        """
        granules, bounce = self._granules(room), self._bounce
        if bounce is None:
            self._move(granules, start, start, end, tables, into_cache=False, base=True)
            return _nothing
        with bounce.storing(granules) as staged:
            self._move(staged, start, start, end, tables, into_cache=False, base=True)
        return lambda: bounce.fetch(granules, staged)

    def _granules(self, payload: memoryview) -> Tensor:
        size = self.geometry.granule_bytes
        return torch.frombuffer(payload, dtype=self._dtype).view(len(payload) // size, -1)

    def _move(
        self, granules: Tensor, start: int, first: int, last: int, tables: Tables, *, into_cache: bool, base: bool
    ) -> None:
        for stack in self._stacks:
            tokens = stack.block_tokens
            table = tables[stack.part.engine_group]
            offset = start // stack.part.block_tokens * stack.ratio if base else 0
            places = pieces(start, first, last, tokens, split(table, stack.ratio), offset)
            for plane in self._planes:
                shaped = self._plane(granules, plane)
                for layers, cache in stack.stacks:
                    width = plane.rows * plane.dim
                    rows = cache[..., plane.at : plane.at + width].unflatten(-1, (plane.rows, plane.dim))
                    for piece in places:
                        payload, blocks = _sides(shaped[:, layers], rows, piece)
                        if into_cache:
                            blocks.copy_(payload)
                        else:
                            payload.copy_(blocks)

    def _plane(self, granules: Tensor, plane: Planes) -> Tensor:
        """[granules, layers, rows, heads, 16, values] of a payload, this rank's heads alone."""
        geometry = self.geometry
        layers = granules.unflatten(1, (self._layers, -1))
        length = plane.rows * geometry.kv_heads * MATCH_UNIT * plane.dim
        shape = (plane.rows, geometry.kv_heads, MATCH_UNIT, plane.dim)
        shaped = layers[:, :, plane.offset : plane.offset + length].unflatten(2, shape)
        return shaped[:, :, :, self.heads.first : self.heads.first + self.heads.count]


def _planes(geometry: GroupGeometry) -> tuple[Planes, ...]:
    dims = geometry.row_dims
    if len(set(dims)) == 1:
        return (Planes(0, 0, len(dims), dims[0]),)
    rows = geometry.kv_heads * MATCH_UNIT
    return tuple(Planes(sum(dims[:i]), rows * sum(dims[:i]), 1, dim) for i, dim in enumerate(dims))


def _sides(payload: Tensor, rows: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """Both sides of a copy in one shape. `payload` is [granules, layers, rows, heads, 16, values], `rows` are
    [layers, blocks, heads, tokens, rows, values]."""
    granule, inside = divmod(piece.token, MATCH_UNIT)
    blocks = rows[:, piece.block : piece.block + piece.blocks, :, piece.slot : piece.slot + piece.count]
    if inside or piece.count % MATCH_UNIT:
        return payload[granule, :, :, :, inside : inside + piece.count], blocks[:, 0].permute(0, 3, 1, 2, 4)
    units = piece.count // MATCH_UNIT
    some = payload[granule : granule + units * piece.blocks].unflatten(0, (piece.blocks, units))
    return some, blocks.unflatten(3, (units, MATCH_UNIT)).permute(1, 3, 0, 5, 2, 4, 6)


def _nothing() -> None:
    """The room is full already."""


def checksums(payload: memoryview, granule_bytes: int) -> bytes:
    """One xxh3_64 (u64 LE) a granule."""
    digest = xxhash.xxh3_64_intdigest
    return b"".join(
        digest(payload[at : at + granule_bytes]).to_bytes(8, "little") for at in range(0, len(payload), granule_bytes)
    )


class Bounce:
    """An accelerator's way: a buffer of the payload's shape on the device, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def loading(self, granules: Tensor) -> Iterator[Tensor]:
        """Gives a device copy of `granules`; ends when what was read from it is done."""
        with torch.cuda.stream(self._stream):
            yield granules.to(self._device)
        self._stream.synchronize()

    @contextmanager
    def storing(self, granules: Tensor) -> Iterator[Tensor]:
        """Gives a device buffer like `granules`. What is read to fill it was written by the engine's stream, which goes
        on when it is full."""
        engine = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(engine)
        with torch.cuda.stream(self._stream):
            yield torch.empty_like(granules, device=self._device)
        engine.wait_stream(self._stream)

    def fetch(self, granules: Tensor, staged: Tensor) -> None:
        """Bring a filled buffer over. Blocks until it is there."""
        with torch.cuda.stream(self._stream):
            granules.copy_(staged)
        self._stream.synchronize()
