"""Miss-ratio curves learnt online against exact stack distances, within stated bounds; and bounded, whatever comes."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kvstore.curves import RUNGS, STACK_KEYS, TENANTS_MAX, Curve, Curves, Distinct, Stack

CHUNK = 1 << 20
SIZES = [CHUNK * 2 ** (step / 2) for step in range(14, 36)]
"""From 128 chunks on: a smaller pool than that isn't worth foreseeing."""


def key(name: Hashable) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def exact_rates(stream: Sequence[Hashable], sizes: Sequence[float]) -> tuple[list[float], float]:
    """Hit rates of LRU caches of these sizes, by the distances of every reference; and that of an endless one."""
    tree = [0] * (len(stream) + 2)

    def add(at: int, value: int) -> None:
        at += 1
        while at < len(tree):
            tree[at] += value
            at += at & -at

    def until(at: int) -> int:
        at, total = at + 1, 0
        while at:
            total += tree[at]
            at &= at - 1
        return total

    last: dict[Hashable, int] = {}
    distances = []
    for now, name in enumerate(stream):
        if name in last:
            distances.append((len(last) - until(last[name]) + 1) * CHUNK)
            add(last[name], -1)
        last[name] = now
        add(now, 1)
    distances.sort()
    return [bisect_right(distances, size) / len(stream) for size in sizes], len(distances) / len(stream)


def zipf(names: int, references: int, exponent: float, seed: int) -> list[Hashable]:
    weights = [(number + 1) ** -exponent for number in range(names)]
    return list(random.Random(seed).choices(range(names), weights, k=references))


def conversations(users: int, turns: int, seed: int) -> list[Hashable]:
    """Prompts that grow by a few chunks a turn behind a beginning that all share; some users come far more often."""
    chance = random.Random(seed)
    lengths = [chance.randrange(4, 40) for _ in range(users)]
    asked: list[Hashable] = []
    for _ in range(turns):
        user = int(users * chance.random() ** 2)
        lengths[user] = chance.randrange(4, 40) if lengths[user] > 120 else lengths[user] + chance.randrange(1, 4)
        asked += [("shared", n) for n in range(8)] + [(user, n) for n in range(lengths[user])]
    return asked


def shifting(names: int, references: int, seed: int) -> list[Hashable]:
    """A working set that moves on: what was asked long ago isn't asked again."""
    chance = random.Random(seed)
    return [now // 8 + int(names * chance.random() ** 3) for now in range(references)]


WORKLOADS = {
    "zipf": zipf(20_000, 80_000, 0.9, 1),
    "flat": zipf(100_000, 120_000, 0.6, 2),
    "conversations": conversations(300, 1500, 3),
    "shifting": shifting(6_000, 80_000, 4),
}
MEAN_ERROR_MAX, WORST_ERROR_MAX = 0.02, 0.06


@pytest.mark.parametrize("name", WORKLOADS)
def test_curves_are_those_of_exact_distances_within_two_points(name: str) -> None:
    stream = WORKLOADS[name]
    curve = Curve()
    for at in range(0, len(stream), 200):
        curve.observe(b"".join(map(key, stream[at : at + 200])), CHUNK)
    exact, endless = exact_rates(stream, SIZES)
    told = curve.rates(SIZES)
    errors = [abs(a - b) for a, b in zip(told, exact, strict=True)]
    assert sum(errors) / len(errors) <= MEAN_ERROR_MAX and max(errors) <= WORST_ERROR_MAX, (told, exact)
    assert curve.ceiling == pytest.approx(endless, abs=0.02)
    assert all(a <= b for a, b in pairwise(told)) and told[-1] <= curve.ceiling


def test_distances_are_in_bytes_of_chunks_of_any_size() -> None:
    """A model with chunks of a quarter of the size leaves four times as many in the same memory."""
    names = zipf(3000, 40_000, 0.7, 5)
    small, large = Curve(), Curve()
    keys = b"".join(map(key, names))
    small.observe(keys, CHUNK // 4)
    large.observe(keys, CHUNK)
    assert small.rates([500 * CHUNK]) == pytest.approx(large.rates([2000 * CHUNK]), abs=0.001)


def test_what_a_worker_stored_is_no_miss_when_it_is_first_asked_for() -> None:
    curve = Curve()
    for turn in range(4000):
        curve.stored(key(turn), CHUNK)
        curve.observe(key(turn), CHUNK)
    assert curve.ceiling == pytest.approx(1.0, abs=0.01)
    assert curve.rates([64 * CHUNK])[0] > 0.95


def test_the_past_fades() -> None:
    curve = Curve()
    curve.observe(b"".join(key(n % 50) for n in range(4000)), CHUNK)
    assert curve.ceiling > 0.9
    for _ in range(12):
        curve.halve()
    curve.observe(b"".join(key(("new", n)) for n in range(4000)), CHUNK)
    assert curve.ceiling < 0.05 and curve.rates([1 << 40])[0] < 0.05


def test_a_curve_keeps_so_many_keys_and_no_more() -> None:
    curve = Curve(keys=64)
    for start in range(0, 60_000, 1000):
        curve.observe(b"".join(key(n) for n in range(start, start + 1000)), CHUNK)
        assert curve.keys <= RUNGS * 64
    assert len(curve.rungs[0].stack) == 64 and curve.rungs[0].reach < curve.rungs[1].reach


def test_tenants_have_curves_of_their_own_up_to_a_cap_and_share_one_beyond_it() -> None:
    curves = Curves()
    for number in range(3 * TENANTS_MAX):
        curves.looked_up(f"t{number}", key(number), CHUNK, 256, 0)
    assert len(curves) == TENANTS_MAX and curves.others.asked == 2 * TENANTS_MAX * CHUNK
    assert curves.keys <= (TENANTS_MAX + 1) * RUNGS * STACK_KEYS
    for _ in range(6):
        curves.fade()
    curves.looked_up("late", key("late"), CHUNK, 256, 0)
    assert set(curves.named()) == {"late"}, "who has asked nothing for long makes room"


def test_distinct_keys_are_counted_within_a_few_percent() -> None:
    for count in (10, 1000, 50_000):
        distinct = Distinct()
        hashes = [int.from_bytes(key(n)[8:16]) for n in range(count)]
        assert sum(map(distinct.add, hashes * 2)) == pytest.approx(count, rel=0.06)


class NaiveStack:
    """A list in order of use: the executable specification of `Stack`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.order: OrderedDict[int, int] = OrderedDict()

    def use(self, name: int, size: int) -> int | None:
        distance = None
        if name in self.order:
            names = list(self.order)
            distance = sum(self.order[later] for later in names[names.index(name) + 1 :])
            del self.order[name]
        elif len(self.order) >= self.limit:
            self.order.popitem(last=False)
        self.order[name] = size
        return distance


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=120))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_the_stack_tells_bytes_used_since(uses: list[tuple[int, int]]) -> None:
    stack, naive = Stack(8), NaiveStack(8)
    for name, size in uses:
        assert stack.use(name, size) == naive.use(name, size)
        assert stack.bytes == sum(naive.order.values()) and len(stack) == len(naive.order)
