"""A worker whose device holds a fraction of what is asked of it says what one says that holds everything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.workers.generation import RequestKey
from tests.workers.fake_store import FakeStore
from tests.workers.harness import CHUNK, Harness, wait_until
from tests.workers.hot.conftest import SQUEEZED, TIGHT, Sparse


def test_every_residency_gives_the_tokens_of_full_residency(sparse: Sparse) -> None:
    prompts = [sparse.text(230, 1), sparse.text(260, 2), sparse.text(150, 3)]
    store = FakeStore()
    with sparse.worker(store, **SQUEEZED) as squeezed:
        keys = [squeezed.submit(prompt, 12) for prompt in prompts]
        for prompt, key in zip(prompts, keys, strict=True):
            assert squeezed.wait(key, 60).tokens == sparse.expected(prompt, 12)
        assert squeezed.stat("hot.misses") > 0 and squeezed.stat("hot.regions_opened") > 0
        assert squeezed.stat("hot.steps_mixed") > 0 and squeezed.stat("hot.pages_released") > 0
    assert store.leases == store.released


def test_a_request_starts_on_a_prefix_of_which_no_row_is_on_the_device(sparse: Sparse) -> None:
    prompt, store = sparse.text(200, 4), FakeStore()
    with sparse.worker(store, max_tokens=1024) as whole:
        whole.ask(prompt, 1)
        whole.settle()
    with sparse.worker(store, **SQUEEZED) as squeezed:
        with squeezed.in_its_midst(sparse.text(280, 5), 30) as other:  # which has most of the device
            key = squeezed.submit(prompt, 6)
        answer = squeezed.wait(key)
        assert answer.cached == 192 and answer.tokens == sparse.expected(prompt, 6)
        assert squeezed.stat("hot.started_with_none") >= 1 and squeezed.stat("hot.misses") > 0
        squeezed.wait(other, 60)


def test_a_chunk_that_a_hit_ends_inside_of_is_stored_when_it_is_full(glm: Sparse) -> None:
    """Else whoever comes back finds no more than the first time."""
    prompt, store = glm.text(3 * CHUNK + 17, 6), FakeStore()
    with glm.worker(store, max_tokens=512) as whole:
        whole.ask(prompt, 1)
        whole.settle()
    longer = [*prompt, *glm.text(200, 8)]
    with glm.worker(store, **TIGHT) as squeezed:
        answer = squeezed.ask(longer, 4)
        assert answer.tokens == glm.expected(longer, 4) and answer.cached == 3 * CHUNK + 16
        assert squeezed.stat("hot.regions_opened") == 1 and squeezed.stat("push.incomplete") == 0
        squeezed.settle()
        again = [*longer, 5]
        answer = squeezed.ask(again, 4)
        assert answer.tokens == glm.expected(again, 4) and answer.cached > len(longer) - CHUNK
    assert store.leases == store.released


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 16, 3 * CHUNK + 17])
def test_a_hit_at_every_boundary(glm: Sparse, length: int) -> None:
    prompt, store = glm.text(length, 6), FakeStore()
    with glm.worker(store, max_tokens=512) as whole:
        whole.ask(prompt, 1)
        whole.settle()
    with glm.worker(store, **(SQUEEZED | {"hot_buffer_pool_tokens": 256})) as squeezed:
        longer = [*prompt, *glm.text(5, 8)]
        with squeezed.in_its_midst(glm.text(30, 7), 60) as blocker:
            key = squeezed.submit(longer, 4)
        assert squeezed.wait(key).tokens == glm.expected(longer, 4)
        squeezed.cancel(blocker)
        wait_until("it has gone", lambda: squeezed.answers[blocker].finished)


def test_a_last_layer_that_reads_nothing_in_a_step_has_its_rows_in_the_next(glm: Sparse) -> None:
    """The parts of a long prompt end before the last layer reads; what they have copied must be there for it later."""
    prompt, store = glm.text(300, 9), FakeStore()
    with glm.worker(store, **TIGHT) as squeezed:
        assert squeezed.ask(prompt, 8).tokens == glm.expected(prompt, 8)
        assert squeezed.stat("hot.rows_replayed") > 0


def test_one_that_was_loaded_whole_is_squeezed_when_another_needs_room(glm: Sparse) -> None:
    """Its pages are in host memory, too, though it was not this worker that has put them there."""
    first, second, store = glm.text(230, 30), glm.text(260, 31), FakeStore()
    with glm.worker(store, max_tokens=1024) as whole:
        whole.ask(first, 1)
        whole.settle()
    with glm.worker(store, **SQUEEZED) as squeezed:
        with squeezed.in_its_midst(first, 40) as key:
            assert squeezed.answers[key].cached == 224
            keys = [key, squeezed.submit(second, 8)]
        for prompt, key, count in zip((first, second), keys, (40, 8), strict=True):
            assert squeezed.wait(key, 60).tokens == glm.expected(prompt, count)
        assert squeezed.stat("hot.squeezed") == 1


# --- lifecycles --------------------------------------------------------------------------------------------------


@contextmanager
def hot_and_running(worker: Harness, sparse: Sparse, count: int = 60) -> Iterator[tuple[list[int], RequestKey]]:
    """A request that reads rows in host memory; the block runs in the midst of its answer, between two steps."""
    prompt = sparse.text(230, 11)
    with worker.in_its_midst(prompt, count, lambda: worker.stat("hot.misses")) as key:
        yield prompt, key


def test_one_that_is_cancelled_while_its_pages_are_copied_leaves_nothing_behind(glm: Sparse) -> None:
    store = FakeStore()
    with glm.worker(store, **TIGHT) as worker:
        with hot_and_running(worker, glm) as (_, key):
            store.hung = True
        wait_until("a copy waits", lambda: worker.stat("pushes.running") > 0, 60)
        worker.cancel(key)
        wait_until("it has gone", lambda: worker.answers[key].finished)
        store.hung = False
        worker.settle()
    assert store.leases == store.released


def test_pages_stay_while_host_memory_takes_its_time(glm: Sparse) -> None:
    store = FakeStore()
    with glm.worker(store, **TIGHT) as worker:
        with hot_and_running(worker, glm) as (prompt, key):
            store.hung = True
        wait_until("a copy waits", lambda: worker.stat("pushes.running") > 0, 60)
        released = worker.stat("hot.chunks_held")
        time.sleep(0.05)
        assert worker.stat("hot.chunks_held") == released
        store.hung = False
        assert worker.wait(key, 60).tokens == glm.expected(prompt, 60)


def test_when_the_store_goes_away_it_is_computed_anew(glm: Sparse) -> None:
    store = FakeStore()
    with glm.worker(store, **TIGHT) as worker:
        with hot_and_running(worker, glm) as (prompt, key):
            store.lose_connections()
        wait_until("it was put off", lambda: worker.stat("hot.put_off") > 0, 60)
        store.up = True
        assert worker.wait(key, 60).tokens == glm.expected(prompt, 60)


def test_a_slot_that_was_given_away_makes_that_step_void(glm: Sparse) -> None:
    """Its bytes may be anybody's: what was read is taken back before anyone has heard of it."""
    store = FakeStore()
    with glm.worker(store, **TIGHT) as worker:
        with hot_and_running(worker, glm) as (prompt, key):
            for stored in list(store.chunks.values()):
                stored.generation += 1
                stored.payload[:] = bytes(len(stored.payload))
        assert worker.wait(key, 60).tokens == glm.expected(prompt, 60)
        assert worker.stat("hot.put_off") > 0 and worker.stat("hot.rows_changed") > 0


def test_a_damaged_chunk_is_never_read_in_place(glm: Sparse) -> None:
    prompt, store = glm.text(230, 12), FakeStore()
    with glm.worker(store, max_tokens=1024) as whole:
        whole.ask(prompt, 1)
        whole.settle()
    rows = [stored for (group, _), stored in store.chunks.items() if group == 0]
    rows[3].payload[77] ^= 1
    with glm.worker(store, **TIGHT) as worker:
        answer = worker.ask(prompt, 40)
        assert answer.tokens == glm.expected(prompt, 40) and answer.cached == 3 * CHUNK
        assert store.reported


def test_what_host_memory_does_not_take_is_tried_again_and_then_given_up(glm: Sparse) -> None:
    """Somebody else is writing it, and never ends."""
    store = FakeStore()
    with glm.worker(store, **(TIGHT | {"hot_buffer_deadline_s": 0.1})) as worker:
        store.refuse = "busy"
        key = worker.submit(glm.text(230, 14), 60)
        answer = worker.wait(key, 60)
        assert answer.finished is not None and answer.finished.reason == "error"
        assert "--memory" in str(answer.finished) and worker.stat("hot.given_up") == 1
        store.refuse = ""
        prompt = glm.text(60, 15)
        assert worker.ask(prompt, 4).tokens == glm.expected(prompt, 4)


def test_what_host_memory_does_not_take_is_offered_again_after_a_pause(glm: Sparse) -> None:
    store = FakeStore()
    with glm.worker(store, **(TIGHT | {"hot_buffer_deadline_s": 60.0})) as worker:
        store.refuse = "busy"
        prompt = glm.text(230, 24)
        key = worker.submit(prompt, 60)
        wait_until("it was refused", lambda: worker.stat("hot.chunks_refused") > 0, 60)
        time.sleep(1)
        offered = worker.stat("hot.chunks_refused")
        assert offered < 10 * len(prompt) / CHUNK, "in so short a time each chunk is offered a few times"
        store.refuse = ""
        assert worker.wait(key, 60).tokens == glm.expected(prompt, 60)
        assert worker.stat("hot.put_off") == 0


def test_no_more_host_pages_are_used_than_the_cap(glm: Sparse) -> None:
    store = FakeStore()
    with glm.worker(store, **(SQUEEZED | {"hot_buffer_host_tokens": 256})) as worker:
        prompts = [glm.text(200, seed) for seed in (16, 17, 18)]
        keys = [worker.submit(prompt, 8) for prompt in prompts]
        most = 0.0
        for prompt, key in zip(prompts, keys, strict=True):
            while worker.answers[key].finished is None:
                most = max(most, worker.stat("hot.host_pages"))
                time.sleep(0.005)
            assert worker.answers[key].tokens == glm.expected(prompt, 8)
        assert 0 < most <= worker.stat("hot.host_pages_max") == 16


def test_what_host_pages_could_never_hold_is_refused_at_once(glm: Sparse) -> None:
    with glm.worker(FakeStore(), **(SQUEEZED | {"hot_buffer_host_tokens": 256})) as worker:
        answer = worker.wait(worker.submit(glm.text(1500, 19), 8), 60)
        assert answer.finished is not None and answer.finished.reason == "error"
        prompt = glm.text(200, 20)
        assert worker.ask(prompt, 8).tokens == glm.expected(prompt, 8)
