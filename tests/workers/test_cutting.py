"""A prefix that is computed from its front while a tier brings it from its back: real engine, transfer and blocks
around a fake model, whose answers depend on every KV entry, and a store whose tier is as fast as a test wants."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.workers.cutting import ABANDONED_MAX
from tests.workers.fake_model import VOCAB
from tests.workers.fake_store import FakeStore
from tests.workers.fake_tier import TIER
from tests.workers.harness import CHUNK, Harness, wait_until, worker

LENGTH = 10 * CHUNK + 5
PREFIX = 10 * CHUNK


def text(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB - 1) for _ in range(length)]


@contextmanager
def cold_worker(store: FakeStore, prompt: list[int], **settings: object) -> Iterator[tuple[Harness, list[int]]]:
    """A worker whose store has the prompt in its tier alone, and the answer that it was given when it was new."""
    with worker(store, **settings) as first:
        answer = first.ask(prompt, 6).tokens
        first.settle()
    store.tier.take_all()
    with worker(store, **settings) as second:
        yield second, answer


def slow_compute(harness: Harness, seconds_a_token: float) -> None:
    """Let the worker believe that it computes this slowly."""
    for start in (0, 512):
        for _ in range(50):
            harness.parts.transfer.rates.prefill.step(start, 512, 512 * seconds_a_token)  # type: ignore[union-attr]


def figures(harness: Harness) -> tuple[float, float]:
    """Tokens loaded, and tokens computed although they were stored."""
    return harness.stat("tokens.loaded"), harness.stat("tokens.computed_though_stored")


def complete_from_the_end(store: FakeStore, window: int | None) -> int:
    """How many chunk positions the tier has brought in all groups that need them, the last one first."""
    for count, start in enumerate(range(PREFIX - CHUNK, -1, -CHUNK)):
        groups = (0, 1) if window is not None and start >= PREFIX - 2 * CHUNK else (0,)
        if any((group, start) not in store.tier.brought for group in groups):
            return count
    return PREFIX // CHUNK


@pytest.mark.parametrize("window", [40, None])
def test_what_a_fast_tier_has_is_loaded_all_of_it(window: int | None) -> None:
    store, prompt = FakeStore(), text(1)
    with cold_worker(store, prompt, window=window) as (harness, answer):
        slow_compute(harness, 0.01)
        got = harness.ask(prompt, 6)
        assert got.tokens == answer
        assert got.started is not None and got.started.cached == {TIER: PREFIX}
        assert figures(harness) == (PREFIX, 0)


@pytest.mark.parametrize("window", [40, None])
@pytest.mark.parametrize("allowed", [1, 2, 3, 5, 8])
def test_a_tier_that_stalls_midway_leaves_the_rest_to_be_computed(window: int | None, allowed: int) -> None:
    """What was brought before is used, to the chunk; the answer is the same."""
    store, prompt = FakeStore(), text(2)
    with cold_worker(store, prompt, window=window) as (harness, answer):
        slow_compute(harness, 0.002)
        store.tier.allowed = allowed
        got = harness.ask(prompt, 6)
        assert got.tokens == answer
        loaded, recomputed = figures(harness)
        assert loaded + recomputed == PREFIX
        assert loaded == CHUNK * complete_from_the_end(store, window)
        assert got.cached == loaded and got.started is not None
        assert got.started.cached == ({TIER: loaded} if loaded else {})


def test_a_tier_that_has_nothing_of_what_it_said_costs_the_wait_alone() -> None:
    store, prompt = FakeStore(), text(3)
    with cold_worker(store, prompt) as (harness, answer):
        store.tier.gone = lambda stored: True
        got = harness.ask(prompt, 6)
        assert got.tokens == answer and got.cached == 0
        assert figures(harness) == (0, PREFIX)
        assert harness.stat("cut.holes") >= 1


def test_a_hole_in_the_middle_is_computed_and_what_lies_behind_it_is_used() -> None:
    store, prompt = FakeStore(), text(4)
    with cold_worker(store, prompt) as (harness, answer):
        slow_compute(harness, 0.01)
        store.tier.gone = lambda stored: stored.chunk.start == 4 * CHUNK
        got = harness.ask(prompt, 6)
        assert got.tokens == answer
        assert figures(harness) == (5 * CHUNK, 5 * CHUNK)


def test_a_damaged_chunk_is_reported_and_computed() -> None:
    store, prompt = FakeStore(), text(5)
    with cold_worker(store, prompt) as (harness, answer):
        slow_compute(harness, 0.01)
        (bad,) = [s for s in store.tier.chunks.values() if s.chunk.group == 0 and s.chunk.start == 6 * CHUNK]
        bad.payload[7] ^= 1
        got = harness.ask(prompt, 6)
        assert got.tokens == answer
        assert figures(harness) == (3 * CHUNK, 7 * CHUNK)
        assert store.reported == [(0, bad.chunk.key)]


def test_both_ends_work_at_once_and_meet() -> None:
    """A tier about as fast as the worker: a part is computed, a part is loaded, and together they are the prefix."""
    store, prompt = FakeStore(), text(6, 600)
    with cold_worker(store, prompt) as (harness, answer):
        store.tier.seconds = 0.02
        got = harness.ask(prompt, 6)
        assert got.tokens == answer
        loaded, recomputed = figures(harness)
        whole = (len(prompt) - 1) // 16 * 16
        assert loaded + recomputed == whole and got.cached == loaded
        assert harness.stat("cut.joined") == 1


def test_what_host_memory_has_comes_first_and_the_cut_begins_behind_it() -> None:
    store, prompt = FakeStore(), text(7)
    with cold_worker(store, prompt) as (harness, answer):
        for name, stored in list(store.tier.chunks.items()):
            if stored.chunk.start < 4 * CHUNK:
                store.chunks[name] = store.tier.chunks.pop(name)
        store.tier.gone = lambda stored: True
        got = harness.ask(prompt, 6)
        assert got.tokens == answer
        assert got.started is not None and got.started.cached == {"host": 4 * CHUNK}
        assert figures(harness) == (4 * CHUNK, 6 * CHUNK)


def test_a_prefix_on_the_device_is_not_asked_for_again() -> None:
    store, prompt = FakeStore(), text(8)
    with cold_worker(store, prompt) as (harness, answer):
        slow_compute(harness, 0.01)
        harness.ask(prompt[: 3 * CHUNK + 1], 1)
        store.tier.brought.clear()
        got = harness.ask(prompt, 6)
        assert got.tokens == answer
        assert got.started is not None and got.started.cached == {"device": 3 * CHUNK, TIER: 7 * CHUNK}
        assert min(start for _, start in store.tier.brought) == 3 * CHUNK


def test_a_request_cancelled_while_it_is_loaded_lets_go_of_everything() -> None:
    store, prompt = FakeStore(), text(9)
    with cold_worker(store, prompt) as (harness, answer):
        slow_compute(harness, 10.0)
        store.tier.allowed = 2
        key = harness.submit(prompt, 6)
        wait_until("the load has begun", lambda: len(store.tier.brought) == 2)
        harness.cancel(key)
        finished = harness.wait(key).finished
        assert finished is not None and finished.reason == "cancelled"
        store.tier.allowed = None
        wait_until("the cut is over", lambda: harness.stat("cut.open") == 0 and harness.stat("requests.loading") == 0)
        assert harness.ask(prompt, 6).tokens == answer


def test_others_are_served_while_one_waits_for_its_load() -> None:
    store, prompt = FakeStore(), text(10)
    with cold_worker(store, prompt) as (harness, answer):
        slow_compute(harness, 10.0)
        store.tier.allowed = 0
        key = harness.submit(prompt, 6)
        wait_until("loading", lambda: harness.stat("cut.open") == 1)
        assert len(harness.ask(text(11, 30), 8).tokens) == 8
        assert harness.answers[key].finished is None
        store.tier.allowed = None
        assert harness.wait(key).tokens == answer


def test_a_store_that_dies_meanwhile_leaves_what_has_landed_and_the_rest_to_be_computed() -> None:
    store, prompt = FakeStore(), text(12)
    with cold_worker(store, prompt) as (harness, answer):
        slow_compute(harness, 10.0)
        store.tier.allowed = 5
        key = harness.submit(prompt, 6)
        wait_until("some has come", lambda: len(store.tier.brought) == 5)
        time.sleep(0.02)
        store.lose_connections()
        store.tier.allowed = None
        assert harness.wait(key).tokens == answer
        loaded, recomputed = figures(harness)
        assert loaded + recomputed == PREFIX


@pytest.mark.parametrize(("prefixes", "figured"), [("load", (PREFIX, 0)), ("compute", (0, 0))])
def test_a_worker_may_be_told_to_load_all_or_to_compute_all(prefixes: str, figured: tuple[int, int]) -> None:
    store, prompt = FakeStore(), text(13)
    with cold_worker(store, prompt, prefixes=prefixes) as (harness, answer):
        store.chunks.update(store.tier.chunks)
        got = harness.ask(prompt, 6)
        assert got.tokens == answer
        assert figures(harness) == figured
        assert harness.stat("cut.begun") == 0


def test_while_too_many_answers_are_late_nothing_more_is_cut() -> None:
    store, prompt = FakeStore(), text(14)
    with cold_worker(store, prompt) as (harness, answer):
        late = harness.parts.transfer._puller.cutter.abandoned  # type: ignore[union-attr]
        late.update(range(ABANDONED_MAX))  # type: ignore[arg-type]
        assert harness.stat("cut.late_answers") == ABANDONED_MAX
        assert harness.ask(prompt, 6).tokens == answer
        assert harness.stat("cut.begun") == 0 and store.tier.brought == []
        late.clear()
