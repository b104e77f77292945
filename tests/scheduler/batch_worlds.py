"""Worlds for the batch scheduler, each drawn from one seed: arrivals, sizes, loads, failures, cancellations."""

from __future__ import annotations

import random
from collections.abc import Sequence

from forebay.scheduler.plan import Limits
from forebay.workers.prefix import GroupShape
from tests.scheduler.simulation import Arrival, Worker, geometry

TURNS_MAX = 6000
WINDOWS: Sequence[Sequence[int | None]] = ([None], [None, 20], [None, 64], [None, 16, 48], [33])

World = tuple[Worker, list[Arrival]]


def arrival(chance: random.Random, prompts: int, outputs: int) -> Arrival:
    """One request. Prompts are cut from two texts, so that they share prefixes of all lengths."""
    text = [chance.randrange(2)] * prompts
    return Arrival(
        turn=chance.randint(0, 40),
        prompt=text[: chance.randint(1, prompts)],
        output=chance.randint(1, outputs),
        priority=chance.choice([0, 0, 0, 1, 5, -2]),
        cancel_after=chance.choice([None, None, None, chance.randint(0, 60)]),
        fresh=chance.random() < 0.1,
    )


def world(seed: int) -> World:
    """Any world: a device of the size that one request needs, or of ten, with or without a store."""
    chance = random.Random(f"world {seed}")
    running = chance.randint(1, 8)
    prompts, outputs = chance.choice([(160, 20), (300, 4), (20, 120), (90, 90)])
    arrivals = [arrival(chance, prompts, outputs) for _ in range(chance.randint(1, 24))]
    return _worker(chance, running, arrivals, slack=chance.choice([0, 2, 5, 10, 40])), arrivals


def crowd(seed: int) -> World:
    """A crowded world: many requests that grow, on a device that holds a few of them."""
    chance = random.Random(f"crowd {seed}")
    prompts, outputs = chance.choice([(200, 30), (40, 120), (90, 90)])
    arrivals = [arrival(chance, prompts, outputs) for _ in range(30)]
    worker = _worker(chance, chance.choice([4, 8]), arrivals, slack=chance.choice([0, 4, 12]))
    worker.holdings.ask_store = True
    worker.push_turns = chance.choice([0, 3, 20])
    return worker, arrivals


def halves(seed: int) -> World:
    """A world of prompts that nobody has computed before and somebody has stored: each is loaded from its back while it
    is computed from its front."""
    chance = random.Random(f"halves {seed}")
    prompts, outputs = chance.choice([(300, 20), (160, 120), (90, 160)])
    arrivals = [arrival(chance, prompts, outputs) for _ in range(chance.randint(2, 16))]
    for number, one in enumerate(arrivals):
        one.prompt = [number % 5] * min(len(one.prompt), chance.choice([16, 48])) + one.prompt
        one.fresh = False
    worker = _worker(chance, chance.choice([1, 3, 8]), arrivals, slack=chance.choice([0, 4, 40]))
    worker.holdings.ask_store = True
    worker.cuts.share, worker.cuts.holes = 1.0, chance.choice([0.0, 0.02, 0.2])
    worker.cuts.pace = chance.choice([0.5, 0.05])
    return worker, arrivals


def _worker(chance: random.Random, running: int, arrivals: list[Arrival], slack: int) -> Worker:
    chunk = chance.choice([16, 32, 64])
    limits = Limits(
        batch_tokens=chance.randint(max(running, 8), 96), running=running, waiting=64,
        prefill_tokens=chance.choice([0, 0, 5, 40]), fresh_tokens=chance.choice([3, 64]),
        ageing_s=chance.choice([0.0, 3.0, 30.0, 1000.0]),
    )  # fmt: skip
    windows = chance.choice(WINDOWS)
    shapes = [GroupShape(geometry(f"g{i}", w), chunk, limits.batch_tokens) for i, w in enumerate(windows)]
    longest = max(len(a.prompt) + a.output for a in arrivals)
    return Worker(
        shapes, [shape.footprint(longest) + slack for shape in shapes], limits, chance, chunk,
        load_turns=chance.choice([1, 3, 8, 60]), load_fails=chance.choice([0.0, 0.3, 1.0]),
        push_turns=chance.randint(0, 6), store=chance.random() < 0.7,
        cut_share=chance.choice([0.0, 0.5, 1.0]), cut_holes=chance.choice([0.0, 0.1, 0.5]),
    )  # fmt: skip


def play(worker: Worker, arrivals: list[Arrival]) -> None:
    """Play all arrivals until everyone is done. Fails when nothing can happen any more, or for too long."""
    pending = dict(enumerate(arrivals))
    leaving = {key: a.turn + a.cancel_after for key, a in pending.items() if a.cancel_after is not None}
    while len(worker.done) < len(arrivals) or worker.under_way:
        for key in [key for key, a in pending.items() if a.turn <= worker.turn]:
            worker.submit(key, pending.pop(key))
        for key in [key for key, turn in leaving.items() if turn <= worker.turn and key not in pending]:
            del leaving[key]
            worker.cancel(key)
        worker.step()
        worker.check_books()
        news = worker.awake or pending or leaving or worker.under_way
        assert news or len(worker.done) == len(arrivals), "deadlock: everybody waits, and nothing will happen"
        assert worker.turn < TURNS_MAX, "somebody starves"
    assert all(why == "finished" for key, why in worker.done.items() if arrivals[key].cancel_after is None)
    worker.check_empty()
