"""Strategies: namespaces of mixed groups, and engines (all ranks of one shape) that can serve them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd

import msgspec
from hypothesis import strategies as st

from forebay.kvstore.geometry import ConvPart, RowField
from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.layout import STATE_ORDER, TOKEN_ORDER, Shard

DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])
STATE_ORDERS = (
    STATE_ORDER,
    ("layer", "tensor", "block", "field", "head", "tap", "channel"),
    ("tensor", "layer", "block", "tap", "field", "head", "channel"),
    ("tensor", "block", "layer", "field", "head", "channel", "tap"),
    ("block", "tensor", "field", "layer", "channel", "head", "tap"),
)


@dataclass(frozen=True)
class Engine:
    """All ranks of one shape."""

    ranks: tuple[Shard, ...]


def layer_numbers() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(lambda found: tuple(sorted(found)))


@st.composite
def groups(draw: st.DrawFn, name: str, heads: int) -> GroupGeometry:
    kind = draw(st.sampled_from(["full", "window", "latent", "indexer", "recurrent"]))
    dims = st.integers(1, 7)
    layers, dim, dtype = draw(layer_numbers()), draw(dims), draw(DTYPES)
    other = draw(st.sampled_from([None, dim + 1, 2 * dim + 1]))
    if kind == "recurrent":
        conv_heads = st.sampled_from([n for n in range(1, 9) if heads % n == 0 or n % heads == 0])
        taps = draw(st.integers(1, 3))
        conv = tuple(
            ConvPart(part, draw(conv_heads), draw(dims), taps, draw(DTYPES))
            for part in draw(st.sampled_from(["", "x", "qkv"]))
        )
        return GroupGeometry(name, kind, layers, heads, dim, dtype, value_dim=other, conv=conv)
    beside = draw(
        st.sampled_from(
            [(), (RowField("scale", 1, "float32"),), (RowField("s", 3, "uint8"), RowField("r", 2, "bfloat16"))]
        )
    )
    if kind in ("latent", "indexer"):
        return GroupGeometry(name, kind, layers, 1, dim, dtype, beside=beside)
    window = draw(st.integers(1, 100)) if kind == "window" else None
    return GroupGeometry(name, kind, layers, heads, dim, dtype, window, other, beside)


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    heads = draw(st.integers(1, 8))
    found = tuple(draw(groups(f"g{n}", heads)) for n in range(draw(st.integers(1, 2))))
    return Namespace(b"weights", found, chunk_tokens=draw(st.sampled_from([16, 32, 48, 64])))


def all_heads(namespace: Namespace) -> list[int]:
    return [n for group in namespace.groups for n in (group.kv_heads, *(part.heads for part in group.conv))]


@st.composite
def engines(draw: st.DrawFn, namespace: Namespace) -> Engine:
    tp = draw(st.sampled_from([n for n in range(1, 9) if all(h % n == 0 or n % h == 0 for h in all_heads(namespace))]))
    stages = draw(stage_splits(1 + max(group.layers[-1] for group in namespace.groups)))
    dcp_ranks = draw(st.sampled_from(["own", "tp"]))
    undivided = tuple(g.name for g in namespace.groups if g.kind == "recurrent" or draw(st.integers(0, 3)) == 0)
    if dcp_ranks == "own":
        dcp = draw(st.integers(1, 8 if tp <= 4 else 4))
    else:
        shared = gcd(tp, *(max(tp // g.kv_heads, 1) for g in namespace.groups if g.name not in undivided))
        dcp = draw(st.sampled_from([n for n in range(1, 9) if shared % n == 0]))
    interleave = draw(st.sampled_from([1, 2, 4, 8, 16, 32, 48]))
    block_tokens = draw(st.integers(1, 64))
    if dcp > 1:
        block_tokens = max(block_tokens // interleave, 1) * interleave
    base = Shard(
        tp_size=tp, pp_size=len(stages), stages=stages if len(stages) > 1 else (), dcp_size=dcp, dcp_ranks=dcp_ranks,
        undivided=undivided, interleave=interleave, block_tokens=block_tokens, pcp_size=draw(st.integers(1, 2)),
        order=draw(st.one_of(st.just(TOKEN_ORDER), st.permutations(TOKEN_ORDER).map(tuple))),
        state_order=draw(st.sampled_from(STATE_ORDERS)),
    )  # fmt: skip
    own = range(dcp) if dcp_ranks == "own" else range(1)
    ranks = product(range(tp), range(len(stages)), own, range(base.pcp_size))
    return Engine(
        tuple(
            msgspec.structs.replace(
                base, tp_rank=t, pp_rank=p, dcp_rank=d if dcp_ranks == "own" else t % dcp, pcp_rank=c
            )
            for t, p, d, c in ranks
        )
    )


@st.composite
def stage_splits(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """Pipeline stages, even or not, over `layers` model layers."""
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2))) if layers > 1 else []
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
