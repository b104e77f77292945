"""The layout said a second time, by numpy arrays and plain counting: nothing of the library's arithmetic is used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.kvstore.identity import GroupGeometry
from forebay.kvstore.layout import Shard

Bytes = NDArray[np.uint8]
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
AXES = ("block", "layer", "head", "token", "tap", "channel", "byte")
UNTOUCHED = 0xA5

PlaneName = tuple[int, int]
"""(tensor, field): K is (0, 0), V (1, 0), their scales (0, 1) and (1, 1); a state (0, 0), its conv (1, 0), ..."""


@dataclass(frozen=True)
class Sizes:
    heads: int
    taps: int
    channels: int
    width: int


def plane_sizes(group: GroupGeometry) -> dict[PlaneName, Sizes]:
    """Every plane of a group and its sizes, in canonical order."""
    width = WIDTHS[group.dtype]
    second = group.value_dim or group.head_dim
    if group.kind == "recurrent":
        planes = {(0, 0): Sizes(group.kv_heads, 1, group.head_dim * second, width)}
        for place, part in enumerate(group.conv):
            planes[1, place] = Sizes(part.heads, part.taps, part.channels, WIDTHS[part.dtype])
        return planes
    planes = {}
    for tensor, dim in enumerate([group.head_dim] if group.kind in ("latent", "indexer") else [group.head_dim, second]):
        planes[tensor, 0] = Sizes(group.kv_heads, 1, dim, width)
        for place, part in enumerate(group.beside):
            planes[tensor, 1 + place] = Sizes(group.kv_heads, 1, part.count, WIDTHS[part.dtype])
    return planes


@dataclass(frozen=True)
class Truth:
    """The values of a whole request (or of one state): [token, layer, head, tap, channel, byte] for each plane."""

    group: GroupGeometry
    values: dict[PlaneName, Bytes]


def truth_of(group: GroupGeometry, tokens: int, seed: int) -> Truth:
    random = np.random.default_rng(seed)
    rows = 1 if group.kind == "recurrent" else tokens
    return Truth(
        group,
        {
            name: random.integers(
                0, 256, (rows, len(group.layers), s.heads, s.taps, s.channels, s.width), dtype=np.uint8
            )
            for name, s in plane_sizes(group).items()
        },
    )


def payload_of(truth: Truth, start: int, end: int) -> bytes:
    """The canonical bytes of the chunk of tokens [start, end)."""
    out: list[bytes] = []
    layers = range(len(truth.group.layers))
    if truth.group.kind == "recurrent":
        for layer in layers:
            out += [values[0, layer].tobytes() for _, values in sorted(truth.values.items())]
        return b"".join(out)
    for first in range(start, end, 16):
        for layer in layers:
            for tensor in sorted({tensor for tensor, _ in truth.values}):
                fields = [v[first : first + 16, layer] for (t, _), v in sorted(truth.values.items()) if t == tensor]
                rows = [np.ascontiguousarray(field).reshape(16, field.shape[1], -1) for field in fields]
                out.append(np.concatenate(rows, axis=2).transpose(1, 0, 2).tobytes())
    return b"".join(out)


def own_layers(group: GroupGeometry, shard: Shard) -> list[int]:
    """Places of the group's layers in this stage."""
    if shard.pp_size == 1:
        return list(range(len(group.layers)))
    stage_of = [rank for rank, layers in enumerate(shard.stages) for _ in range(layers)]
    return [place for place, layer in enumerate(group.layers) if stage_of[layer] == shard.pp_rank]


def own_heads(heads: int, shard: Shard) -> list[int]:
    if shard.tp_size > heads:
        return [shard.tp_rank // (shard.tp_size // heads)]
    return np.array_split(np.arange(heads), shard.tp_size)[shard.tp_rank].tolist()


def own_tokens(group: GroupGeometry, shard: Shard, tokens: int) -> list[int]:
    """A rank's tokens of a request, in order: dealt out like cards."""
    if shard.dcp_size == 1 or group.name in shard.undivided:
        return list(range(tokens))
    hands: list[list[int]] = [[] for _ in range(shard.dcp_size)]
    for deal, first in enumerate(range(0, tokens, shard.interleave)):
        hands[deal % shard.dcp_size] += range(first, min(first + shard.interleave, tokens))
    return hands[shard.dcp_rank]


def buffers_of(truth: Truth, shard: Shard, tokens: int, held: range, table: list[int], blocks: int) -> bytes:
    """A rank's pool after it has got `held` of a request's tokens: all else is untouched."""
    group = truth.group
    recurrent = group.kind == "recurrent"
    layers = own_layers(group, shard)
    mine = own_tokens(group, shard, tokens)
    arrays: dict[PlaneName, Bytes] = {}
    for name, values in truth.values.items():
        _, _, heads, taps, channels, width = values.shape
        chosen = own_heads(heads, shard)
        slots = 1 if recurrent else shard.block_tokens
        pool = np.full((blocks, len(layers), len(chosen), slots, taps, channels, width), UNTOUCHED, dtype=np.uint8)
        if recurrent:
            pool[table[0], :, :, 0] = values[0][layers][:, chosen]
        else:
            for place, token in enumerate(mine):
                if token in held:
                    block, slot = table[place // slots], place % slots
                    pool[block, :, :, slot] = values[token][layers][:, chosen]
        arrays[name] = pool
    order = shard.state_order if recurrent else shard.order
    rest = [axis for axis in AXES if axis not in order]
    return _lay([*order, *rest], {name: (AXES, pool) for name, pool in arrays.items()})


def _lay(order: list[str], planes: dict[PlaneName, tuple[tuple[str, ...], Bytes]]) -> bytes:
    """Write arrays one after the other in the nesting of `order`."""
    if len(planes) == 1:
        ((axes, array),) = planes.values()
        wanted = [axis for axis in order if axis in axes]
        return np.transpose(array, [axes.index(axis) for axis in wanted]).tobytes()
    axis, *inner = order
    if axis in ("tensor", "field"):
        told = 0 if axis == "tensor" else 1
        indices = sorted({name[told] for name in planes})
        return b"".join(_lay(inner, {n: p for n, p in planes.items() if n[told] == index}) for index in indices)
    sizes = {array.shape[axes.index(axis)] for axes, array in planes.values() if axis in axes}
    if not sizes:
        return _lay(inner, planes)
    (size,) = sizes
    return b"".join(
        _lay(
            inner,
            {
                name: (tuple(a for a in axes if a != axis), array.take(index, axes.index(axis)))
                for name, (axes, array) in planes.items()
            },
        )
        for index in range(size)
    )
