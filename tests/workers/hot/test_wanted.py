"""What is asked for of rows that a request waits for, and when again."""

from __future__ import annotations

import os
import random

import pytest

from forebay.workers.hot.wanted import GONE_TIMES, PAUSE_MAX_S, PAUSE_S, Wanted

SEEDS = int(os.environ.get("FOREBAY_HOT_SEEDS", "150")) // 5
NOBODY: tuple[int, ...] = ()


def test_what_did_not_come_is_asked_for_after_pauses_that_grow() -> None:
    wanted, now, pauses = Wanted([3], 8, apart=False), 0.0, []
    for _ in range(8):
        assert wanted.take(now) == [3] and wanted.take(now) == []
        assert wanted.ended([3], NOBODY, now) == []
        due = wanted.next_at(now)
        assert due is not None and wanted.take(due - 0.001) == []
        pauses.append(due - now)
        now = due
    assert pauses[:3] == pytest.approx([PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]) and pauses[-1] == pytest.approx(PAUSE_MAX_S)
    wanted.came(wanted.take(now))
    assert wanted.over and wanted.next_at(now) is None


def test_one_that_does_not_come_lets_those_behind_it_pass() -> None:
    wanted = Wanted(range(6), 6, apart=False)
    assert wanted.take(0.0) == [0, 1, 2, 3, 4, 5]
    wanted.came([0, 1])
    assert wanted.ended([0, 1, 2, 3, 4, 5], NOBODY, 0.0) == []
    assert wanted.take(0.0) == [3, 4, 5], "it ended at 2"
    wanted.came([3, 4, 5])
    assert wanted.ended([3, 4, 5], NOBODY, 0.0) == [] and wanted.take(PAUSE_S) == [2]


def test_where_nothing_comes_what_stood_first_goes_last() -> None:
    wanted = Wanted(range(3), 3, apart=False)
    assert wanted.take(0.0) == [0, 1, 2]
    wanted.ended([0, 1, 2], NOBODY, 0.0)
    assert wanted.take(0.0) == [] and wanted.take(PAUSE_S) == [1, 2, 0]


def test_what_nobody_has_is_lost_when_that_has_been_said_again() -> None:
    wanted, now = Wanted(range(4), 16, apart=False), 0.0
    for _ in range(GONE_TIMES - 1):
        assert 1 in wanted.take(now) and wanted.ended([1], [1], now) == []
        now += PAUSE_MAX_S
    assert wanted.take(now)[-1] == 1 and wanted.ended([1], NOBODY, now) == [], "somebody may have it after all"
    lost: list[int] = []
    for _ in range(GONE_TIMES):
        now += PAUSE_MAX_S
        assert not lost and 1 in wanted.take(now)
        lost = wanted.ended([1], [1], now)
    assert lost == [1] and wanted.take(now + 1) == [] and not wanted.over, "the others are under way"
    wanted.came([0, 2, 3])
    assert wanted.over


def test_what_is_gone_holds_up_nothing_behind_it() -> None:
    wanted = Wanted(range(3), 3, apart=False)
    wanted.take(0.0)
    assert wanted.ended([0, 1, 2], [0], 0.0) == [] and wanted.take(0.0) == [1, 2]


def test_one_that_hangs_leaves_room_for_other_messages() -> None:
    wanted = Wanted(range(200), 64, apart=False)
    first = wanted.take(0.0)
    assert first == list(range(64)) and wanted.take(0.0) == []
    wanted.came(first[1:32])
    assert wanted.take(0.0) == [], "not many small ones"
    wanted.came(first[1:])
    assert wanted.take(0.0) == list(range(64, 127))


def test_apart_each_has_a_message_of_its_own() -> None:
    wanted = Wanted(range(5), 3, apart=True)
    assert [wanted.take(0.0) for _ in range(4)] == [[0], [1], [2], []]
    wanted.came([1])
    assert wanted.take(0.0) == [3] and wanted.under_way(0) and not wanted.under_way(1)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_everything_comes_or_is_lost_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    count, apart = rng.randrange(1, 200), rng.random() < 0.5
    gone = {position for position in range(count) if rng.random() < 0.1}
    wanted, now = Wanted(range(count), rng.choice([1, 4, 64]), apart=apart), 0.0
    running: list[list[int]] = []
    came, lost = set[int](), set[int]()
    for _ in range(20_000):
        if wanted.over:
            break
        while message := wanted.take(now):
            assert all(map(wanted.under_way, message)) and (len(message) == 1 or not apart)
            running.append(message)
        assert running or wanted.next_at(now) is not None, "somebody is waited for"
        if not running:
            now = wanted.next_at(now) or now
            continue
        message = running.pop(rng.randrange(len(running)))
        for position in message:
            if position in gone or rng.random() < 0.2:
                break  # those behind it aren't brought
            wanted.came([position])
            came.add(position)
        lost |= set(wanted.ended(message, gone & set(message), now))
    assert wanted.over and lost == gone and came == set(range(count)) - gone and not running
