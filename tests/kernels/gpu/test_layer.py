"""Norm, rotation and cache write, interpreted, give what their definitions give."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels import norm, rotary
from forebay.kernels.gpu import norm as gpu_norm
from forebay.kernels.gpu import rotary as gpu_rotary
from forebay.kernels.narrow import LARGEST, KvScales
from forebay.kernels.rotary import HeadNorms, Turn


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("width", [8, 100, 5000])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_sum_stays_and_its_norm_comes_out(width: int, add: bool, dtype: torch.dtype) -> None:
    hidden, x, weight = noise(3, width), noise(3, width, seed=1, dtype=dtype), noise(width, seed=2)
    wanted_hidden = hidden.double()
    wanted = norm.add_norm(wanted_hidden, x if add else None, weight.double(), 1e-5, torch.float64)
    found = gpu_norm.add_norm(hidden, x if add else None, weight, 1e-5, dtype)
    assert found.dtype == dtype
    within = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=within)
    torch.testing.assert_close(hidden.double(), wanted_hidden, rtol=0, atol=1e-6)


def test_a_row_of_zeros_has_a_norm_of_zeros() -> None:
    assert not gpu_norm.add_norm(torch.zeros(2, 8), None, torch.ones(8), 1e-6, torch.float32).any()


def turn_of(rows: int, half: int, pairs: bool) -> Turn:
    angles = noise(rows, half, seed=9)
    return Turn(angles.cos(), angles.sin(), pairs)


@pytest.mark.parametrize(("dim", "half"), [(16, 8), (24, 5), (20, 10)])
@pytest.mark.parametrize("pairs", [False, True])
def test_rotation_of_halves_and_of_pairs_of_a_part_of_a_head(dim: int, half: int, pairs: bool) -> None:
    x, turn = noise(3, 2, dim), turn_of(3, half, pairs)
    wanted = rotary.rotate(x, turn)
    gpu_rotary.rotate_(x, turn)
    torch.testing.assert_close(x, wanted, rtol=0, atol=1e-6)


def test_a_rotation_keeps_lengths_and_one_back_undoes_it() -> None:
    x, turn = noise(3, 2, 16), turn_of(3, 8, True)
    there = rotary.rotate(x, turn)
    torch.testing.assert_close(there.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotary.rotate(there, Turn(turn.cos, -turn.sin, True)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("pairs", [False, True])
def test_norm_rotation_and_write_in_one(dtype: torch.dtype, normed: bool, pairs: bool) -> None:
    heads, kv_heads, dim, half = 3, 2, 24, 8
    slots = torch.tensor([17, -1, 3, 47])  # a row of padding goes nowhere
    norms = HeadNorms(noise(dim, seed=3), noise(dim, seed=4), 1e-6) if normed else None
    qkv, pool = noise(4, heads + 2 * kv_heads, dim, dtype=dtype), noise(3, 2, 2, kv_heads, 16, dim, seed=5, dtype=dtype)
    turn, wanted, wanted_pool = turn_of(4, half, pairs), qkv.clone(), pool.clone()
    rotary.norm_rotate_write(wanted, turn, norms, wanted_pool, 1, slots, heads)
    gpu_rotary.norm_rotate_write(qkv, turn, norms, pool, 1, slots, heads)
    within = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(qkv[:, :heads], wanted[:, :heads], rtol=0, atol=within)
    torch.testing.assert_close(pool, wanted_pool, rtol=0, atol=within)
    assert torch.equal(pool[:, 0], wanted_pool[:, 0])


@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_pools_take_values_by_their_scales_and_cut_them(scaled: bool) -> None:
    """Of values that FP8 has, times a power of two: the interpreter's own rounding to FP8 forgets the carry into the
    exponent. And of one that is too large. (It doesn't know the older AMD FP8.)"""
    heads, kv_heads, dtype = 1, 2, torch.float8_e4m3fn
    scales = KvScales(torch.tensor([0.5, 4.0]), torch.tensor([2.0, 0.25])) if scaled else None
    qkv = noise(2, heads + 2 * kv_heads, 16).to(dtype).float()
    if scales is not None:
        qkv[:, heads:] *= scales.both
    qkv[1, heads:, 3] = 1e6
    turn = Turn(torch.ones(2, 8), torch.zeros(2, 8))
    pools = [torch.zeros(1, 1, 2, kv_heads, 16, 16).to(dtype) for _ in range(2)]
    slots = torch.tensor([0, 9])
    gpu_rotary.norm_rotate_write(qkv.clone(), turn, None, pools[0], 0, slots, heads, scales)
    rotary.norm_rotate_write(qkv.clone(), turn, None, pools[1], 0, slots, heads, scales)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))
    back = pools[0][0, 0, :, :, 9].flatten(0, 1).float()
    assert back[:, 3].tolist() == [LARGEST[dtype]] * 4
    stored = back if scales is None else back * scales.both
    kept = [column for column in range(16) if column != 3]
    assert torch.equal(stored[:, kept], qkv[1, heads:, kept])
