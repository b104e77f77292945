"""Whose positions are whose: against the plain definition, against the store's layout, for every small size."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.kernels.dealing import NO_SLOT, Dealing, best_of, refusal
from forebay.kvstore.layout import local_index, local_length, owner

SHAPES = [(size, step) for size, step in product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16)) if size * step <= BLOCK_TOKENS]
LONGEST = 5 * BLOCK_TOKENS + 3


def ranks(size: int, step: int) -> list[Dealing]:
    return [Dealing(size, rank, step) for rank in range(size)]


@pytest.mark.parametrize(("size", "step"), SHAPES)
def test_it_is_what_the_stores_layout_says(size: int, step: int) -> None:
    assert refusal(size, step) is None
    for dealing in ranks(size, step):
        for position in range(LONGEST):
            assert dealing.owner(position) == owner(position, size, step)
            assert dealing.local_index(position) == local_index(position, size, step)
            assert dealing.local_length(position) == local_length(position, dealing.rank, size, step)


@pytest.mark.parametrize(("size", "step"), SHAPES)
def test_lengths_add_up_and_slots_are_dense(size: int, step: int) -> None:
    """One table for all ranks: the block of a position has the same number on each."""
    table = [7, 2, 9, 4, 0, 3]
    for tokens in range(1, LONGEST):
        assert sum(dealing.local_length(tokens) for dealing in ranks(size, step)) == tokens
    for dealing in ranks(size, step):
        own = [dealing.slot(table[p // BLOCK_TOKENS], p) for p in range(LONGEST)]
        kept = [slot for slot in own if slot != NO_SLOT]
        there = dealing.block_tokens
        assert kept == [table[i // there] * there + i % there for i in range(len(kept))], "in order, without gaps"
        for tokens in (1, 15, 16, 17, 31, 33, LONGEST):
            assert len([slot for slot in own[:tokens] if slot != NO_SLOT]) == dealing.local_length(tokens)
            assert dealing.local_blocks(tokens) == -(-dealing.local_length(tokens) // there)


@pytest.mark.parametrize(("size", "step"), SHAPES)
def test_a_batchs_slots_are_those_of_its_positions(size: int, step: int) -> None:
    """There are fewer of them than rows: whoever counts rows by slots is wrong."""
    table, positions = torch.tensor([5, 1, 8, 2, 6, 0]), torch.arange(LONGEST)
    slots = table[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    seen = []
    for dealing in ranks(size, step):
        plain = [dealing.slot(int(table[p // BLOCK_TOKENS]), p) for p in range(LONGEST)]
        assert dealing.slots(slots).tolist() == plain
        own = dealing.own_rows(slots)
        assert own.slots.tolist() == [slot for slot in plain if slot != NO_SLOT]
        assert len(own.rows) == dealing.local_length(LONGEST)
        seen += own.rows.tolist()
    assert sorted(seen) == list(range(LONGEST)), "each row is somebody's"


@pytest.mark.parametrize(("size", "step"), SHAPES)
def test_every_number_of_tokens_that_a_row_may_see(size: int, step: int) -> None:
    """All histories, hence all rows behind them, over several rounds of all ranks."""
    owners = torch.tensor([Dealing(size, 0, step).owner(p) for p in range(LONGEST)])
    for dealing in ranks(size, step):
        counted = (owners == dealing.rank).cumsum(0)
        assert torch.equal(dealing.local_lengths(torch.arange(1, LONGEST + 1)), counted)


@given(st.sampled_from(SHAPES), st.integers(0, 300), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_a_rows_length_is_that_of_what_it_sees(shape: tuple[int, int], history: int, queries: int) -> None:
    """Of query j behind H tokens, the length of H + j + 1: never the last one's less what is behind it."""
    for dealing in ranks(*shape):
        seen = torch.arange(history + 1, history + queries + 1)
        expected = [
            sum(dealing.owner(p) == dealing.rank for p in range(history + j + 1)) for j in range(queries)
        ]
        assert dealing.local_lengths(seen).tolist() == expected
        if shape[1] == 1:
            size = dealing.size
            assert expected == [max(-(-(history + j + 1 - dealing.rank) // size), 0) for j in range(queries)]


@given(st.sampled_from(SHAPES), st.integers(1, LONGEST))
@settings(max_examples=100, deadline=None)
def test_what_all_ranks_have_is_put_in_order(shape: tuple[int, int], tokens: int) -> None:
    dealt = [[p for p in range(tokens) if dealing.owner(p) == dealing.rank] for dealing in ranks(*shape)]
    width = Dealing(*shape[:1], 0, shape[1]).local_blocks(tokens) * (BLOCK_TOKENS // shape[0])
    assert width >= max(map(len, dealt)), "rank 0 has as much as any"
    padded = torch.tensor([own + [-1] * (width - len(own)) for own in dealt]).flatten()
    order = Dealing(shape[0], 0, shape[1]).in_order(tokens, width)
    assert padded[order].tolist() == list(range(tokens))


# --- selected positions --------------------------------------------------------------------------------------


@given(st.sampled_from(SHAPES), st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_selected_positions_become_local_ones_without_gaps(shape: tuple[int, int], count: int, rng: object) -> None:
    draw = rng.sample(range(LONGEST), count)  # type: ignore[attr-defined]
    positions = torch.tensor([draw + [-1] * 3, [-1] * (count + 3)])
    back: list[int] = []
    for dealing in ranks(*shape):
        found, counts = dealing.selected(positions)
        own = [p for p in draw if dealing.owner(p) == dealing.rank]
        assert counts.tolist() == [len(own), 0]
        assert found[0, : len(own)].tolist() == [dealing.local_index(p) for p in own]
        assert bool((found[0, len(own) :] == NO_SLOT).all()) and bool((found[1] == NO_SLOT).all())
        back += own
    assert sorted(back) == sorted(draw), "each is read by one rank"


@pytest.mark.parametrize("scores", ["constant", "zeros", "random"])
@pytest.mark.parametrize(("size", "step"), [(2, 1), (4, 2), (8, 1)])
def test_the_best_of_each_ranks_best_are_those_of_all(size: int, step: int, scores: str) -> None:
    """Ties too, as a ReLU leaves them at 0: they go by position, so no rank counts one twice or not at all."""
    count, total = 9, 70
    rng = torch.Generator().manual_seed(size)
    given = {
        "constant": torch.full((3, total), 2.5),
        "zeros": torch.randn(3, total, generator=rng).clamp_min(0),
        "random": torch.randn(3, total, generator=rng),
    }[scores]
    everything = best_of(given, torch.arange(total).expand(3, -1), count)
    candidates, theirs = [], []
    for dealing in reversed(ranks(size, step)):
        own = torch.tensor([p for p in range(total) if dealing.owner(p) == dealing.rank])
        best = best_of(given[:, own], own.expand(3, -1), count)
        candidates.append(best)
        theirs.append(given.gather(1, best))
    assert torch.equal(best_of(torch.cat(theirs, 1), torch.cat(candidates, 1), count), everything)
    if scores == "constant":
        assert everything.tolist() == [list(range(count))] * 3


@pytest.mark.parametrize(
    ("size", "step", "said"),
    [
        (3, 1, "decode_context_parallel_size 3 must be one of 1, 2, 4, 8, 16"),
        (32, 1, "decode_context_parallel_size 32 must be one of"),
        (4, 3, "cp_kv_cache_interleave_size 3 must be one of 1, 2, 4"),
        (4, 8, "cp_kv_cache_interleave_size 8 must be one of 1, 2, 4: it divides the 4 tokens"),
        (0, 1, "must be one of"),
        (2, 0, "must be one of 1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(size: int, step: int, said: str) -> None:
    assert said in (refusal(size, step) or "")
