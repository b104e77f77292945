"""Where the two ends of a cut should meet, and how fast they are thought to be."""

from __future__ import annotations

import random

import pytest

from forebay.workers.meeting import GAIN_S, GAIN_SHARE, GRACE_S, Outstanding, arrivals, meeting_point
from forebay.workers.rates import PREFILL_S_GUESS, TIERS_MAX, LoadRates, PrefillRate

SIZE = 256


def outstanding(seconds: list[float], asked: int = 0, elapsed: float = 0.0) -> Outstanding:
    starts = [SIZE * piece for piece in range(len(seconds))]
    return Outstanding(starts, seconds, asked, elapsed, SIZE * len(seconds))


def at(tokens_a_second: float):  # type: ignore[no-untyped-def]
    return lambda begin, end: max(0, end - begin) / tokens_a_second


def test_equally_fast_ends_meet_in_the_middle() -> None:
    assert meeting_point(0, outstanding([1.0] * 10), at(SIZE)) == 5 * SIZE


@pytest.mark.parametrize(("seconds", "meeting"), [(0.001, 0), (0.25, 2), (4.0, 8), (1000.0, 10)])
def test_the_faster_end_takes_more(seconds: float, meeting: int) -> None:
    assert meeting_point(0, outstanding([seconds] * 10), at(SIZE)) == meeting * SIZE


def test_the_meeting_point_is_the_best_one_or_not_worth_a_cut() -> None:
    """Against all other points, for any costs."""
    rng = random.Random(1)
    for _ in range(500):
        seconds = [rng.choice([0.0, rng.uniform(0, 2)]) for _ in range(rng.randrange(1, 20))]
        front, rate = rng.randrange(0, SIZE * len(seconds) + 1, 16), rng.uniform(50, 5000)
        told = outstanding(seconds)
        loads = arrivals(told)
        chosen = meeting_point(front, told, at(rate))
        assert chosen >= front
        points = [(start, load) for start, load in zip(told.starts, loads, strict=True) if start >= front]
        points.append((told.landed, 0.0))
        times = {point: max(load, at(rate)(front, point)) for point, load in points}
        best, ends = min(times.values()), min(times[points[0][0]], times[told.landed])
        assert times[chosen] <= best + max(GAIN_S, GAIN_SHARE * ends) + 1e-9
        assert times[chosen] <= ends + 1e-9, "never worse than loading all, or computing all"


def test_a_load_that_is_late_is_expected_to_take_as_long_again() -> None:
    assert arrivals(outstanding([1.0] * 4, asked=2, elapsed=0.5)) == [3.5, 2.5, 1.5, 1.5]
    assert arrivals(outstanding([1.0] * 4, asked=2, elapsed=6.0 + GRACE_S)) == [10.0, 7.0, 4.0, 4.0]
    assert arrivals(outstanding([1.0] * 4, asked=2, elapsed=2.0 + GRACE_S)) == [2.0, 1.0, 0.0, 0.0]


def test_who_waits_for_a_tier_that_hangs_computes_in_the_end() -> None:
    """In no more time than it would have taken to compute it all, beyond what was to be expected."""
    waited = 0.0
    while meeting_point(0, outstanding([0.05] * 10, asked=1, elapsed=waited), at(SIZE)) == 0:
        waited += 0.01
    assert waited < 2.0
    later = outstanding([0.05] * 10, asked=1, elapsed=100.0)
    assert meeting_point(0, later, at(SIZE)) == later.landed


def test_what_lies_before_the_next_piece_can_only_be_computed() -> None:
    assert meeting_point(SIZE + 16, outstanding([0.0] * 4), at(SIZE)) == 2 * SIZE


def test_nothing_is_known_of_prefill_before_the_first_step() -> None:
    assert PrefillRate().seconds(0, 1000) == pytest.approx(1000 * PREFILL_S_GUESS)


def test_the_prefill_rate_follows_position() -> None:
    rate = PrefillRate()
    for _ in range(3):
        for start in range(0, 4096, 512):
            rate.step(start, 512, 512 * (1e-3 + 1e-6 * (start + 256)))
    assert rate.seconds(0, 512) == pytest.approx(512 * (1e-3 + 1e-6 * 256), rel=0.02)
    assert rate.seconds(8192, 8704) == pytest.approx(512 * (1e-3 + 1e-6 * 8448), rel=0.02)


def test_a_worker_that_becomes_slower_is_noticed_within_some_steps() -> None:
    rate = PrefillRate()
    for seconds in [0.5] * 50 + [1.0] * 40:
        rate.step(0, 512, seconds)
    assert rate.seconds(0, 512) == pytest.approx(1.0, rel=0.05)


def test_no_position_costs_less_than_nothing() -> None:
    rate = PrefillRate()
    rate.step(0, 512, 0.01)
    rate.step(512, 512, 10.0)
    assert rate.seconds(0, 16) >= 0.0
    rate.step(0, 512, 100.0)
    assert rate.seconds(0, 512) > 0.0


def test_a_step_of_a_few_tokens_says_what_a_step_costs() -> None:
    rate = PrefillRate()
    for _ in range(60):
        rate.step(100, 1, 0.05)
    assert rate.samples == 0 and rate.step_s == pytest.approx(0.05)
    rate.step(0, 500, 0.55)
    assert rate.seconds(0, 500) == pytest.approx(0.55) and rate.seconds(0, 250) == pytest.approx(0.30)
    assert rate.seconds(7, 7) == 0.0


def test_a_step_more_is_not_taken_for_nothing() -> None:
    """A little loading would save less than the step that it takes to go on behind it."""
    told = outstanding([0.9] * 2)
    assert meeting_point(0, told, at(SIZE)) == SIZE
    assert meeting_point(0, told, at(SIZE), step_s=1.5) == 2 * SIZE


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_bandwidth_is_measured_while_something_is_loading_and_over_all_that_is() -> None:
    clock = Clock()
    rates = LoadRates(clock)
    assert rates.bandwidth("fs") is None and rates.idle("fs")
    rates.begin({"fs": 100})
    rates.begin({"fs": 300})
    for size in (100, 300):
        clock.now += 1.0
        assert not rates.idle("fs")
        rates.end({"fs": size}, arrived=True)
    clock.now += 50.0
    assert rates.bandwidth("fs") == pytest.approx(200, rel=0.3), "the pause doesn't count"
    assert rates.idle("fs")
    assert rates.values() == {"fs": rates.bandwidth("fs")}


def test_what_never_comes_makes_a_tier_slow() -> None:
    clock = Clock()
    rates = LoadRates(clock)
    for arrived in (True, False):
        rates.begin({"fs": 1000})
        clock.now += 1.0
        rates.end({"fs": 1000}, arrived=arrived)
    assert rates.bandwidth("fs") == pytest.approx(500 / 1.5)


def test_a_tier_that_has_become_faster_is_soon_taken_at_that() -> None:
    clock = Clock()
    rates = LoadRates(clock)
    for seconds in [10.0] * 5 + [0.1] * 8:
        rates.begin({"fs": 1000})
        clock.now += seconds
        rates.end({"fs": 1000}, arrived=True)
    assert rates.bandwidth("fs") == pytest.approx(10_000, rel=0.5)


def test_there_is_a_cap_on_tiers() -> None:
    rates = LoadRates(Clock())
    for number in range(TIERS_MAX + 10):
        rates.begin({f"t{number}": 1})
        rates.end({f"t{number}": 1}, arrived=True)
    assert len(rates.values()) == TIERS_MAX
    assert rates.bandwidth(f"t{TIERS_MAX + 1}") is None
