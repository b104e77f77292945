"""The compiled form of a loop means what its numpy form means, on the same arrays, whoever of them was there before."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.scheduler import loops
from forebay.scheduler.cost import Estimate, estimate
from forebay.scheduler.fleet import Fleet, Rates, Worker
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.naive_index import NaiveIndex
from forebay.scheduler.places import Holders, Tier
from forebay.scheduler.prefix_keys import prefix_keys
from forebay.scheduler.reach import Reach, leading_of, reach_of
from tests.scheduler.conftest import needs_numba
from tests.scheduler.test_index import CROWDED, KEYS, batches, u64


def either(compiled: bool) -> nullcontext[None]:
    return nullcontext() if compiled else loops.without_compiled_loops()  # type: ignore[return-value]


@needs_numba
@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from(["stored", "removed", "drop"]), st.integers(0, 5), batches),
        max_size=25,
    )
)
def test_one_form_goes_on_with_the_tables_of_the_other(plan: list[tuple[bool, str, int, list[int]]]) -> None:
    index, naive = PrefixIndex(), NaiveIndex()
    for compiled, verb, holder, keys in plan:
        with either(compiled):
            if verb == "drop":
                index.drop(holder)
                naive.drop(holder)
            else:
                getattr(index, verb)(holder, u64(keys))
                getattr(naive, verb)(holder, keys)
        for asked in (False, True):
            with either(asked):
                assert [index.holders(key) for key in KEYS] == [sorted(naive.blocks.get(key, ())) for key in KEYS]
                assert index.match(u64(CROWDED)).lengths() == naive.lengths(CROWDED)


@needs_numba
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 70), st.booleans()), max_size=20),
    st.integers(0, 3), st.integers(0, 70),
)  # fmt: skip
def test_a_nested_match_is_the_match(plan: list[tuple[int, int, int, bool]], asked: int, length: int) -> None:
    """Prompts that share beginnings, each stored from its first block on, and holders that go as a whole."""
    prompts = [u64([*range(1, 1 + 20 * number), *range(1000 * number + 1, 1000 * number + 60)]) for number in range(4)]
    index = PrefixIndex()
    for holder, number, blocks, goes in plan:
        if goes:
            index.drop(holder)
        else:
            index.stored(holder, prompts[number][:blocks])
    keys = prompts[asked][:length]
    plain, nested = index.match(keys), index.match(keys, nested=True)
    assert nested.blocks == plain.blocks and nested.lengths() == plain.lengths()
    assert nested.starts.tolist() == plain.starts.tolist() and nested.first.tolist() == plain.first.tolist()


@needs_numba
@given(st.integers(0, 2**32))
def test_keys_are_the_same_numbers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, depth = int(rng.integers(1, 70)), int(rng.integers(0, 1 << 20))
    tokens = rng.integers(0, 1 << 32, int(rng.integers(0, 9 * size)), np.uint32)
    extras = rng.integers(0, 1 << 63, int(rng.integers(0, 12)), np.uint64).tolist()
    parent = int(rng.integers(0, 1 << 63))
    found = []
    for compiled in (False, True):
        with either(compiled):
            found.append(prefix_keys(parent, tokens, size, depth=depth, extras=extras[: tokens.size // size]).tolist())
    assert found[0] == found[1] and len(found[0]) == tokens.size // size


@needs_numba
@given(st.integers(0, 2**32))
def test_what_workers_reach_is_the_same(seed: int) -> None:
    rng, holders, index = random.Random(seed), Holders(), PrefixIndex()
    made = [
        Worker(f"w{n}", None if n == 5 else f"s{n // 2}", 16, Rates(load_s=(0.0, rng.random(), rng.random(), 1.0)))
        for n in range(6)
    ]
    fleet = Fleet(made, holders)
    keys = np.random.default_rng(seed).integers(1, 1 << 62, 40, np.uint64)
    for owner in [*(f"w{n}" for n in range(6)), "s0", "s1", "s2", "unknown to the fleet"]:
        for tier in Tier:
            if rng.random() < 0.6:
                begin = rng.choice([0, 0, rng.randrange(20)])
                index.stored(holders.number(owner, tier), keys[begin : rng.randrange(40)])
    found, loads = [], []
    for compiled in (False, True):
        with either(compiled):
            match = index.match(keys)
            reach = reach_of(match, fleet, 16, 40 * 16)
            parts = [getattr(reach, name).tolist() for name in ("device", "near", "far", "source")]
            found.append((parts, leading_of(match, 9).tolist()))
            loads.append(reach.load_s.tolist())
    assert found[0] == found[1] and loads[0] == pytest.approx(loads[1])


@needs_numba
@given(st.integers(0, 2**32))
def test_costs_are_the_same(seed: int) -> None:
    rng, count, tokens = np.random.default_rng(seed), 40, 5000
    some = np.sort(rng.integers(0, tokens, (3, count)), axis=0)
    some[1][rng.random(count) < 0.3] = some[0][0]
    some = np.sort(some, axis=0)
    reach = Reach(*some, rng.random(count) * 0.1 * (some[1] > some[0]), np.zeros(count, np.int64))
    rates = [
        Rates(
            float(rng.random() * 1e-3), float(rng.choice([0.0, 3000.0])), move_s=float(rng.random() * 1e-4),
            decode_slows=0.01, overlaps=bool(rng.random() < 0.5),
        )
        for _ in range(count)
    ]  # fmt: skip
    fleet = Fleet([Worker(f"w{at}", None, 16, rate) for at, rate in enumerate(rates)], Holders())
    wait, link = (rng.random(count) * (rng.random(count) < 0.5) for _ in range(2))
    decoding = rng.integers(0, 9, count)
    found = []
    for compiled in (False, True):
        with either(compiled):
            found.append(estimate(tokens, reach, fleet, wait, link, decoding))
    for name in Estimate.__slots__:
        plain, looped = (getattr(one, name) for one in found)
        assert looped == pytest.approx(plain, abs=1 if name == "cached" else 1e-9), name


@needs_numba
def test_where_nothing_can_be_kept_loops_are_compiled_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import int64, njit

    from forebay.scheduler import compiled

    def homeless(*given: Any, cache: bool = False, **more: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*given, **more)

    monkeypatch.setattr(compiled.numba, "njit", homeless)
    assert compiled._compiled(int64(int64))(lambda number: 3 * number)(14) == 42


def test_without_numba_it_goes_on_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "forebay.scheduler.compiled", None)
    assert loops._Choice().now() is None


PROBE = """
from forebay.kvstore.identity import chain, pack_tokens, root_key
from forebay.scheduler.prefix_keys import as_tokens, extra_of, prefix_keys, root_of
keys = prefix_keys(root_of("m", 16, "l"), as_tokens(range(64)), 16, extras=[extra_of(["salt"])])
print(keys.tolist(), [key.hex() for key in chain(root_key(bytes(32)), pack_tokens(range(64)))])
"""


def test_two_processes_give_a_fixed_probe_the_same_names_whatever_their_hash_seeds() -> None:
    told = {
        subprocess.run(
            [sys.executable, "-c", PROBE], env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1 and b"[" in told.pop()
