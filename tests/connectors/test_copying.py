"""Payloads are the same bytes whatever strides, block sizes, groups and ranks an engine has."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.connectors.cells import CellRow, cut_units, learned_row
from forebay.connectors.copying import GroupCopier, LayerStack, Packing, checksums
from forebay.connectors.grouping import Part
from forebay.connectors.orders import Tables
from forebay.errors import ConfigError
from forebay.kvstore.geometry import MATCH_UNIT, GroupGeometry
from forebay.kvstore.layout import payload_bytes
from forebay.kvstore.layout.ownership import HeadPart, split_heads

BLOCKS, CHUNK = 40, 64
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")
"""How an engine may nest layers, blocks, heads, tokens and values."""

FULL = GroupGeometry("full", "full", (0, 1, 2), 4, 6, "float32")
GEOMETRIES = {
    "full": FULL,
    "two widths": GroupGeometry("full", "full", (0, 1, 2), 4, 6, "float32", value_dim=4),
    "latent": GroupGeometry("latent", "latent", (0, 1, 2), 1, 10, "bfloat16"),
}


@dataclass
class Engine:
    """Caches of one group, over several of the engine's groups, and which block holds which token of a request."""

    geometry: GroupGeometry
    heads: HeadPart
    copier: GroupCopier
    caches: dict[str, torch.Tensor]
    tables: Tables
    cells: tuple[CellRow, ...] | None = None


def caches_of(geometry: GroupGeometry, heads: int, block_tokens: int, ratio: int, order: str) -> list[torch.Tensor]:
    """One view [blocks, heads, tokens, values] a layer, in one storage nested as `order` says; all zeros."""
    sizes = dict(L=len(geometry.layers), B=BLOCKS * ratio, H=heads, N=block_tokens // ratio, C=sum(geometry.row_dims))
    dtype = getattr(torch, geometry.dtype)
    storage = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
    logical = storage.permute([order.index(axis) for axis in "LBHNC"])
    return [logical[layer] for layer in range(sizes["L"])]


def engine(
    geometry: GroupGeometry, *, block_tokens: int, order: str = "LBHNC", ratio: int = 1, groups: int = 1,
    rank: int = 0, ranks: int = 1, seed: int = 0, tokens: int = 2 * CHUNK, packed: str = "",
) -> Engine:  # fmt: skip
    heads = HeadPart(0, 1, rank) if geometry.kind == "latent" else split_heads(geometry.kv_heads, rank, ranks)
    views = caches_of(geometry, heads.count, block_tokens, ratio, order)
    caches = {f"l{layer}": view for layer, view in enumerate(views)}
    parts = [
        Part(0, group, block_tokens, tuple(f"l{p}" for p in places), tuple(places))
        for group in range(groups)
        if (places := range(len(views))[group::groups])
    ]
    packing = PACKINGS[packed](sum(geometry.row_dims) // 2) if packed else None
    stacks = [LayerStack(part, caches, BLOCKS, geometry, packing) for part in parts]
    rng = random.Random(seed)
    count = -(-tokens // block_tokens)
    tables = tuple(tuple(rng.sample(range(1, BLOCKS), count)) for _ in range(groups))
    cells = packing(block_tokens // ratio) if packing else None
    return Engine(geometry, heads, GroupCopier(geometry, heads, stacks), caches, tables, cells)


def value(geometry: GroupGeometry, layer: int, row: int, head: int, token: int, channel: int) -> float:
    """Every place has a value of its own, that its dtype can hold."""
    place = (((layer * 2 + row) * geometry.kv_heads + head) * 2 * CHUNK + token) * 8 + channel
    return float(place % 251) if geometry.dtype == "bfloat16" else float(place)


def fill(one: Engine, tokens: Sequence[int]) -> None:
    """As the engine's forward would: token by token, into the block of its table."""
    for layer, cache in enumerate(one.caches.values()):
        group = layer % len(one.tables)
        per_block = cache.shape[2]
        ratio = cache.shape[0] // BLOCKS
        for token in tokens:
            block, slot = divmod(token, per_block * ratio)
            at = one.tables[group][block] * ratio + slot // per_block
            for head in range(one.heads.count):
                values = [
                    [value(one.geometry, layer, row, one.heads.first + head, token, channel) for channel in range(dim)]
                    for row, dim in enumerate(one.geometry.row_dims)
                ]
                if one.cells is None:
                    cache[at, head, slot % per_block] = torch.tensor([*chain(*values)], dtype=cache.dtype)
                else:
                    put(cache[at, head].view(-1), one.cells, slot % per_block, values)


def put(cell: torch.Tensor, rows: Sequence[CellRow], token: int, values: list[list[float]]) -> None:
    """One token's rows into a packed cell, by the definition of its factors."""
    for row, channels in zip(rows, values, strict=True):
        for channel, number in enumerate(channels):
            cell[row.offset + place(row.tokens, token) + place(row.channels, channel)] = number


def place(factors: Sequence[tuple[int, int]], index: int) -> int:
    """The offset of the index-th of nested loops."""
    offset = 0
    for count, stride in reversed(factors):
        offset += index % count * stride
        index //= count
    return offset


def turned(dim: int) -> Packing:
    """K as [channels, tokens], V as [tokens, channels], as vLLM's CPU kernels like it."""
    return lambda n: (CellRow(0, ((n, 1),), ((dim, n),)), CellRow(n * dim, ((n, dim),), ((dim, 1),)))


def pairs(dim: int) -> Packing:
    """K as [channels / 2, tokens, 2 channels], V as [tokens / 2, channels, 2 tokens]."""
    return lambda n: (
        CellRow(0, ((n, 2),), ((dim // 2, 2 * n), (2, 1))),
        CellRow(n * dim, ((n // 2, 2 * dim), (2, 1)), ((dim, 2),)),
    )


def tiles(dim: int) -> Packing:
    """Both in tiles of 8 tokens, whose order is turned round in K."""
    return lambda n: (
        CellRow(0, ((2, 8 * dim), (n // 16, 16 * dim), (8, 1)), ((dim, 8),)),
        CellRow(n * dim, ((n // 8, 8 * dim), (8, 1)), ((dim, 8),)),
    )


PACKINGS = {"turned": turned, "pairs": pairs, "tiles": tiles}


def canonical(geometry: GroupGeometry, start: int, end: int) -> bytes:
    """The payload by its definition: granule, layer, K/V, head, token, channel."""
    values = [
        value(geometry, layer, row, head, token, channel)
        for granule in range(start, end, MATCH_UNIT)
        for layer in range(len(geometry.layers))
        for row, dim in enumerate(geometry.row_dims)
        for head in range(geometry.kv_heads)
        for token in range(granule, granule + MATCH_UNIT)
        for channel in range(dim)
    ]
    return torch.tensor(values, dtype=getattr(torch, geometry.dtype)).view(torch.uint8).numpy().tobytes()


def stored(
    one: Engine, start: int, end: int, into: bytearray | None = None, *, aside: bool = False
) -> bytearray:
    """A room that is filled at once, or, as on an accelerator, from `aside` when the cache has been overwritten."""
    room = bytearray(payload_bytes(one.geometry, end - start)) if into is None else into
    size = next(iter(one.caches.values())).shape[2] * (next(iter(one.caches.values())).shape[0] // BLOCKS)
    cuts = tuple(table[start // size : -(-end // size)] for table in one.tables)
    finish = one.copier.store(None if aside else memoryview(room), start, end, cuts)
    assert (finish is not None) == aside
    if finish is not None:
        kept = {name: cache.clone() for name, cache in one.caches.items()}
        for cache in one.caches.values():
            cache.zero_()
        finish()(memoryview(room))
        for name, cache in kept.items():
            one.caches[name].copy_(cache)
    return room


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", sorted(GEOMETRIES))
@pytest.mark.parametrize("aside", [False, True])
def test_a_payload_is_canonical_whatever_the_strides(name: str, order: str, aside: bool) -> None:
    one = engine(GEOMETRIES[name], block_tokens=32, order=order)
    fill(one, range(2 * CHUNK))
    assert stored(one, CHUNK, 2 * CHUNK, aside=aside) == canonical(one.geometry, CHUNK, 2 * CHUNK)


@settings(max_examples=40)
@given(
    block_tokens=st.sampled_from([1, 8, 16, 24, 32, 48, 64, 128]),
    ratio=st.sampled_from([1, 2]),
    groups=st.integers(1, 3),
    order=st.sampled_from(ORDERS),
    first=st.integers(0, 2 * CHUNK - 1),
    seed=st.integers(0, 9),
)
def test_what_one_engine_stores_another_one_has_after_a_load_and_no_other_byte_changes(
    block_tokens: int, ratio: int, groups: int, order: str, first: int, seed: int
) -> None:
    if block_tokens % ratio:
        ratio = 1
    first -= first % math.gcd(block_tokens // ratio, MATCH_UNIT)  # where an engine's own hit may end
    writer = engine(FULL, block_tokens=32, seed=seed)
    # Few enough blocks for a request of single tokens.
    tokens = min(2 * CHUNK, (BLOCKS - 1) * block_tokens) // MATCH_UNIT * MATCH_UNIT
    first = min(first, tokens - 1)
    reader = engine(
        FULL, block_tokens=block_tokens, ratio=ratio, groups=groups, order=order, seed=seed + 1, tokens=tokens
    )
    wanted = engine(
        FULL, block_tokens=block_tokens, ratio=ratio, groups=groups, order=order, seed=seed + 1, tokens=tokens
    )
    fill(writer, range(2 * CHUNK))
    fill(wanted, range(first, tokens))
    for start in range(0, tokens, CHUNK):
        last = min(start + CHUNK, tokens)
        if first < last:
            payload = stored(writer, start, start + CHUNK)
            reader.copier.load(memoryview(payload), start, max(first, start), last, reader.tables)
    for name, cache in wanted.caches.items():
        assert torch.equal(reader.caches[name], cache)


@pytest.mark.parametrize("packed", sorted(PACKINGS))
@pytest.mark.parametrize("block_tokens", [32, 64])
def test_cells_may_be_packed(packed: str, block_tokens: int) -> None:
    one = engine(FULL, block_tokens=block_tokens, packed=packed)
    fill(one, range(2 * CHUNK))
    payload = stored(one, CHUNK, 2 * CHUNK)
    assert payload == canonical(FULL, CHUNK, 2 * CHUNK)
    reader, wanted = (engine(FULL, block_tokens=block_tokens, packed=packed, seed=2) for _ in range(2))
    fill(wanted, range(CHUNK, CHUNK + 48))
    reader.copier.load(memoryview(payload), CHUNK, CHUNK, CHUNK + 48, reader.tables)
    assert all(torch.equal(reader.caches[name], cache) for name, cache in wanted.caches.items())


@pytest.mark.parametrize("packed", sorted(PACKINGS))
def test_a_packing_is_learned_from_where_things_are(packed: str) -> None:
    for row in PACKINGS[packed](6)(32):
        places = [
            [row.offset + place(row.tokens, token) + place(row.channels, channel) for channel in range(6)]
            for token in range(32)
        ]
        learned = learned_row(places)
        for token, line in enumerate(places):
            for channel, at in enumerate(line):
                assert learned.offset + place(learned.tokens, token) + place(learned.channels, channel) == at


def test_a_packing_that_can_not_be_followed_is_refused() -> None:
    shuffled = [[token * 4 + (channel + token) % 4 for channel in range(4)] for token in range(32)]
    with pytest.raises(ConfigError, match="can't follow"):
        learned_row(shuffled)
    with pytest.raises(ConfigError, match="can't follow"):
        learned_row([[0], [1], [5], [2]])
    with pytest.raises(ConfigError, match="can't follow"):
        cut_units(CellRow(0, ((2, 24), (24, 1)), ((1, 1),)), 16)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("aside", [(), (0,), (1,), range(8)])
@pytest.mark.parametrize(("name", "block_tokens"), [("full", 16), ("two widths", 8)])
def test_ranks_write_their_parts_of_one_payload_and_read_them_back(
    ranks: int, aside: Sequence[int], name: str, block_tokens: int
) -> None:
    """Some of them from aside: whoever comes last must not touch what others have written."""
    geometry = GEOMETRIES[name]
    room = bytearray(payload_bytes(geometry, CHUNK))
    for rank in range(ranks):
        one = engine(geometry, block_tokens=block_tokens, rank=rank, ranks=ranks, seed=rank)
        fill(one, range(CHUNK))
        stored(one, 0, CHUNK, room, aside=rank in aside)
    assert room == canonical(geometry, 0, CHUNK)
    reader = engine(geometry, block_tokens=32, rank=ranks - 1, ranks=ranks)
    wanted = engine(geometry, block_tokens=32, rank=ranks - 1, ranks=ranks)
    fill(wanted, range(CHUNK))
    reader.copier.load(memoryview(room), 0, 0, CHUNK, reader.tables)
    assert all(torch.equal(reader.caches[name], cache) for name, cache in wanted.caches.items())


def test_a_hole_in_the_table_is_refused_and_not_touched() -> None:
    one = engine(FULL, block_tokens=16)
    holed = ((0, *one.tables[0][1:]),)
    payload = bytearray(canonical(FULL, 0, CHUNK))
    with pytest.raises(LookupError):
        one.copier.load(memoryview(payload), 0, 0, CHUNK, holed)
    one.copier.load(memoryview(payload), 0, 16, CHUNK, holed)
    assert all(not cache[0].any() for cache in one.caches.values())


def test_layers_at_equal_distances_are_copied_together() -> None:
    one = engine(FULL, block_tokens=16)
    two = engine(FULL, block_tokens=16, groups=2)
    stacks = [stack for copier in (one.copier, two.copier) for stack in copier.stacks]
    assert [len(stack.rows) for stack in stacks] == [1, 1, 1]
    caches = {f"l{layer}": torch.zeros(BLOCKS, 4, 16, 12) for layer in range(3)}
    apart = LayerStack(Part(0, 0, 16, ("l0", "l1", "l2"), (0, 1, 2)), caches, BLOCKS, FULL)
    assert len(apart.rows) == 3


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((BLOCKS, 4, 16, 13), torch.float32), ((BLOCKS, 4, 8, 12), torch.float32), ((BLOCKS, 4, 16, 12), torch.bfloat16),
     ((BLOCKS, 2, 16, 12), torch.float32), ((2, BLOCKS, 4, 16, 12), torch.float32)],
)  # fmt: skip
def test_caches_that_are_not_what_was_said_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    caches = {f"l{layer}": torch.zeros(shape, dtype=dtype) for layer in range(3)}
    part = Part(0, 0, 16, ("l0", "l1", "l2"), (0, 1, 2))
    with pytest.raises(ConfigError):
        GroupCopier(FULL, HeadPart(0, 4, 0), [LayerStack(part, caches, BLOCKS, FULL)])


def test_checksums_are_one_a_granule() -> None:
    data = bytes(range(256)) * 4
    assert len(checksums(memoryview(data), 256)) == 8 * 4
    assert len({checksums(memoryview(data), 128)[at : at + 8] for at in range(0, 64, 8)}) == 2
