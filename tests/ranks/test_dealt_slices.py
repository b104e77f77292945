"""Slices of ranks that share out positions: together they write what one would, and each gets its own back."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from forebay.kernels.dealing import Dealing
from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.layout import View, check_shard
from forebay.models.parallel import Parallel
from forebay.workers.ranks.moving import group_shard, rank_shard, slices_of, writers_of
from tests.ranks.test_slices import BLOCKS, DIM, LAYERS, namespace, whole_pool

SHAPES = [
    (heads, Parallel(tp, dcp, pcp, step))
    for heads, tp, dcp, pcp, step in product((0, 1, 2), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2, 4, 8))
    if max(tp // max(heads, 1), 1) % dcp == 0 and dcp * step <= 16 and (step == 1 or dcp > 1) and tp * pcp <= 8
]
"""KV heads (0: latents), and what ranks there are."""


def spec_of(heads: int) -> Namespace:
    return namespace(max(heads, 1), latent=not heads)


def own_pool(spec: Namespace, whole: Tensor, rank: int, parallel: Parallel) -> Tensor:
    """What a rank has of all heads and positions."""
    heads, place = spec.groups[0].kv_heads, parallel.tensor_rank(rank)
    each = max(heads // parallel.tp, 1)
    first = place * heads // parallel.tp
    dealing = parallel.dealing(rank)
    own = [p for p in range(16) if dealing.owner(p) == dealing.rank]
    return whole[:, :, :, first : first + each][:, :, :, :, own].contiguous()


@pytest.mark.parametrize(("heads", "parallel"), SHAPES)
def test_any_ranks_write_what_one_would_and_read_what_is_theirs(heads: int, parallel: Parallel) -> None:
    spec, blocks, others = spec_of(heads), [5, 0, 7], [1, 8, 2]
    whole = whole_pool(spec)
    expected = b"".join(whole[block].numpy().tobytes() for block in blocks)
    payload = bytearray(len(expected))
    pools = [own_pool(spec, whole, rank, parallel) for rank in range(parallel.size)]
    slices = [
        slices_of(spec, {spec.groups[0].name: pool}, rank_shard(spec, rank, parallel))[0]
        for rank, pool in enumerate(pools)
    ]
    (writers,) = writers_of(spec, parallel)
    assert writers[0] == 0 and writers == [rank for rank, mine in enumerate(slices) if mine.writes]
    for rank in writers:
        slices[rank].store(blocks, memoryview(payload))
    assert bytes(payload) == expected
    for pool, mine in zip(pools, slices, strict=True):
        before = pool.clone()
        mine.load(memoryview(payload), others)
        assert torch.equal(pool[others], before[blocks]), "each has its own positions back"
        untouched = [block for block in range(BLOCKS) if block not in others]
        assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("parallel", [Parallel(4, 4), Parallel(4, 2, 1, 4), Parallel(2, 2)])
def test_each_byte_is_written_by_one_rank(parallel: Parallel) -> None:
    spec = spec_of(0)
    runs = []
    for rank in writers_of(spec, parallel)[0]:
        view = View(spec, 0, group_shard(spec.groups[0], rank_shard(spec, rank, parallel)))
        runs += [(run.canonical, run.length) for run in view.runs(0, range(16), writing=True)]
    end = 0
    for start, length in sorted(runs):
        assert start == end, "no gap, nothing twice"
        end += length
    assert end == spec.groups[0].granule_bytes


def test_a_window_stays_whole_beside_what_is_dealt_out() -> None:
    groups = (
        GroupGeometry("full", "full", tuple(range(LAYERS)), 1, DIM, "float32", None),
        GroupGeometry("window", "window", (LAYERS,), 1, DIM, "float32", 40),
    )
    spec = Namespace(weights=b"w" * 32, groups=groups, chunk_tokens=64, compute="float32", positions=())
    parallel = Parallel(4, 4)
    assert writers_of(spec, parallel) == [[0, 1, 2, 3], [0]]
    shard = rank_shard(spec, 1, parallel)
    assert shard.undivided == ("window",) and check_shard(spec, shard) is None
    full, window = (View(spec, index, group_shard(group, shard)) for index, group in enumerate(groups))
    assert full.block_bytes * 4 == groups[0].granule_bytes and window.block_bytes == groups[1].granule_bytes


@pytest.mark.parametrize("tokens", [1, 7, 16, 31, 33])
def test_a_table_needs_blocks_for_all_positions_whichever_are_its_ranks(tokens: int) -> None:
    """Slots are fewer than tokens, blocks aren't: whoever saves by slots alone leaves most of a prompt out."""
    spec = spec_of(0)
    for parallel in (Parallel(2, 2), Parallel(4, 4, 1, 2)):
        lengths = []
        for rank in range(parallel.size):
            dealing: Dealing = parallel.dealing(rank)
            view = View(spec, 0, rank_shard(spec, rank, parallel))
            lengths.append(view.length(tokens))
            assert lengths[-1] == dealing.local_length(tokens)
            assert dealing.local_blocks(tokens) <= -(-tokens // 16)
        assert sum(lengths) == tokens
