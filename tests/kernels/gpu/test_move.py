"""Granules get to a shard's buffers and back, byte for byte, whatever the shard and the dtype."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from forebay.kernels.gpu import move as gpu
from forebay.kernels.moving import AXES_MAX, Pattern, move, patterns
from forebay.kvstore.geometry import ConvPart, GroupGeometry, RowField
from forebay.kvstore.identity import Namespace
from forebay.kvstore.layout import Axis, Copy, Shard, View, payload_bytes

CHUNK = 64
ENGINE_ORDER = ("block", "layer", "tensor", "token", "head", "field")
LAYERS_OUTSIDE = ("layer", "tensor", "block", "token", "head", "field")
Move = Callable[..., None]
FORMS = [gpu.move, gpu.move_staged, move]



def group(kind: str = "full", *, dtype: str = "bfloat16", layers: int = 3, heads: int = 4, dim: int = 8, **rest):
    return GroupGeometry("g", kind, tuple(range(layers)), heads, dim, dtype=dtype, **rest)


def view_of(geometry: GroupGeometry, shard: Shard) -> View:
    return View(Namespace(weights=b"w" * 32, groups=(geometry,), chunk_tokens=CHUNK), 0, shard)


@dataclass(frozen=True)
class Sides:
    """A payload and a shard's buffers of noise, and what of one belongs where in the other."""

    view: View
    payload: torch.Tensor
    buffers: torch.Tensor
    table: list[int]


def sides_of(geometry: GroupGeometry, shard: Shard, seed: int = 0) -> Sides:
    view = view_of(geometry, shard)
    rng = random.Random(seed)
    needed = 1 if geometry.recurrent else -(-view.length(CHUNK) // shard.block_tokens)
    blocks = shard.blocks or needed + 3
    noise = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, (payload_bytes(geometry, CHUNK),), dtype=torch.uint8, generator=noise)
    buffers = torch.randint(0, 256, (view.block_bytes * blocks,), dtype=torch.uint8, generator=noise)
    return Sides(view, payload, buffers, rng.sample(range(blocks), needed))


def assert_moves(sides: Sides, form: Move) -> None:
    """Against plain copies of runs: what is named arrives, nothing else changes."""
    for store in (True, False):
        tokens = range(0, CHUNK)
        copies = sides.view.copies(0, tokens, writing=store, table=sides.table)
        runs = sides.view.runs(0, tokens, writing=store, table=sides.table)
        payload, buffers = sides.payload.clone(), sides.buffers.clone()
        wanted_payload, wanted_buffers = sides.payload.clone(), sides.buffers.clone()
        for run in runs:
            there = slice(run.canonical, run.canonical + run.length)
            here = slice(run.local, run.local + run.length)
            if store:
                wanted_payload[there] = sides.buffers[here]
            else:
                wanted_buffers[here] = sides.payload[there]
        for pattern in patterns(copies, sides.view.group.granule_bytes):
            form(pattern, payload, buffers, store=store)
        assert torch.equal(payload, wanted_payload) and torch.equal(buffers, wanted_buffers)


SHARDS = {
    "whole": Shard(),
    "tp": Shard(tp_rank=1, tp_size=2),
    "tp more than heads": Shard(tp_rank=5, tp_size=8),
    "pp": Shard(pp_rank=1, pp_size=2, stages=(1, 2)),
    "dcp": Shard(dcp_rank=1, dcp_size=2, interleave=1, block_tokens=8),
    "dcp by granules": Shard(dcp_rank=1, dcp_size=2, interleave=16),
    "tokens outside of heads": Shard(order=ENGINE_ORDER, block_tokens=32, tp_rank=1, tp_size=2),
    "layers outside of blocks": Shard(order=LAYERS_OUTSIDE, block_tokens=8, blocks=11),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shard", SHARDS)
def test_any_shard(shard: str, form: Move) -> None:
    assert_moves(sides_of(group(), SHARDS[shard]), form)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32"])
def test_any_dtype_is_moved_as_bits(dtype: str) -> None:
    """Noise of bytes holds numbers that are none, in every dtype."""
    assert_moves(sides_of(group(dtype=dtype, dim=3), SHARDS["tp"]), gpu.move)


@pytest.mark.parametrize("geometry", [
    group("latent", heads=1, dim=36),
    group("full", dim=24, value_dim=16),
    group("full", dtype="float8_e4m3fn", beside=(RowField("scale", 1, "float32"),)),
    group("recurrent", dtype="float32", heads=2, dim=4, value_dim=6, conv=(ConvPart("x", 2, 3, 5, "bfloat16"),)),
])  # fmt: skip
def test_any_kind_of_group(geometry: GroupGeometry) -> None:
    assert_moves(sides_of(geometry, Shard()), gpu.move)


def test_all_granules_and_layers_are_one_launch() -> None:
    sides = sides_of(group(), SHARDS["tp"])
    found = patterns(sides.view.copies(0, range(CHUNK), table=sides.table), sides.view.group.granule_bytes)
    assert len(found) == 1 and len(found[0].local_at) == CHUNK // 16


def test_what_is_another_ranks_is_not_touched_through_the_staging_buffer() -> None:
    """Both ranks write at once: the second finds what the first has written."""
    geometry = group()
    whole = torch.zeros(payload_bytes(geometry, CHUNK), dtype=torch.uint8)
    for rank in range(2):
        sides = sides_of(geometry, Shard(tp_rank=rank, tp_size=2))
        sides.buffers.fill_(rank + 1)
        copies = sides.view.copies(0, range(CHUNK), writing=True, table=sides.table)
        for pattern in patterns(copies, geometry.granule_bytes):
            gpu.move_staged(pattern, whole, sides.buffers, store=True)
    assert whole.bincount().tolist() == [0, len(whole) // 2, len(whole) // 2]


def test_nothing_to_move_is_nothing_done() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    payload, buffers = torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    gpu.move(Pattern(16, (), (), (), empty, empty), payload, buffers, store=True)
    assert not payload.any()


@pytest.mark.parametrize("form", FORMS)
def test_a_pattern_outside_of_a_side_is_refused(form: Move) -> None:
    beyond = Pattern(16, (2,), (16,), (16,), torch.tensor([0]), torch.tensor([16]))
    with pytest.raises(AssertionError):
        form(beyond, torch.zeros(32, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8), store=True)


@pytest.mark.parametrize("axes", range(AXES_MAX + 1))
def test_nests_of_any_depth_with_the_axes_in_any_order(axes: int) -> None:
    """Each side nests the same loops in its own order, as buffers of another engine may."""
    times, rng = (2, 3, 2, 4, 3)[:axes], random.Random(axes)

    def strides() -> tuple[int, ...]:
        step, found = 8, [0] * axes
        for axis in rng.sample(range(axes), axes):
            found[axis] = step
            step *= times[axis]
        return tuple(found)

    at = torch.tensor([0, 2000, 4000])
    pattern = Pattern(8, times, strides(), strides(), at, at.flip(0))
    sides = [torch.randint(0, 256, (6000,), dtype=torch.uint8) for _ in range(2)]
    for store in (True, False):
        wanted, found = [side.clone() for side in sides], [side.clone() for side in sides]
        move(pattern, *wanted, store=store)
        gpu.move(pattern, *found, store=store)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    packed = [side.clone() for side in sides]
    gpu.move_staged(pattern, *packed, store=False)
    assert torch.equal(packed[1], found[1])


def test_more_loops_than_a_kernel_has_are_refused() -> None:
    deep = Copy(0, 0, 8, tuple(Axis(2, 8 * 2**i, 8 * 2**i) for i in range(AXES_MAX + 1)))
    with pytest.raises(ValueError, match="6 nested loops"):
        patterns([deep], 10**6)
