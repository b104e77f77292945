"""The canonical geometry of a cache group: what one token, or one state, of it consists of.

    kind        bytes                                                                        grows with tokens
    full        a K row and a V row for every KV head                                        yes
    window      the same; a query sees the last `window` positions only                      yes
    latent      one row (MLA: the latent and its rope part), whatever the number of heads    yes
    indexer     one row (an index key of sparse attention, with its scale)                   yes
    recurrent   one state [heads, head_dim, value_dim] with its conv window, at a position   no

All of it is part of the namespace's encoding, so two geometries that differ in any number are two namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

import msgspec

MATCH_UNIT = 16

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
}

GRANULE_BYTES_MAX = 2**30
PARTS_MAX = 8
LAYER_MAX = 65535
NAME_BYTES_MAX = 64

GroupKind = Literal["full", "window", "latent", "indexer", "recurrent"]


class RowField(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` more values at the end of each row: scales of quantised ones, a rope part in another dtype."""

    name: str
    count: int
    dtype: str

    @property
    def length(self) -> int:
        """Bytes in one row."""
        return self.count * DTYPE_BYTES[self.dtype]


class ConvPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input of a recurrent layer's causal convolution (q, k and v; or x, B and C), its last `taps` positions.

    A head (or group) has `channels` channels. `taps` is the kernel's width less one, the oldest position first.
    """

    name: str
    heads: int
    channels: int
    taps: int
    dtype: str

    @property
    def length(self) -> int:
        """Bytes in one layer."""
        return self.heads * self.channels * self.taps * DTYPE_BYTES[self.dtype]


class GroupGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The canonical geometry of one cache group.

    `layers` are the model's layer numbers that share it, ascending. `window` is the number of positions that
    a query sees, itself included (None: all). A row has `head_dim` values of `dtype`, V's `value_dim` (None: as
    many), and then the fields of `beside`. A recurrent state has [head_dim, value_dim] values a head, beside it
    the parts of `conv`.
    """

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    value_dim: int | None = None
    beside: tuple[RowField, ...] = ()
    conv: tuple[ConvPart, ...] = ()

    @property
    def recurrent(self) -> bool:
        """Is a chunk of it one state at the chunk's end, rather than rows of its tokens?"""
        return self.kind == "recurrent"

    @property
    def second_dim(self) -> int:
        """`value_dim`, or what stands for it."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def row_dims(self) -> tuple[int, ...]:
        """Values in the rows of one token and head: K and V, or the one row of a latent or index key."""
        return (self.head_dim,) if self.kind in ("latent", "indexer") else (self.head_dim, self.second_dim)

    @property
    def granule_bytes(self) -> int:
        """Bytes of `MATCH_UNIT` tokens (layers x rows x heads x tokens), or of one recurrent state."""
        size = DTYPE_BYTES[self.dtype]
        if self.recurrent:
            state = self.kv_heads * self.head_dim * self.second_dim * size
            return len(self.layers) * (state + sum(part.length for part in self.conv))
        beside = sum(part.length for part in self.beside)
        per_token = sum(dim * size + beside for dim in self.row_dims)
        return len(self.layers) * self.kv_heads * MATCH_UNIT * per_token


def check_group(group: GroupGeometry) -> str | None:
    """Why a group of this geometry can't be served, naming what to change, or None."""
    if not 0 < len(group.name.encode()) <= NAME_BYTES_MAX:
        return f"group {group.name!r}: its name must have 1 to {NAME_BYTES_MAX} bytes"
    why = _check_dtypes(group) or _check_sizes(group) or _check_kind(group) or _check_conv(group)
    if why is None and group.granule_bytes > GRANULE_BYTES_MAX:
        what = "a state" if group.recurrent else "a granule"
        why = f"{what} of {group.granule_bytes} bytes is over 1 GiB: split its layers over several groups"
    return f"group {group.name!r}: {why}" if why else None


def _check_dtypes(group: GroupGeometry) -> str | None:
    dtypes = (group.dtype, *(part.dtype for part in group.beside), *(part.dtype for part in group.conv))
    unknown = next((dtype for dtype in dtypes if dtype not in DTYPE_BYTES), None)
    return f"dtype {unknown!r} is none of {', '.join(DTYPE_BYTES)}" if unknown is not None else None


def _check_sizes(group: GroupGeometry) -> str | None:
    layers = group.layers
    if not layers or min(group.kv_heads, group.head_dim) < 1:
        return "layers, kv_heads and head_dim must all be positive"
    if layers[0] < 0 or layers[-1] > LAYER_MAX or any(a >= b for a, b in pairwise(layers)):
        return f"layers {layers} must ascend, from 0 on and up to {LAYER_MAX}"
    if group.value_dim is not None and group.value_dim < 1:
        return f"value_dim {group.value_dim} must be positive"
    if group.value_dim == group.head_dim:
        return f"value_dim {group.value_dim} equals head_dim: leave it away, one geometry has one description"
    return _check_parts("beside", group.beside, (part.count for part in group.beside))


def _check_parts(name: str, parts: tuple[RowField, ...] | tuple[ConvPart, ...], counts: Iterable[int]) -> str | None:
    if len(parts) > PARTS_MAX or len({part.name for part in parts}) != len(parts):
        return f"{name} has at most {PARTS_MAX} parts, each with a name of its own"
    if any(not 0 < len(part.name.encode()) <= NAME_BYTES_MAX for part in parts):
        return f"a part of {name} must have a name of 1 to {NAME_BYTES_MAX} bytes"
    return f"the sizes of the parts of {name} must all be positive" if min(counts, default=1) < 1 else None


def _check_kind(group: GroupGeometry) -> str | None:
    if group.kind == "window" and group.window is None:
        return "kind 'window' needs its window"
    if group.window is not None and group.kind not in ("window", "latent"):
        return f"kind {group.kind!r} has no window: remove it, or say 'window'"
    if group.window is not None and group.window < 1:
        return f"window {group.window} must be positive"
    if group.kind in ("latent", "indexer") and group.kv_heads != 1:
        return f"kv_heads {group.kv_heads} must be 1: {group.kind} rows are shared by all heads"
    if group.kind in ("latent", "indexer") and group.value_dim is not None:
        return f"kind {group.kind!r} has one row a token: leave value_dim away"
    if group.recurrent and group.beside:
        return "kind 'recurrent' has no rows, so nothing beside them: its conv window goes into conv"
    return None


def _check_conv(group: GroupGeometry) -> str | None:
    if group.conv and not group.recurrent:
        return f"kind {group.kind!r} has no conv window: only 'recurrent' does"
    if len({part.taps for part in group.conv}) > 1:
        return "all parts of one conv window have the same taps"
    counts = (n for part in group.conv for n in (part.heads, part.channels, part.taps))
    return _check_parts("conv", group.conv, counts)
