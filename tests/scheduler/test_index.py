"""The prefix index means what the dictionary of sets means, holds what it says it holds, and forgets what is gone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.key_table import ABSENT, KeyTable
from forebay.scheduler.naive_index import NaiveIndex

pytestmark = pytest.mark.usefixtures("form")

BYTES_A_BLOCK = 150
# Numbers whose home is one of two buckets, however large the table: every chain of full buckets is seen.
BACK = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
CROWDED = [BACK * (high << 63 | low) % (1 << 64) for high in (0, 1) for low in range(40)]
KEYS = [0, 1, 2**64 - 1, *CROWDED]


Step = tuple[str, int, list[int]]


def u64(keys: Sequence[int]) -> Any:
    return np.array(keys, np.uint64)


batches = st.lists(st.sampled_from(KEYS), max_size=60)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.integers(0, 5), batches),
        st.tuples(st.just("removed"), st.integers(0, 5), batches),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just([])),
    ),
    max_size=25,
)


@settings(max_examples=150)
@given(steps, st.lists(batches, min_size=1, max_size=4))
def test_it_answers_as_a_dictionary_of_sets_does(plan: list[Step], prompts: list[list[int]]) -> None:
    index, naive = PrefixIndex(), NaiveIndex()
    for verb, holder, keys in plan:
        if verb == "drop":
            before = sum(holder in holders for holders in naive.blocks.values())
            assert index.drop(holder) == before
            naive.drop(holder)
        else:
            had = {key for key in keys if holder in naive.blocks.get(key, ())}
            moved = getattr(index, verb)(holder, u64(keys))
            assert moved == (len(had) if verb == "removed" else len(set(keys) - had))
            getattr(naive, verb)(holder, keys)
        assert len(index) == len(naive)
    for key in KEYS:
        assert index.holders(key) == sorted(naive.blocks.get(key, ()))
    for prompt in prompts:
        assert index.match(u64(prompt)).lengths() == naive.lengths(prompt)
    stats = index.stats()
    assert stats.entries == sum(map(len, naive.blocks.values()))
    assert stats.sets == len({frozenset(holders) for holders in naive.blocks.values()})


def test_a_long_prompt_is_matched_run_by_run() -> None:
    rng, keys = random.Random(5), list(range(1, 5001))
    index, naive = PrefixIndex(), NaiveIndex()
    for holder in range(40):
        held = keys[: rng.randrange(5000)]
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(held) + 1)
            del held[at : at + rng.randrange(4)]
        index.stored(holder, u64(held))
        naive.stored(holder, held)
    match = index.match(u64(keys))
    assert match.lengths() == naive.lengths(keys)
    assert match.starts[0] == 0 and list(match.ends) == [*match.starts[1:], match.blocks]


def test_churn_leaves_nothing_behind() -> None:
    rng = np.random.default_rng(3)
    index = PrefixIndex()
    base = rng.integers(1, 1 << 63, 2000, np.uint64)
    index.stored(0, base)
    before = index.stats()
    for wave in range(10):
        fresh = rng.integers(1, 1 << 63, 10_000, np.uint64)
        for holder in range(4):
            index.stored(holder, fresh)
        assert len(index) == 12_000, wave
        for holder in range(3):
            index.removed(holder, fresh)
        index.removed(3, fresh)
    after = index.stats()
    assert (after.blocks, after.entries, after.sets) == (before.blocks, before.entries, before.sets)
    assert after.bytes <= before.bytes + 64, "but for a few places in lists"
    assert index.match(base).lengths() == {0: 2000}


@pytest.mark.parametrize("holders", [1, 8])
def test_its_size_is_bounded_by_its_blocks(holders: int) -> None:
    rng = np.random.default_rng(4)
    index = PrefixIndex()
    for count in (1, 3000, 20_000, 49_000):  # also just after the table has doubled
        index = PrefixIndex()
        keys = rng.integers(1, 1 << 63, count, np.uint64)
        for holder in range(holders):
            index.stored(holder, keys)
        assert index.stats().bytes <= BYTES_A_BLOCK * count + 4096
    assert index.stats().sets == 1


def test_even_blocks_that_all_have_other_holders_stay_within_bounds() -> None:
    index, pairs = PrefixIndex(), [(a, b) for a in range(150) for b in range(a)]
    for key, pair in enumerate(pairs, 1):
        for holder in pair:
            index.stored(holder, u64([key]))
    stats = index.stats()
    assert stats.sets == len(pairs)
    assert stats.bytes <= BYTES_A_BLOCK * stats.entries


def test_a_full_index_refuses_new_blocks_and_counts_them() -> None:
    index = PrefixIndex(max_blocks=100)
    assert index.stored(0, u64(range(1, 91))) == 90
    assert index.stored(1, u64(range(81, 121))) == 20, "10 that it has, and room for 10 new ones"
    assert len(index) == 100 and index.stats().refused == 20
    assert index.holders(100) == [1] and index.holders(101) == []
    index.removed(0, u64(range(1, 51)))
    assert index.stored(0, u64(range(200, 240))) == 40, "there is room again"


def test_the_table_that_is_told_its_size_never_copies() -> None:
    table = KeyTable(np.uint32, expected=10_000)
    keys = np.arange(1, 10_001, dtype=np.uint64)
    slots = table.insert(keys)
    assert table.rehashes == 0 and len(set(slots.tolist())) == 10_000
    assert (table.find(keys) == slots).all() and table.find(u64([0]))[0] == ABSENT
    assert (table.keys_at(slots) == keys).all()
    table.remove(slots)
    assert len(table) == 0 and (table.find(keys) == ABSENT).all()
