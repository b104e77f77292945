"""Copies between an engine's caches and payloads in the pool, whatever strides and cells the engine's caches have.

Every layer's cache is seen as [blocks, heads, tokens, values]; its strides differ between backends, and so does what a
cell of one block and head looks like (`cells`). Layers that lie at equal distances in one storage are copied together.
A payload's granules are [layer, K/V, head, token, channel], so that a copy is one strided assignment for each run of
blocks and each kind of row:

    payload  [blocks, granules a block, layers, K/V, heads, 16 tokens, channels]
    cache    the same, by other strides

On the CPU that is all. On an accelerator it goes through a device buffer of the payload's shape, on a stream of its
own: strided copies on the device, one plain copy over the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import xxhash
from torch import Tensor

from forebay.connectors.blocks import Piece, pieces, split
from forebay.connectors.cells import CellRow, cut_units, plain_rows, unit_of
from forebay.connectors.grouping import Part
from forebay.connectors.orders import Tables
from forebay.errors import ConfigError
from forebay.kvstore.geometry import MATCH_UNIT, GroupGeometry
from forebay.kvstore.layout.ownership import HeadPart

Finish = Callable[[], Callable[[memoryview], None]]
"""Brings what was copied aside to this side of the bus, which may block; what it returns fills a room with it."""

Packing = Callable[[int], tuple[CellRow, ...]]
"""The rows of a packed cell of so many tokens, of which the cache is contiguous."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one kind (K and V, where they are kept alike), of layers at equal distances.

    `views` are [layers, blocks, heads, units, rows, token factors ..., channel factors ...], each with the first of its
    units. `layers` are the places of the layers in a payload, `at` the first row's in a layer of it, in channels.
    """

    layers: slice
    at: int
    count: int
    dim: int
    tokens: tuple[int, ...]
    channels: tuple[int, ...]
    views: tuple[tuple[int, Tensor], ...]


class LayerStack:
    """Caches of the layers of one part. `packing` is how their cells are packed, None for plain ones."""

    def __init__(
        self,
        part: Part,
        caches: Mapping[str, Tensor],
        blocks: int,
        geometry: GroupGeometry,
        packing: Packing | None = None,
    ) -> None:
        self.part = part
        first = caches[part.names[0]]
        if first.dim() != 4 or first.shape[0] % blocks or first.shape[3] != sum(geometry.row_dims):
            shape = tuple(first.shape)
            raise ConfigError(f"cache {part.names[0]} of shape {shape} isn't [blocks, heads, tokens, values]")
        self.heads, self.block_tokens = first.shape[1], first.shape[2]
        self.dtype, self.device = first.dtype, first.device
        self.ratio = first.shape[0] // blocks
        if self.block_tokens * self.ratio != part.block_tokens:
            raise ConfigError(f"cache {part.names[0]} has {self.block_tokens} tokens a block, not {part.block_tokens}")
        self.unit = unit_of(self.block_tokens)
        rows = _cell_rows(first, geometry, packing)
        stacks = _stacked([caches[name] for name in part.names], part.places)
        self.rows = [kept for layers, cache in stacks for kept in _rows(layers, cache, rows, self.unit)]


def _cell_rows(cache: Tensor, geometry: GroupGeometry, packing: Packing | None) -> tuple[CellRow, ...]:
    tokens, values = cache.shape[2:]
    if packing is None:
        return plain_rows(geometry.row_dims, tokens, cache.stride(2), cache.stride(3))
    if cache.stride()[2:] != (values, 1):
        raise ConfigError("a packed cache must be contiguous inside of a block and head")
    return packing(tokens)


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


def _rows(layers: slice, cache: Tensor, rows: Sequence[CellRow], unit: int) -> list[Rows]:
    """Views of each row; one for both if they are kept alike."""
    alike = len(rows) == 2 and (rows[0].tokens, rows[0].channels) == (rows[1].tokens, rows[1].channels)
    groups = [tuple(rows)] if alike else [(row,) for row in rows]
    found, at = [], 0
    for group in groups:
        units = cut_units(group[0], unit)
        gap = group[1].offset - group[0].offset if len(group) == 2 else 0
        starts = [(0, len(units.offsets))] if units.step is not None else [(u, 1) for u in range(len(units.offsets))]
        views = []
        for start, count in starts:
            inner = (*units.tokens, *group[0].channels)
            sizes = (*cache.shape[:3], count, len(group), *(n for n, _ in inner))
            strides = (*cache.stride()[:3], units.step or 0, gap, *(step for _, step in inner))
            offset = cache.storage_offset() + group[0].offset + units.offsets[start]
            views.append((start, torch.as_strided(cache, sizes, strides, offset)))
        counts = tuple(n for n, _ in units.tokens), tuple(n for n, _ in group[0].channels)
        found.append(Rows(layers, at, len(group), group[0].dim, *counts, tuple(views)))
        at += sum(row.dim for row in group)
    return found


class GroupCopier:
    """Copies chunks of one of our groups. `heads` are those that this rank holds."""

    def __init__(self, geometry: GroupGeometry, heads: HeadPart, stacks: Sequence[LayerStack]) -> None:
        self.geometry, self.heads, self.stacks = geometry, heads, tuple(stacks)
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        for stack in self.stacks:
            if (stack.heads, stack.dtype) != (heads.count, self._dtype):
                found, wanted = f"{stack.heads} heads of {stack.dtype}", f"{heads.count} of {self._dtype}"
                raise ConfigError(f"the engine's caches have {found}, expected {wanted}")
        device = self.stacks[0].device
        self._bounce = None if device.type == "cpu" else Bounce(device)

    def follow_engine(self) -> None:
        """What is stored from now on, on whatever thread, was written on the stream of the thread that calls this."""
        if self._bounce is not None:
            self._bounce.follow_engine()

    def load(self, payload: memoryview, start: int, first: int, last: int, tables: Tables) -> None:
        """Copy tokens [first, last) of the chunk that begins at `start` into their blocks. Blocks for that time.

        Raises LookupError if the engine has no block for one of them; some may have been copied then.
        """
        granules = self._granules(payload)
        if self._bounce is None:
            self._move(granules, start, first, last, tables, into_cache=True, cut=False)
            return
        with self._bounce.loading(granules) as staged:
            self._move(staged, start, first, last, tables, into_cache=True, cut=False)

    def store(self, room: memoryview | None, start: int, end: int, tables: Tables) -> Finish | None:
        """Copy the chunk [start, end) out, into `room` if that can be done at once, else aside. `tables` are cut to it.
        Raises as `load`.

        The engine may overwrite the cache afterwards. What is returned brings what is aside into a room, on whatever
        thread; None: the room is full. Of a room only this rank's heads are touched: other ranks write theirs at any
        time.
        """
        bounce = self._bounce
        if bounce is None and room is not None:
            self._move(self._granules(room), start, start, end, tables, into_cache=False, cut=True)
            return None
        layers = len(self.geometry.layers)
        values = self.geometry.granule_bytes // self._dtype.itemsize // layers * self.heads.count
        shape = ((end - start) // MATCH_UNIT, layers, values // self.geometry.kv_heads)
        if bounce is None:
            aside = torch.empty(shape, dtype=self._dtype)
            self._move(aside, start, start, end, tables, into_cache=False, cut=True, own=True)
            return lambda: partial(self._put, aside)
        with bounce.storing(shape, self._dtype) as staged:
            self._move(staged, start, start, end, tables, into_cache=False, cut=True, own=True)
        return lambda: partial(self._put, bounce.fetch(staged))

    def _put(self, aside: Tensor, room: memoryview) -> None:
        """Bring this rank's heads, which are all that `aside` has, to their places."""
        granules = self._granules(room)
        if self.heads.count == self.geometry.kv_heads:
            granules.copy_(aside)
            return
        for stack in self.stacks:
            for rows in stack.rows:
                own = self._shaped(aside[:, rows.layers], rows, own=True)
                self._shaped(granules[:, rows.layers], rows).copy_(own)

    def _granules(self, payload: memoryview) -> Tensor:
        size = self.geometry.granule_bytes
        flat = torch.frombuffer(payload, dtype=self._dtype)
        return flat.view(len(payload) // size, len(self.geometry.layers), -1)

    def _move(
        self, granules: Tensor, start: int, first: int, last: int, tables: Tables, *, into_cache: bool, cut: bool,
        own: bool = False,
    ) -> None:  # fmt: skip
        for stack in self.stacks:
            table = split(tables[stack.part.engine_group], stack.ratio)
            base = start // stack.part.block_tokens * stack.ratio if cut else 0
            places = pieces(start, first, last, stack.block_tokens, table, base)
            for rows in stack.rows:
                shaped = self._shaped(granules[:, rows.layers], rows, own=own)
                for piece in places:
                    for payload, cache in _sides(shaped, rows, piece, stack.unit):
                        if into_cache:
                            cache.copy_(payload)
                        else:
                            payload.copy_(cache)

    def _shaped(self, granules: Tensor, rows: Rows, *, own: bool = False) -> Tensor:
        """[granules, layers, rows, heads, 16, channels] of a payload, this rank's heads alone; of one that has no
        others, if it is its `own`."""
        heads, first = (self.heads.count, 0) if own else (self.geometry.kv_heads, self.heads.first)
        at, length = rows.at * heads * MATCH_UNIT, rows.count * heads * MATCH_UNIT * rows.dim
        shaped = granules[:, :, at : at + length].unflatten(2, (rows.count, heads, MATCH_UNIT, rows.dim))
        return shaped[:, :, :, first : first + self.heads.count]


def _sides(shaped: Tensor, rows: Rows, piece: Piece, unit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Both sides of the copies of one piece, in one shape: [blocks, units, layers, rows, heads, tokens, channels]."""
    if piece.token % unit or piece.count % unit or piece.slot % unit:
        raise LookupError(f"tokens {piece.token} and {piece.count} on aren't whole stretches of {unit}")
    first, last = piece.slot // unit, (piece.slot + piece.count) // unit
    order = [1, 3, 0, 4, 2, *range(5, 5 + len(rows.tokens) + len(rows.channels))]
    for start, view in rows.views:
        begin, end = max(first, start), min(last, start + view.shape[3])
        if begin < end:
            cache = view[:, piece.block : piece.block + piece.blocks, :, begin - start : end - start].permute(order)
            payload = _stretches(shaped, piece.token + (begin - first) * unit, piece, end - begin, unit)
            yield payload.unflatten(-1, rows.channels).unflatten(5, rows.tokens), cache


def _stretches(shaped: Tensor, token: int, piece: Piece, units: int, unit: int) -> Tensor:
    """`units` stretches of the payload from `token` on, in each of the piece's blocks."""
    granule, inside = divmod(token, MATCH_UNIT)
    if unit < MATCH_UNIT:
        # Pieces of such blocks lie inside of one granule each, and have stretches side by side.
        some = shaped[granule, :, :, :, inside : inside + units * unit].unflatten(3, (units, unit))
        return some.permute(3, 0, 1, 2, 4, 5)[None]
    step = piece.count // MATCH_UNIT
    some = torch.as_strided(
        shaped,
        (piece.blocks, units, *shaped.shape[1:]),
        (step * shaped.stride(0), *shaped.stride()),
        shaped.storage_offset() + granule * shaped.stride(0),
    )
    return some


def checksums(payload: memoryview, granule_bytes: int) -> bytes:
    """One xxh3_64 (u64 LE) a granule."""
    digest = xxhash.xxh3_64_intdigest
    return b"".join(
        digest(payload[at : at + granule_bytes]).to_bytes(8, "little") for at in range(0, len(payload), granule_bytes)
    )


class Bounce:
    """An accelerator's way: a buffer on the device, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._engine = torch.cuda.current_stream(device)

    def follow_engine(self) -> None:
        """The engine computes on the present stream of the thread that calls this. Each thread has one of its own."""
        self._engine = torch.cuda.current_stream(self._device)

    @contextmanager
    def loading(self, granules: Tensor) -> Iterator[Tensor]:
        """Gives a device copy of `granules`; ends when what was read from it is done."""
        with torch.cuda.stream(self._stream):
            yield granules.to(self._device)
        self._stream.synchronize()

    @contextmanager
    def storing(self, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """Gives a device buffer. What is read to fill it was written by the engine's stream, which goes on when it is
        full."""
        engine = self._engine
        self._stream.wait_stream(engine)
        with torch.cuda.stream(self._stream):
            yield torch.empty(shape, dtype=dtype, device=self._device)
        engine.wait_stream(self._stream)

    def fetch(self, staged: Tensor) -> Tensor:
        """Bring a filled buffer over. Blocks until it is there."""
        with torch.cuda.stream(self._stream):
            host = staged.cpu()
        self._stream.synchronize()
        return host
