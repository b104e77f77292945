"""The invariants of the batch scheduler over random worlds: arrivals, sizes, loads, failures, cancellations."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.scheduler.plan import Limits
from forebay.workers.prefix import GroupShape
from tests.scheduler.simulation import Arrival, Worker, geometry

TURNS_MAX = 4000


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Worker, list[Arrival]]:
    chunk = draw(st.sampled_from([16, 32, 64]))
    running = draw(st.integers(1, 5))
    limits = Limits(batch_tokens=draw(st.integers(max(running, 8), 96)), running=running, waiting=64)
    windows = draw(st.sampled_from([[None], [None, 20], [None, 64], [None, 16, 48], [33]]))
    shapes = [GroupShape(geometry(f"g{i}", w), chunk, limits.batch_tokens) for i, w in enumerate(windows)]
    chance = random.Random(draw(st.integers(0, 2**32)))
    prompts, outputs = draw(st.sampled_from([(160, 20), (300, 4), (20, 120)]))
    arrivals = [_arrival(chance, prompts, outputs) for _ in range(draw(st.integers(1, 14)))]
    longest = max(len(a.prompt) + a.output for a in arrivals)
    slack = draw(st.sampled_from([0, 2, 5, 10, 40]))
    blocks = [shape.footprint(longest) + slack for shape in shapes]
    worker = Worker(
        shapes, blocks, limits, chance, chunk,
        load_turns=draw(st.integers(1, 8)),
        load_fails=draw(st.sampled_from([0.0, 0.3, 1.0])),
        push_turns=draw(st.integers(0, 6)),
        store=draw(st.booleans()),
    )  # fmt: skip
    return worker, arrivals


def _arrival(chance: random.Random, prompts: int, outputs: int) -> Arrival:
    # Prompts are cut from two texts, so that they share prefixes of all lengths.
    text = [chance.randrange(2)] * prompts
    return Arrival(
        turn=chance.randint(0, 40),
        prompt=text[: chance.randint(1, prompts)],
        output=chance.randint(1, outputs),
        priority=chance.choice([0, 0, 0, 1]),
        cancel_after=chance.choice([None, None, None, chance.randint(0, 60)]),
    )


def run(worker: Worker, arrivals: list[Arrival]) -> None:
    """Play all arrivals until everyone is done; fails when that takes too long."""
    pending = dict(enumerate(arrivals))
    leaving = {key: a.turn + a.cancel_after for key, a in pending.items() if a.cancel_after is not None}
    while len(worker.done) < len(arrivals) or worker.loads or worker.pushes:
        for key in [key for key, a in pending.items() if a.turn <= worker.turn]:
            worker.submit(key, pending.pop(key))
        for key in [key for key, turn in leaving.items() if turn <= worker.turn and key not in pending]:
            del leaving[key]
            worker.cancel(key)
        worker.step()
        worker.check_books()
        assert worker.turn < TURNS_MAX, "deadlock or starvation"
    assert all(why == "finished" for key, why in worker.done.items() if arrivals[key].cancel_after is None)
    worker.check_empty()


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_everyone_finishes_reads_only_right_blocks_and_leaks_none(
    world: tuple[Worker, list[Arrival]],
) -> None:
    worker, arrivals = world
    run(worker, arrivals)


def crowd(seed: int) -> tuple[Worker, list[Arrival]]:
    """A crowded world: many requests that grow, on a device that holds a few of them."""
    chance = random.Random(seed)
    chunk = chance.choice([16, 32, 64])
    limits = Limits(batch_tokens=chance.choice([16, 32, 96]), running=chance.choice([4, 8]), waiting=64)
    windows = chance.choice([[None], [None, 20], [None, 64], [None, 16, 48], [33]])
    shapes = [GroupShape(geometry(f"g{i}", w), chunk, limits.batch_tokens) for i, w in enumerate(windows)]
    prompts, outputs = chance.choice([(200, 30), (40, 120), (90, 90)])
    arrivals = [_arrival(chance, prompts, outputs) for _ in range(30)]
    longest = max(len(a.prompt) + a.output for a in arrivals)
    blocks = [shape.footprint(longest) + chance.choice([0, 4, 12]) for shape in shapes]
    return Worker(shapes, blocks, limits, chance, chunk, push_turns=chance.choice([0, 3, 20])), arrivals


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_crowd_on_a_small_device_gets_through(seed: int) -> None:
    run(*crowd(seed))


def test_the_crowd_meets_preemptions_loads_and_draining_blocks() -> None:
    """Guards the two tests above against worlds in which nothing happens."""
    workers = []
    for seed in range(30):
        worker, arrivals = crowd(seed)
        run(worker, arrivals)
        workers.append(worker)
    assert sum(w.preempted for w in workers) > 20
    assert sum(w.gained for w in workers) > 50
    assert sum(w.drained for w in workers) > 5
    assert sum(len(w.pushed) for w in workers) > 500
