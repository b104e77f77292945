"""The order of a group's axes, in a payload or in a shard's own buffers, and the strides that follow from it.

A group's bytes are a few *planes*, each an array of its own shape: K and V, their scales; or a state and the parts
of its conv window. A plane is told by two of the axes, `tensor` (K, V; state, conv) and `field` (the values, what
lies beside them; the parts of the conv). All others count within a plane:

    rows     block  layer  tensor  head  token  field  channel        field: values, then scales ...
    states   block  layer  tensor  field  head  tap  channel          field: q, k, v

are the canonical orders, where a block is a granule. Any other order is somebody's buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from forebay.kvstore.geometry import DTYPE_BYTES, MATCH_UNIT, GroupGeometry

AxisName = Literal["block", "layer", "tensor", "field", "head", "token", "tap", "channel"]
Order = tuple[AxisName, ...]

TOKEN_ORDER: Order = ("block", "layer", "tensor", "head", "token", "field")
"""Rows in a payload: heads before tokens, so that a rank's heads are one run a layer and K or V."""

STATE_ORDER: Order = ("block", "layer", "tensor", "field", "head", "tap", "channel")
"""States in a payload."""


@dataclass(frozen=True, slots=True)
class Plane:
    """An array [blocks, layers, heads, tokens, taps, channels] of elements of `width` bytes."""

    tensor: int
    field: int
    heads: int
    taps: int
    channels: int
    width: int

    def at(self, axis: AxisName) -> int:
        """Index of this plane on one of the two axes that tell planes apart."""
        return self.tensor if axis == "tensor" else self.field


def planes_of(group: GroupGeometry) -> tuple[Plane, ...]:
    """What a group's bytes consist of."""
    size, heads = DTYPE_BYTES[group.dtype], group.kv_heads
    if group.recurrent:
        state = Plane(0, 0, heads, 1, group.head_dim * group.second_dim, size)
        conv = (
            Plane(1, field, part.heads, part.taps, part.channels, DTYPE_BYTES[part.dtype])
            for field, part in enumerate(group.conv)
        )
        return (state, *conv)
    planes = []
    for tensor, dim in enumerate(group.row_dims):
        planes.append(Plane(tensor, 0, heads, 1, dim, size))
        for field, part in enumerate(group.beside, 1):
            planes.append(Plane(tensor, field, heads, 1, part.count, DTYPE_BYTES[part.dtype]))
    return tuple(planes)


class Placed:
    """Offsets and strides in bytes of planes that lie in one order.

    `heads` gives how many heads of each plane lie here; `counts` the sizes of the axes that all planes share
    (`block`, `layer`, `token`).
    """

    def __init__(self, heads: Mapping[Plane, int], order: Order, counts: Mapping[AxisName, int]) -> None:
        self._heads, self._counts = heads, counts
        missing: Order = tuple(axis for axis in ("tap", "channel") if axis not in order)
        self.order: Order = (*order, *missing)

    def _count(self, axis: AxisName, plane: Plane) -> int:
        match axis:
            case "head":
                return self._heads[plane]
            case "tap":
                return plane.taps
            case "channel":
                return plane.channels
            case "tensor" | "field":
                return 1
            case _:
                return self._counts[axis]

    def _inside(self, axis: AxisName) -> Order:
        return self.order[self.order.index(axis) + 1 :]

    def _size(self, plane: Plane, axes: Order) -> int:
        size = plane.width
        for axis in axes:
            size *= self._count(axis, plane)
        return size

    def _together(self, plane: Plane, axis: AxisName) -> list[Plane]:
        """The planes that lie inside of one step of `axis` with this one."""
        inside = self._inside(axis)
        apart: list[AxisName] = [told for told in ("tensor", "field") if told not in inside and told != axis]
        return [other for other in self._heads if all(other.at(told) == plane.at(told) for told in apart)]

    def stride(self, plane: Plane, axis: AxisName) -> int:
        """How far one step of `axis` goes in this plane."""
        inside = self._inside(axis)
        return sum(self._size(other, inside) for other in self._together(plane, axis))

    def base(self, plane: Plane) -> int:
        """Where a plane's first element is."""
        base = 0
        for told in ("tensor", "field"):
            axis: AxisName = "tensor" if told == "tensor" else "field"
            inside = self._inside(axis)
            before = (other for other in self._together(plane, axis) if other.at(axis) < plane.at(axis))
            base += sum(self._size(other, inside) for other in before)
        return base

    @property
    def total(self) -> int:
        """Bytes of it all."""
        return sum(self._size(plane, self.order) for plane in self._heads)


def in_payload(group: GroupGeometry) -> Placed:
    """The canonical order. Blocks are granules; how many there are makes no difference to where they begin."""
    heads = {plane: plane.heads for plane in planes_of(group)}
    counts: dict[AxisName, int] = {"block": 1, "layer": len(group.layers), "token": MATCH_UNIT}
    return Placed(heads, STATE_ORDER if group.recurrent else TOKEN_ORDER, counts)
