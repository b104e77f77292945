"""KV gets to its slots, and granules between pool and canonical bytes."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.cache import gather_granules, scatter_granules, write_kv

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_pool(blocks: int = 9, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return noise(blocks, 3, 2, 2, BLOCK_TOKENS, 6, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_lands_in_its_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    k, v = noise(5, 2, 6, dtype=dtype, seed=1), noise(5, 2, 6, dtype=dtype, seed=2)
    slots = [17, 3, 143, 16, 64]
    wanted = pool.clone()
    for row, slot in enumerate(slots):
        block, offset = divmod(slot, BLOCK_TOKENS)
        wanted[block, 1, 0, :, offset] = k[row]
        wanted[block, 1, 1, :, offset] = v[row]
    write_kv(pool, 1, torch.tensor(slots), k, v)
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [[4], [2, 3, 4], [8, 0, 5, 1], []])
def test_granules_are_the_blocks_bytes(blocks: list[int], dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    granule = pool[0].numel() * pool.element_size()
    out = torch.zeros(len(blocks), granule, dtype=torch.uint8)
    gather_granules(pool, blocks, out)
    for row, block in enumerate(blocks):
        assert out[row].numpy().tobytes() == pool[block].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("blocks", [[4], [2, 3, 4], [8, 0, 5, 1], []])
def test_scattered_granules_come_back(blocks: list[int]) -> None:
    source, target = make_pool(), torch.zeros_like(make_pool())
    data = torch.empty(len(blocks), source[0].numel() * 4, dtype=torch.uint8)
    gather_granules(source, torch.tensor(blocks, dtype=torch.int64), data)
    scatter_granules(target, blocks, data)
    for block in range(len(source)):
        wanted = source[block] if block in blocks else torch.zeros_like(source[block])
        assert torch.equal(target[block], wanted)


def test_granules_in_foreign_memory() -> None:
    pool = make_pool()
    granule = pool[0].numel() * 4
    memory = bytearray(4096 + 2 * granule)
    out = torch.frombuffer(memory, dtype=torch.uint8)[4096:].view(2, granule)
    gather_granules(pool, [7, 1], out)
    assert memory[4096 : 4096 + granule] == pool[7].view(torch.uint8).numpy().tobytes()
    assert not any(memory[:4096])


@pytest.mark.parametrize("blocks", [[-1], [9]])
def test_a_block_outside_the_pool_is_refused(blocks: list[int]) -> None:
    pool = make_pool()
    data = torch.zeros(1, pool[0].numel() * 4, dtype=torch.uint8)
    with pytest.raises(AssertionError):
        gather_granules(pool, blocks, data)
    with pytest.raises(AssertionError):
        scatter_granules(pool, blocks, data)
