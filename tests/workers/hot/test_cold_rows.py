"""What of a cold prefix is asked for, once, in which order, and what makes room for it."""

from __future__ import annotations

import os
import random

import pytest

from forebay.kvstore.identity import KEY_BYTES
from forebay.workers.hot.cold import ColdRows
from forebay.workers.hot.recent import AHEAD_MAX, REMEMBERED_MAX, Recent
from forebay.workers.moves import Pull

SEEDS = int(os.environ.get("FOREBAY_HOT_SEEDS", "150")) // 5
PULL = Pull("r", b"", b"", b"", 0, 0, ())


def rows(count: int, most: int | None = None) -> ColdRows:
    return ColdRows(PULL, 0, set(range(count)), most)


def test_what_a_step_lacks_is_asked_for_once_and_waited_for() -> None:
    cold = rows(8)
    cold.lack({5, 2}, [1, 2, 5])
    assert cold.parked and cold.ask() == [2, 5] and cold.ask() == []
    cold.came(2)
    assert cold.parked and cold.cold == {0, 1, 3, 4, 6, 7, 5}
    cold.came(5)
    assert not cold.parked and cold.ended([2, 5], cold.asks) == [] and list(cold.here) == [2, 5]


def test_what_does_not_come_is_told() -> None:
    cold = rows(8)
    cold.lack({1, 3}, [1, 3])
    asked = cold.ask(ahead=[6])
    assert asked == [1, 3, 6]
    cold.came(3)
    assert cold.ended(asked, cold.asks) == [1]


def test_what_came_and_was_let_go_of_is_asked_for_anew_while_the_rest_is_still_on_its_way() -> None:
    cold = rows(8, most=3)
    first, number = cold.ask(ahead=[0, 1]), cold.asks
    cold.came(0)
    cold.lack({2, 3}, [2, 3])
    assert cold.surplus() == [0]
    cold.leave(0)
    for position in cold.ask():
        cold.came(position)
    cold.read([2, 3])
    cold.lack({0}, [0, 2])
    assert cold.ask() == [0], "what is still on its way is 1"
    assert cold.ended(first, number) == [] and cold.waits == {0}, "it comes by the later ask, or doesn't"
    assert cold.ended([0], cold.asks) == [0]


def test_what_has_come_counts_once_whatever_else_is_on_its_way() -> None:
    cold = rows(8, most=4)
    assert cold.ask(ahead=[0, 1]) == [0, 1]
    cold.came(0)
    cold.lack({2, 3}, [0, 2, 3])
    cold.read([0])
    cold.lack({2, 3}, [2, 3])
    assert cold.surplus() == [], "0, what is on its way, and what is waited for are four"


def test_what_may_be_wanted_waits_for_nobody_and_takes_only_room_that_is_left() -> None:
    cold = rows(8, most=3)
    cold.lack({0, 1}, [0, 1])
    assert cold.ask(ahead=[7, 6, 5]) == [0, 1, 7]
    for position in (0, 1):
        cold.came(position)
    assert not cold.parked
    cold.lack({7}, [7])
    assert cold.ask() == [] and cold.parked, "it is on its way"


def test_what_is_on_its_way_already_when_it_is_waited_for_has_as_much_time_as_anything_else() -> None:
    cold = rows(8)
    ahead, number = cold.ask(ahead=[6, 7]), cold.asks
    cold.lack({6, 1}, [1, 6])
    assert cold.ask() == [1] and cold.ended(ahead, number) == [] and cold.parked
    assert cold.ask() == [6] and cold.ended([6], cold.asks) == [6]
    assert cold.ask(ahead=[7]) == [6, 7], "neither is on its way"


def test_what_was_read_least_recently_makes_room_and_nothing_that_is_needed() -> None:
    cold = rows(8, most=3)
    for position in (0, 1, 2):
        cold.came(position)
    cold.read([0])
    cold.lack({5}, [2, 5])
    assert cold.surplus() == [1]
    cold.leave(1)
    cold.lack({5, 6, 7}, [2, 5, 6, 7])
    assert cold.surplus() == [0], "2 is named as well"
    assert 1 in cold.cold


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order_of_events_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 12)
    cold, under_way = rows(count, rng.choice([None, 1, 3])), dict[int, tuple[list[int], list[int]]]()
    for _ in range(100):
        deed = rng.randrange(4)
        named = rng.sample(range(count), rng.randrange(1, count + 1))
        if deed == 0 and not cold.parked:
            missing = cold.cold & set(named)
            (cold.lack(missing, named) if missing else cold.read(named))
        elif deed == 1:
            for position in cold.surplus():
                assert position not in cold._needed
                cold.leave(position)
            asked = cold.ask(rng.sample(range(count), rng.randrange(count + 1)))
            assert not {p for _, left in under_way.values() for p in left} & set(asked)
            assert cold.cold.issuperset(asked)
            under_way |= {cold.asks: (asked, list(asked))} if asked else {}
            assert cold.waits <= cold.asked.keys(), "whatever is waited for is on its way"
            if cold.most is not None:
                assert len(cold.here) + len(cold.asked) <= max(cold.most, len(cold._needed | cold.asked.keys()))
        elif under_way:
            number = rng.choice(list(under_way))
            asked, left = under_way[number]
            for position in [position for position in left if rng.random() < 0.7]:
                left.remove(position)
                cold.came(position)
            if deed == 3:
                del under_way[number]
                late = cold.ended(asked, number)
                assert set(late) <= set(left) and set(late) <= cold.waits
        assert cold.cold.isdisjoint(cold.here) and cold.cold | set(cold.here) == set(range(count))
        assert cold.waits <= cold.cold and cold.asked.keys() == {p for _, left in under_way.values() for p in left}


def keys(count: int, salt: int = 0) -> bytes:
    return b"".join((salt << 32 | number).to_bytes(KEY_BYTES, "big") for number in range(count))


def test_what_was_read_last_is_known_by_its_key_alone() -> None:
    recent = Recent()
    recent.note(keys(9), [3, 8, 9, 1])
    assert recent.among(keys(9), {1, 2, 3, 4}) == [1, 3] and len(recent) == 3
    recent.note(keys(9), [3])
    assert recent.among(keys(9), {1, 2, 3, 4}) == [3, 1], "the latest first"
    assert recent.among(keys(9, salt=1), {1, 2, 3}) == []


def test_it_remembers_no_more_than_its_cap_and_forgets_what_is_oldest() -> None:
    recent = Recent()
    for salt in range(REMEMBERED_MAX // AHEAD_MAX + 1):
        recent.note(keys(AHEAD_MAX + 5, salt), range(AHEAD_MAX + 5))
    assert len(recent) == REMEMBERED_MAX
    everything = set(range(AHEAD_MAX + 5))
    assert recent.among(keys(AHEAD_MAX + 5), everything) == []
    assert recent.among(keys(AHEAD_MAX + 5, 1), everything) == list(range(AHEAD_MAX + 4, 4, -1))


def test_of_a_long_prompt_it_names_what_was_read_last_wherever_that_is() -> None:
    recent, prompt = Recent(), keys(3 * AHEAD_MAX)
    for first in (2 * AHEAD_MAX, AHEAD_MAX, 0):
        recent.note(prompt, range(first, first + AHEAD_MAX))
    recent.note(prompt, [3 * AHEAD_MAX - 1])
    latest = [3 * AHEAD_MAX - 1, *range(AHEAD_MAX - 1, 0, -1)]
    assert recent.among(prompt, range(3 * AHEAD_MAX)) == latest
