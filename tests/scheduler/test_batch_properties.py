"""The four invariants of the batch scheduler over drawn worlds. What is checked in every turn is in `simulation.py`.

At length: `python -m tests.scheduler.batch_campaign --seeds 20000`.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from forebay.scheduler.plan import Limits
from forebay.workers.prefix import GroupShape
from tests.scheduler.batch_worlds import crowd, halves, play, world
from tests.scheduler.simulation import Arrival, Worker, geometry


@pytest.mark.parametrize("first", range(0, 150, 15))
def test_everyone_finishes_reads_only_right_blocks_and_leaks_none(first: int) -> None:
    for seed in range(first, first + 15):
        play(*world(seed))


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_a_crowd_on_a_small_device_gets_through(first: int) -> None:
    for seed in range(first, first + 10):
        play(*crowd(seed))


def test_the_crowd_meets_preemptions_failures_cancellations_and_draining_blocks() -> None:
    """Guards the tests above against worlds in which nothing happens."""
    workers = []
    for seed in range(30):
        worker, arrivals = crowd(seed)
        play(worker, arrivals)
        workers.append(worker)
    assert sum(w.preempted for w in workers) > 20
    assert sum(w.gained for w in workers) > 50
    assert sum(w.failed for w in workers) > 30
    assert sum(w.cancelled for w in workers) > 50
    assert sum(w.drained for w in workers) > 5
    assert sum(w.slept for w in workers) > 50
    assert sum(len(w.pushed) for w in workers) > 500


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_prefixes_that_are_computed_and_loaded_from_both_ends_are_whole(first: int) -> None:
    for seed in range(first, first + 100):
        play(*halves(seed))


def test_those_ends_meet_wait_for_each_other_and_break_off() -> None:
    workers = []
    for seed in range(100):
        worker, arrivals = halves(seed)
        play(worker, arrivals)
        workers.append(worker)
    assert sum(w.cuts.met for w in workers) > 40, "computed from the front and loaded from the back"
    assert sum(w.cuts.woken for w in workers) > 100, "waited for a load, and then not any more"
    assert sum(w.cuts.broken for w in workers) > 50, "a load that did not bring all"
    assert sum(w.cancelled for w in workers) > 50


def busy_worker(ageing_s: float) -> Worker:
    """A worker that two requests fill."""
    limits = Limits(batch_tokens=32, running=2, waiting=4096, ageing_s=ageing_s)
    shapes = [GroupShape(geometry("g0"), 32, limits.batch_tokens)]
    return Worker(shapes, [40], limits, random.Random(1), 32, store=False)


def turns_until_served(ageing_s: float, priority: int, turns: int = 600) -> int | None:
    """More urgent requests come than can be served, without end; when is the one that came at turn 50 done?"""
    worker = busy_worker(ageing_s)
    for turn in range(turns):
        worker.submit(f"urgent {turn}", Arrival(0, [turn % 2] * 16, 4))
        if turn == 50:
            worker.submit("patient", Arrival(0, [1] * 16, 4, priority=priority))
        worker.step()
        if worker.done.get("patient"):
            return turn - 50
    return None


def test_who_waits_grows_urgent_and_is_served_though_more_urgent_ones_keep_coming() -> None:
    soon, later = turns_until_served(ageing_s=10.0, priority=3), turns_until_served(ageing_s=10.0, priority=9)
    assert soon is not None and later is not None
    assert soon < later, "a higher priority is worth something"
    assert turns_until_served(ageing_s=10_000.0, priority=3) is None, "without ageing it would starve"


def test_of_two_in_the_queue_the_later_comes_first_only_within_its_head_start() -> None:
    worker = busy_worker(ageing_s=10.0)
    for key in ("first", "second"):
        worker.submit(key, Arrival(0, [1] * 40, 60))
    order: deque[object] = deque()
    for turn in range(1500):
        if turn == 5:
            worker.submit("calm", Arrival(0, [1] * 8, 1, priority=2))
        if turn in (24, 26):
            worker.submit(f"urgent {turn}", Arrival(0, [0] * 8, 1))
        worker.step()
        order.extend(key for key in worker.done if key not in order)
    names = [key for key in order if key not in ("first", "second")]
    assert names == ["urgent 24", "calm", "urgent 26"], "two steps of ten turns each"


class Unscanned(deque[object]):
    """Stands for a queue that nobody may go through."""

    def __iter__(self) -> None:  # type: ignore[override]
        raise AssertionError("the queue was scanned")


def test_a_load_that_ends_costs_the_same_however_many_others_load_or_wait() -> None:
    """I3, as what is touched: neither the queue nor the other loads are looked through."""
    worker = busy_worker(ageing_s=10.0)
    worker.holdings.ask_store = True
    worker.load_turns = 10**6
    for number in range(50):
        worker.submit(number, Arrival(0, [number % 2, number % 3, number % 5] * 8, 4))
    worker.step()
    assert worker.scheduler.loading == 2 and worker.scheduler.waiting == 48
    worker.loads = [(0, worker.loads[0][1]), worker.loads[1]]
    scheduler = worker.scheduler
    ranked, scheduler._waiting._ranked = scheduler._waiting._ranked, Unscanned()  # type: ignore[assignment]
    key = worker.loads[0][1].request
    assert scheduler.load_ended(key) is not None
    scheduler._waiting._ranked = ranked
    assert scheduler.plan().started[0].key == key
