"""Ranks' slices of one payload: however many ranks there are, the bytes are the same, and each gets its own back."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.layout import View
from forebay.models.parallel import Parallel
from forebay.workers.ranks.moving import shard_of, slices_of, writers_of
from forebay.workers.ranks.slices import Slices, checksums

BLOCKS, LAYERS, DIM = 9, 3, 6


def namespace(kv_heads: int, *, latent: bool = False) -> Namespace:
    kind, dim = ("latent", 5) if latent else ("full", DIM)
    group = GroupGeometry(kind, kind, tuple(range(LAYERS)), kv_heads, dim, "float32", None)  # type: ignore[arg-type]
    return Namespace(weights=b"w" * 32, groups=(group,), chunk_tokens=64, compute="float32", positions=())


def whole_pool(spec: Namespace) -> torch.Tensor:
    """All heads' KV in one pool, as a rank alone has it."""
    group, rng = spec.groups[0], torch.Generator().manual_seed(1)
    planes = 1 if group.kind == "latent" else 2
    return torch.randn(BLOCKS, LAYERS, planes, group.kv_heads, 16, group.head_dim, generator=rng)


def pool_of(spec: Namespace, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What that rank has of it."""
    heads = spec.groups[0].kv_heads
    if heads >= size:
        part = heads // size
        return whole[:, :, :, rank * part : (rank + 1) * part].contiguous()
    head = rank // (size // heads)
    return whole[:, :, :, head : head + 1].contiguous()


def written_by(spec: Namespace, size: int, blocks: list[int]) -> bytearray:
    """The payload that ranks write together."""
    whole = whole_pool(spec)
    payload = bytearray(len(blocks) * spec.groups[0].granule_bytes)
    for rank in writers_of(spec, Parallel(size))[0]:
        pool = pool_of(spec, whole, rank, size)
        Slices(View(spec, 0, shard_of(rank, size)), pool).store(blocks, memoryview(payload))
    return payload


SHAPES = [(kv_heads, size, False) for kv_heads, size in product((1, 2, 4, 8), (1, 2, 4, 8))]
SHAPES += [(1, size, True) for size in (1, 2, 4)]


@pytest.mark.parametrize(("kv_heads", "size", "latent"), SHAPES)
def test_ranks_write_the_bytes_that_one_would(kv_heads: int, size: int, latent: bool) -> None:
    spec, blocks = namespace(kv_heads, latent=latent), [5, 0, 7]
    expected = b"".join(whole_pool(spec)[block].numpy().tobytes() for block in blocks)
    assert bytes(written_by(spec, size, blocks)) == expected


@pytest.mark.parametrize(("kv_heads", "size", "latent"), SHAPES)
def test_each_rank_gets_its_heads_back(kv_heads: int, size: int, latent: bool) -> None:
    spec, whole = namespace(kv_heads, latent=latent), whole_pool(namespace(kv_heads, latent=latent))
    payload = memoryview(written_by(spec, 1, [5, 0, 7]))
    for rank in range(size):
        pool = torch.full_like(pool_of(spec, whole, rank, size), -1)
        (slices,) = slices_of(spec, {spec.groups[0].name: pool}, shard_of(rank, size))
        slices.load(payload, [1, 8, 2])
        wanted = pool_of(spec, whole, rank, size)
        assert torch.equal(pool[[1, 8, 2]], wanted[[5, 0, 7]])
        assert (pool[[0, 3, 4, 5, 6, 7]] == -1).all(), "no other block is touched"


@pytest.mark.parametrize(("kv_heads", "size", "writers"), [(4, 4, 4), (4, 2, 2), (2, 4, 2), (1, 4, 1), (2, 8, 2)])
def test_of_ranks_that_hold_the_same_one_writes(kv_heads: int, size: int, writers: int) -> None:
    found = writers_of(namespace(kv_heads), Parallel(size))[0]
    assert len(found) == writers and found[0] == 0, "rank 0 is always one of them: it commits"


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 4), (1, 2)])
def test_through_a_buffer_it_is_the_same(kv_heads: int, size: int) -> None:
    """As an accelerator's pool is reached."""
    spec, whole = namespace(kv_heads), whole_pool(namespace(kv_heads))
    payload = bytearray(2 * spec.groups[0].granule_bytes)
    for rank in writers_of(spec, Parallel(size))[0]:
        view = View(spec, 0, shard_of(rank, size))
        Slices(view, pool_of(spec, whole, rank, size), staged=True).store([6, 2], memoryview(payload))
    assert payload == written_by(spec, 1, [6, 2])
    for rank in range(size):
        pool = torch.zeros_like(pool_of(spec, whole, rank, size))
        Slices(View(spec, 0, shard_of(rank, size)), pool, staged=True).load(memoryview(payload), [3, 4])
        assert torch.equal(pool[[3, 4]], pool_of(spec, whole, rank, size)[[6, 2]])


def test_checksums_are_of_whole_granules() -> None:
    spec = namespace(2)
    size = spec.groups[0].granule_bytes
    payload = written_by(spec, 2, [5, 0, 7])
    before = checksums(memoryview(payload), size)
    payload[size + 3] ^= 1
    after = checksums(memoryview(payload), size)
    assert [before[at : at + 8] == after[at : at + 8] for at in (0, 8, 16)] == [True, False, True]


def test_a_room_of_another_size_is_no_room() -> None:
    spec = namespace(2)
    slices = Slices(View(spec, 0, shard_of(0, 2)), pool_of(spec, whole_pool(spec), 0, 2))
    with pytest.raises(AssertionError):
        slices.store([1, 2], memoryview(bytearray(3 * spec.groups[0].granule_bytes)))
