"""Too little memory, a store that is killed, clients that go away: answers stay right, and nothing stays pinned."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.testing.cluster import Cluster
from forebay.testing.standstill import pause, resume
from tests.vllm.conftest import server
from tests.vllm.prompts import TOLERANCE, Prompt, distance, longest_hit, sharing
from tests.vllm.servers import Engine, Reply, running, settle, wait

CLIENTS = 6


@pytest.fixture(scope="module")
def tight(qwen: Cluster) -> Iterator[Engine]:
    """A server with 39 blocks of 32 tokens: a few requests fill it."""
    one = server(qwen, "tight", "--num-gpu-blocks-override", "40", "--max-model-len", "1024")
    with running(one):
        yield one


def answers(engine: Engine, prompts: list[Prompt], tokens: int, doing: Callable[[], None]) -> dict[int, Reply]:
    """Replies by the prompt's place: many clients at a time, some of which go away, while `doing` is done."""
    found: dict[int, Reply] = {}
    rng = random.Random(3)
    impatient = {place: rng.random() < 0.15 for place in range(len(prompts))}

    def ask(place: int) -> None:
        if impatient[place]:
            engine.leave(prompts[place], 400, after_s=0.2 if place % 2 else None)
        else:
            found[place] = engine.complete(prompts[place], tokens)

    other = threading.Thread(target=doing)
    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(ask, place) for place in range(len(prompts))]
        other.start()
        for one in asked:
            one.result()
    other.join()
    assert found.keys() == {place for place, gone in impatient.items() if not gone}
    return found


def right(found: dict[int, Reply], expected: list[Reply]) -> None:
    assert max(distance(reply, expected[place]) for place, reply in found.items()) < TOLERANCE


def total(engine: Engine, name: str) -> float:
    return sum(value for label, value in engine.metrics().items() if label.startswith(name))


def test_answers_stay_right_when_the_device_evicts_and_preempts(qwen: Cluster, tight: Engine) -> None:
    prompts = sharing(30, seed=21)
    expected = [tight.complete(prompt, 2, cache_salt=f"one {place}") for place, prompt in enumerate(prompts)]
    loads = tight.counts().get("loads", 0)
    for _ in range(2):
        right(answers(tight, prompts, 60, lambda: None), expected)
    assert total(tight, "vllm:num_preemptions_total") > 0
    assert tight.counts()["loads"] > loads
    values = settle(qwen)
    assert (values["store.leases"], values["host.reserved_bytes"]) == (0, 0)


def test_the_store_is_killed_in_the_middle_and_comes_back(qwen: Cluster, tight: Engine) -> None:
    prompts = sharing(40, seed=22)
    expected = [tight.complete(prompt, 2, cache_salt=f"two {place}") for place, prompt in enumerate(prompts)]
    for prompt in prompts:
        tight.complete(prompt, 1)
    settle(qwen)

    def kill_and_start() -> None:
        time.sleep(0.5)
        qwen.processes["store"].end(signal.SIGKILL)
        time.sleep(1.5)
        qwen.start_store()

    right(answers(tight, prompts, 30, kill_and_start), expected)
    wait("a hit after it", lambda: _hits(tight, prompts[0]))
    values = settle(qwen)
    assert (values["store.leases"], values["host.reserved_bytes"]) == (0, 0)
    assert tight.process is not None and tight.process.poll() is None
    assert "failed in a way it should not" not in tight.log.read_text()


def _hits(engine: Engine, prompt: Prompt) -> bool:
    engine.forget_device()
    return engine.complete(prompt, 1).cached_tokens == longest_hit(prompt)


def test_without_a_store_it_serves_and_when_there_is_one_it_hits(qwen: Cluster, tight: Engine) -> None:
    (prompt,) = sharing(1, seed=23)
    tight.complete(prompt, 1)
    settle(qwen)
    qwen.processes["store"].end(signal.SIGKILL)
    tight.forget_device()
    assert tight.complete(prompt, 1).cached_tokens == 0
    qwen.start_store()
    wait("a hit after it", lambda: _hits(tight, prompt))


def test_a_store_that_hangs_delays_nothing_for_long(qwen: Cluster, tight: Engine) -> None:
    (prompt, *others) = sharing(6, seed=24)
    tight.complete(prompt, 1)
    settle(qwen)
    store = qwen.processes["store"].popen
    assert store is not None
    pause(store.pid)
    try:
        began = time.monotonic()
        for other in others:
            tight.complete(other, 1)
        # A lookup is given up after its deadline and a second; after that nobody asks.
        assert time.monotonic() - began < 60
    finally:
        resume(store.pid)
    wait("a hit after it", lambda: _hits(tight, prompt))
    settle(qwen)
