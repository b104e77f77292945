"""What counts as progress of the engine's thread, and what doesn't."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from forebay.workers.pulse import STOOD_STILL_S, Pulse

BEAT_S = 0.25


@dataclass
class Thread:
    """A thread's clocks, moved by hand."""

    now: float = 100.0
    used: float = 0.0

    def pulse(self) -> Pulse:
        return Pulse(lambda: self.now, lambda: self.used)

    def looks(self, pulse: Pulse, times: int, *, waiting: int = 0, used_each: float = 0.0) -> float:
        """Look so many times in the usual interval; the last answer."""
        stalled = 0.0
        for _ in range(times):
            self.now += BEAT_S
            self.used += used_each
            stalled = pulse.stalled_s(waiting)
        return stalled


@pytest.fixture
def thread() -> Thread:
    return Thread()


def test_a_thread_that_rests_with_nothing_to_do_is_never_stalled(thread: Thread) -> None:
    pulse = thread.pulse()
    pulse.turn()
    pulse.rest()
    assert thread.looks(pulse, 100) == 0


def test_a_long_step_is_no_stall_as_long_as_it_computes(thread: Thread) -> None:
    pulse = thread.pulse()
    pulse.turn()
    assert thread.looks(pulse, 100, used_each=0.01) == 0


def test_turns_are_progress_though_they_use_next_to_no_time(thread: Thread) -> None:
    pulse = thread.pulse()
    for _ in range(20):
        pulse.turn()
        assert thread.looks(pulse, 1) == 0


def test_a_step_that_waits_for_something_is_a_stall_of_just_that_length(thread: Thread) -> None:
    pulse = thread.pulse()
    pulse.turn()
    thread.looks(pulse, 1, used_each=0.1)
    assert thread.looks(pulse, 8) == 8 * BEAT_S
    assert thread.looks(pulse, 1, used_each=0.1) == 0, "and over as soon as it goes on"


def test_a_few_microseconds_are_no_progress(thread: Thread) -> None:
    pulse = thread.pulse()
    pulse.turn()
    thread.looks(pulse, 1, used_each=0.1)
    assert thread.looks(pulse, 8, used_each=0.00001) == 8 * BEAT_S


def test_messages_that_nobody_takes_are_a_stall_of_a_resting_thread(thread: Thread) -> None:
    pulse = thread.pulse()
    pulse.rest()
    thread.looks(pulse, 1)
    assert thread.looks(pulse, 8, waiting=1) == 8 * BEAT_S


def test_who_stood_still_itself_says_nothing_of_others(thread: Thread) -> None:
    pulse = thread.pulse()
    pulse.turn()
    thread.looks(pulse, 2)
    thread.now += STOOD_STILL_S + 30
    assert pulse.stalled_s(0) == 0
    assert thread.looks(pulse, 4) == 4 * BEAT_S


def test_the_real_clock_is_the_calling_threads() -> None:
    now = [0.0]
    pulse = Pulse(lambda: now[0])
    pulse.begin()
    pulse.turn()
    pulse.stalled_s(0)
    now[0] += 0.5
    assert sum(range(2_000_000)) > 0  # some tens of milliseconds of this thread's time
    assert pulse.stalled_s(0) == 0
