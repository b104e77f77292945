"""Attention over parts of the keys, on as many ranks as there are parts: together it is attention over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forebay.kernels.dealing import Dealing
from forebay.kernels.lse import Base, Lse, Partial, merge_parts
from forebay.kernels.partial import (
    Keys,
    Stored,
    attend_all,
    attend_causal,
    attend_lengths,
    nothing_seen,
    weigh,
    with_sinks,
)

HEADS, DIM = 3, 8
RNG = torch.Generator().manual_seed(2)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RNG, dtype=torch.float64)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.einsum("nhd,md->nhm", q, k), dim=-1) @ v


def summed(parts: list[Partial]) -> Tensor:
    """As ranks do: each weighs its own part, and the shares are added up."""
    lses = Lse(torch.stack([part.lse.to("e").values for part in parts]), "e")
    return torch.stack([weigh(lses, index).of(part.out) for index, part in enumerate(parts)]).sum(0)


@pytest.mark.parametrize("base", ["e", "2"])
def test_masses_of_2_and_8_weigh_a_fifth_and_four_fifths(base: Base) -> None:
    """Taken to the wrong base they would weigh 0.119 and 0.881, or 0.277 and 0.723."""
    log = math.log if base == "e" else math.log2
    lses = Lse(torch.tensor([[log(2.0)], [log(8.0)]]), base)
    for index, expected in enumerate((0.2, 0.8)):
        found = weigh(lses, index)
        assert float(found.weight) == pytest.approx(expected, abs=1e-6)
        assert float(found.lse) == pytest.approx(math.log(10.0), abs=1e-6)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("tokens", "step"), [(1, 1), (2, 1), (3, 1), (1, 4), (4, 4), (5, 4), (12, 4)])
def test_a_rank_without_any_position_counts_for_nothing_whatever_its_buffer_holds(
    tokens: int, step: int, junk: float
) -> None:
    """Too few tokens for all ranks: what the others give is full of nan, and their LSE may be no number either."""
    q, k, v = randn(2, HEADS, DIM), randn(tokens, DIM), randn(tokens, DIM)
    parts = []
    for rank in range(4):
        own = [p for p in range(tokens) if Dealing(4, rank, step).owner(p) == rank]
        part = attend_all(q, Keys(k[own], v[own]))
        if not own:
            assert torch.equal(part.out, torch.zeros_like(part.out))
            part = Partial(torch.full_like(part.out, math.nan), Lse(torch.full_like(part.lse.values, junk), "e"))
        parts.append(part)
    expected = dense(q, k, v)
    torch.testing.assert_close(summed(parts), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(merge_parts(parts).out, expected, rtol=0, atol=1e-12)


def test_nothing_seen_by_anybody_is_zero() -> None:
    parts = [nothing_seen(2, HEADS, DIM, randn(1)) for _ in range(3)]
    assert torch.equal(summed(parts), torch.zeros(2, HEADS, DIM, dtype=torch.float64))
    lses = Lse(torch.stack([part.lse.values for part in parts]), "2")
    assert bool((weigh(lses, 1).lse == -math.inf).all())


@pytest.mark.parametrize("junk", [math.nan, math.inf])
@pytest.mark.parametrize("latent", [False, True])
def test_what_is_cleared_is_hidden_even_if_it_is_no_number(junk: float, latent: bool) -> None:
    """Behind a row's length there is what somebody else has left, in scores and in what is summed."""
    q, lengths, value = randn(3, HEADS, DIM), torch.tensor([0, 5, 8]), 5 if latent else DIM
    k = randn(3, 8, DIM)
    v = k[..., :value] if latent else randn(3, 8, DIM)
    expected = attend_lengths(q, Keys(k.clone(), v.clone()), lengths)
    behind = torch.arange(8) >= lengths[:, None]
    k[behind] = junk
    v[behind] = junk
    keys = Keys(k, v)
    keys.clear(behind.flatten().nonzero()[:, 0])
    found = attend_lengths(q, keys, lengths)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse.values, expected.lse.values)


@pytest.mark.parametrize(("size", "step"), [(2, 1), (4, 1), (4, 4), (8, 2)])
@pytest.mark.parametrize("history", [0, 1, 15, 16, 37])
def test_several_new_tokens_see_what_each_may_see(size: int, step: int, history: int) -> None:
    """A row for each query, with its own length on each rank: exhaustive over histories and places in a block."""
    queries, total = 5, history + 5
    q, k, v = randn(queries, HEADS, DIM), randn(total, DIM), randn(total, DIM)
    parts = []
    for rank in range(size):
        dealing = Dealing(size, rank, step)
        own = [p for p in range(total) if dealing.owner(p) == rank]
        lengths = dealing.local_lengths(torch.arange(history + 1, total + 1))
        keys = Keys(k[own].expand(queries, -1, -1), v[own].expand(queries, -1, -1))
        parts.append(attend_lengths(q, keys, lengths))
    expected = torch.cat([dense(q[j : j + 1], k[: history + j + 1], v[: history + j + 1]) for j in range(queries)])
    torch.testing.assert_close(summed(parts), expected, rtol=0, atol=1e-12)
    new, cached = Keys(k[history:], v[history:]), Keys(k[:history], v[:history])
    causal = merge_parts([attend_causal(q, new), attend_all(q, cached)])
    torch.testing.assert_close(causal.out, expected, rtol=0, atol=1e-12)


def test_tiles_of_queries_are_one() -> None:
    q, k, v = randn(300, 2, DIM), randn(300, DIM), randn(300, DIM)
    expected = torch.cat([dense(q[j : j + 1], k[: j + 1], v[: j + 1]) for j in range(300)])
    torch.testing.assert_close(attend_causal(q, Keys(k, v)).out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_chosen_positions_are_read_by_their_owners(size: int, latent: bool) -> None:
    """Of both parities, in any order, some of them none: against attention over the chosen ones. Each rank goes by
    local indices through the one table: global ones would read other rows."""
    table, total, value = torch.tensor([3, 0, 4]), 45, 5 if latent else DIM
    planes = 1 if latent else 2
    rows = randn(total, planes, DIM)
    chosen = torch.tensor([[1, 2, 33, 8, 44, 15, 16, -1], [0, 7, 9, 11, 13, -1, -1, -1], [4, *[-1] * 7]])
    q = randn(len(chosen), HEADS, DIM)
    parts = []
    for rank in range(size):
        dealing = Dealing(size, rank)
        pool = torch.full((5, 2, planes, 1, dealing.block_tokens, DIM), math.nan, dtype=torch.float64)
        for position in range(total):
            slot = dealing.slot(int(table[position // 16]), position)
            if slot >= 0:
                pool[slot // dealing.block_tokens, 1, :, 0, slot % dealing.block_tokens] = rows[position]
        local, counts = dealing.selected(chosen)
        # nan in what is nobody's, hence in the padding of the last block: it isn't chosen.
        keys = Stored(1, 5 if latent else None).gather(pool, table[None], pool.dtype)
        picked = local.clamp(min=0)
        own = Keys(keys.k[0][picked].nan_to_num(), keys.v[0][picked].nan_to_num())
        parts.append(attend_lengths(q, own, counts))
    found = summed(parts)
    for row, positions in enumerate(chosen):
        own_rows = rows[positions[positions >= 0]]
        expected = dense(q[row : row + 1], own_rows[:, 0], own_rows[:, -1, :value])
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=1e-12)


def test_sinks_are_scores_without_a_value() -> None:
    q, k, v, sinks = randn(4, HEADS, DIM), randn(6, DIM), randn(6, DIM), randn(HEADS)
    scores = torch.cat((torch.einsum("nhd,md->nhm", q, k), sinks.expand(4, -1)[..., None]), dim=-1)
    expected = torch.softmax(scores, dim=-1)[..., :-1] @ v
    torch.testing.assert_close(with_sinks(attend_all(q, Keys(k, v)), sinks), expected, rtol=0, atol=1e-12)
