"""Room in the store for all of a request: it is promised before the request begins, and then nothing is refused."""

from __future__ import annotations

from tests.workers.fake_store import FakeStore
from tests.workers.harness import CHUNK, wait_until
from tests.workers.hot.conftest import SQUEEZED, TIGHT, Sparse
from tests.workers.hot.test_worker import hot_and_running

PLENTY = 1 << 20


def test_one_begins_only_when_the_store_has_room_for_prompt_and_output(glm: Sparse) -> None:
    prompt, count = glm.text(230, 41), 40
    chunks = -(-(len(prompt) + count) // CHUNK)
    store = FakeStore(room=chunks - 1)
    with glm.worker(store, **TIGHT) as worker:
        key = worker.submit(prompt, count)
        wait_until("it was refused twice", lambda: worker.stat("hosted.room_refused") >= 2, 60)
        assert not worker.answers[key].tokens and worker.stat("steps") == 0
        store.room = chunks
        assert worker.wait(key, 60).tokens == glm.expected(prompt, count)
        assert worker.stat("hot.misses") > 0
    assert not store.asides and store.leases == store.released


def test_one_that_has_begun_gets_on_however_full_the_store_is(glm: Sparse) -> None:
    store = FakeStore()
    with glm.worker(store, **TIGHT) as worker:
        with hot_and_running(worker, glm) as (prompt, key):
            store.refuse = "full"
        assert worker.wait(key, 60).tokens == glm.expected(prompt, 60)
        assert worker.stat("hot.put_off") == 0 and worker.stat("hot.promised") == 0
    assert not store.asides


def test_one_for_which_there_can_never_be_room_is_told_so_at_once(glm: Sparse) -> None:
    store = FakeStore(most_room=4)
    with glm.worker(store, **TIGHT) as worker:
        answer = worker.wait(worker.submit(glm.text(230, 42), 8), 60)
        assert answer.finished is not None and answer.finished.reason == "error"
        assert "--memory" in str(answer.finished) and "max_tokens" in str(answer.finished)
        short = glm.text(60, 43)
        assert worker.ask(short, 4).tokens == glm.expected(short, 4)


def test_one_that_can_not_be_hot_waits_for_the_device_to_have_room(glm: Sparse) -> None:
    prompts, store = [glm.text(230, 44), glm.text(260, 45)], FakeStore(most_room=0)
    with glm.worker(store, **SQUEEZED) as worker:
        keys = [worker.submit(prompt, 8) for prompt in prompts]
        for prompt, key in zip(prompts, keys, strict=True):
            assert worker.wait(key, 60).tokens == glm.expected(prompt, 8)
        assert worker.stat("hot.misses") == 0 and worker.stat("hot.squeezed") == 0


def test_nobody_is_squeezed_without_room(glm: Sparse) -> None:
    """It is asked for when somebody needs its blocks; until it is there the newcomer waits."""
    first, second = glm.text(230, 46), glm.text(260, 47)
    store = FakeStore(room=0)
    with glm.worker(store, **SQUEEZED) as worker:
        with worker.in_its_midst(first, 120) as key:
            keys = [key, worker.submit(second, 8)]
        wait_until("it was refused", lambda: worker.stat("hosted.room_refused") or worker.stat("hot.room_refused"), 60)
        assert worker.stat("hot.squeezed") == 0
        store.room = PLENTY
        for prompt, key, count in zip((first, second), keys, (120, 8), strict=True):
            assert worker.wait(key, 60).tokens == glm.expected(prompt, count)
    assert not store.asides
