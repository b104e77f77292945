"""Attention over chosen rows gives what its definition gives, wherever the rows lie, and never reads anybody else's."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels import sparse
from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.chosen import NONE, physical_rows, resident_slots, sequence_of_rows
from forebay.kernels.mla import latent_attention
from forebay.kernels.sparse import read_rows, sparse_latent_attention, sparse_latent_attention_reference
from tests.kernels.sparse_cases import LAYERS, Case, make_case, noise

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, RANK, WIDTH, SCALE = 3, 10, 16, 0.3
MIXED = [(1, 3), (20, 0), (1, 90), (9, 41)]


def some_slots(case: Case, count: int, seed: int = 2) -> torch.Tensor:
    """Of each row `count` of the positions that it sees, in any order, or all if there are fewer."""
    rng = torch.Generator().manual_seed(seed)
    positions = torch.full((case.batch.num_tokens, count), NONE)
    for row, position in enumerate(case.batch.positions.tolist()):
        taken = torch.randperm(position + 1, generator=rng)[:count]
        positions[row, : len(taken)] = taken
    return resident_slots(case.batch.groups["g"].block_tables, sequence_of_rows(case.batch), positions)


@pytest.mark.parametrize("count", [1, 9, 120])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_as_defined(count: int, dtype: torch.dtype, within: float) -> None:
    """Rows behind a sequence's end are no numbers: were one read, the result would be none."""
    case = make_case(MIXED, WIDTH, dtype=dtype)
    q, slots = noise(case.batch.num_tokens, HEADS, WIDTH, seed=7, dtype=dtype), some_slots(case, count)
    args = (q, case.pool, 1, slots)
    found = sparse_latent_attention(*args, scale=SCALE, rank=RANK)
    wanted = sparse_latent_attention_reference(*args, scale=SCALE, rank=RANK)
    torch.testing.assert_close(found, wanted, rtol=0, atol=within)


def test_all_that_is_seen_is_dense_attention() -> None:
    case = make_case(MIXED, WIDTH)
    q, slots = noise(case.batch.num_tokens, HEADS, WIDTH, seed=7), some_slots(case, 100)
    found = sparse_latent_attention(q, case.pool, 1, slots, scale=SCALE, rank=RANK)
    pool = case.pool.nan_to_num()
    wanted = latent_attention(q, pool, 1, case.batch, "g", scale=SCALE, rank=RANK)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_tiles_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "GATHER_BYTES", 7 * 9 * WIDTH * 8)
    test_as_defined(9, torch.float64, 1e-12)


def test_the_same_bits_wherever_rows_lie() -> None:
    """Rows are moved elsewhere in the pool; in the same order they give the same bits."""
    case = make_case(MIXED, WIDTH, dtype=torch.float32)
    q, slots = noise(case.batch.num_tokens, HEADS, WIDTH, seed=7, dtype=torch.float32), some_slots(case, 20)
    wanted = sparse_latent_attention(q, case.pool, 2, slots, scale=SCALE, rank=RANK)
    blocks = len(case.pool)
    moved = torch.full((slots.numel() // BLOCK_TOKENS + 1 + blocks, *case.pool.shape[1:]), torch.nan)
    places = torch.arange(blocks * BLOCK_TOKENS, blocks * BLOCK_TOKENS + slots.numel()).flip(0).view(slots.shape)
    there = slots >= 0
    rows, to = physical_rows(slots[there], LAYERS, 2), physical_rows(places[there], LAYERS, 2)
    moved.view(-1, WIDTH)[to] = case.pool.view(-1, WIDTH)[rows]
    found = sparse_latent_attention(
        q, moved, 2, places.masked_fill(~there, NONE), scale=SCALE, rank=RANK
    )
    assert torch.equal(found, wanted)


def test_a_query_that_has_chosen_nothing_gets_zeros() -> None:
    case = make_case([(3, 20)], WIDTH)
    q, slots = noise(3, HEADS, WIDTH), some_slots(case, 5)
    slots[1] = NONE
    case.pool[0] = torch.nan
    found = sparse_latent_attention(q, case.pool, 0, slots, scale=SCALE, rank=RANK)
    assert torch.equal(found[1], torch.zeros(HEADS, RANK).double()) and bool(found.isfinite().all())


def test_rows_are_counted_beyond_thirty_two_bits() -> None:
    """A pool of 7.5 million rows of 576 has more elements than that, and its rows times layers are more yet."""
    slots = torch.tensor([[2**31, 2**33 + 5, NONE]])
    found = physical_rows(slots, 61, 60)
    assert found.dtype == torch.int64
    assert found.tolist()[0][:2] == [(2**27 * 61 + 60) * 16, (2**29 * 61 + 60) * 16 + 5] and found[0, 2] < 0


def test_rows_are_read_in_their_order() -> None:
    case = make_case([(2, 40)], WIDTH)
    slots = some_slots(case, 6)
    found = read_rows(case.pool, 1, slots)
    for row in range(2):
        for place, slot in enumerate(slots[row].tolist()):
            assert torch.equal(found[row, place], case.pool[slot // 16, 1, 0, 0, slot % 16])
