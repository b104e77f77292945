"""Workers and a real store, as processes: what one computed another one loads, and nobody dies with anybody."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.workers.fake_model import VOCAB
from tests.workers.processes import FrontEnd, Running, start_store, start_worker, store_values


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB - 1) for _ in range(length)]


@dataclass
class House:
    """A store and any number of workers."""

    folder: Path
    processes: list[Running] = field(default_factory=list)

    def store(self) -> Running:
        self.processes.append(start_store(self.folder))
        return self.processes[-1]

    def worker(self, name: str, *more: str) -> FrontEnd:
        process, front = start_worker(self.folder, name, *more)
        self.processes.append(process)
        front.settle()
        return front


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    for process in reversed(house.processes):
        process.end()


LENGTHS = [1, 16, 17, 33, 40, 41, 64, 65, 100, 200]


def test_another_worker_loads_what_the_first_one_computed(house: House) -> None:
    house.store()
    first = house.worker("a")
    answers = {n: first.ask(f"{n}", text(n, n), 5).tokens for n in LENGTHS}
    first.settle()
    second = house.worker("b")
    for n in LENGTHS:
        heard = second.ask(f"{n}", text(n, n), 5)
        assert heard.tokens == answers[n]
        assert heard.started is not None
        cached = (n - 1) // 16 * 16
        assert heard.started.cached == ({"host": cached} if cached else {}), n
    assert second.stats().values["loaded.host.bytes"] > 0


def test_after_a_restart_of_everything_the_files_serve(house: House) -> None:
    store = house.store()
    first = house.worker("a")
    prompt = text(150)
    answer = first.ask("r", prompt, 5).tokens
    first.settle()
    deadline = time.monotonic() + 30
    while store_values(house.folder).get("tier.fs.stores_running", 1) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in (*house.processes[1:], store):
        assert process.end() == 0, process.log.read_text()[-2000:]
    house.store()
    second = house.worker("a2", "prefixes=load")
    heard = second.ask("r", prompt, 5)
    assert heard.tokens == answer
    assert heard.started is not None and heard.started.cached == {"fs": 144}
    assert second.stats().values["loaded.fs.bytes"] > 0


def test_a_killed_store_costs_no_answer_and_serves_again_when_it_is_back(house: House) -> None:
    store = house.store()
    worker = house.worker("a")
    prompt = text(150)
    answer = worker.ask("before", prompt, 5).tokens
    worker.settle()
    worker.generate("across", text(60, 5), 300)
    while len(worker.heard["across"].tokens) < 5:
        worker.receive()
    store.end(signal.SIGKILL)
    assert len(worker.wait("across").tokens) == 300
    deadline = time.monotonic() + 60
    while worker.describe().store != "down":
        assert time.monotonic() < deadline
    house.store()
    worker.settle()
    assert worker.stats().values["store.reconnects"] == 1
    other = house.worker("b")
    heard = other.ask("after", prompt, 5)
    assert heard.tokens == answer
    assert heard.started is not None and heard.started.cached == {"host": 144}, "re-adopted"


def test_a_worker_that_is_told_to_stop_leaves_its_tails_behind(house: House) -> None:
    house.store()
    worker = house.worker("a")
    prompt = text(60)
    worker.generate("cut", prompt, 1500)
    while len(worker.heard["cut"].tokens) < 10:
        worker.receive()
    said = list(worker.heard["cut"].tokens)
    assert house.processes[-1].end(signal.SIGTERM) == 0
    other = house.worker("b")
    other.generate("on", prompt, 20, emitted=said)
    while other.heard["on"].started is None:
        other.receive()
    started = other.heard["on"].started
    assert started is not None and started.cached_tokens == (60 + len(said) - 1) // 16 * 16


def test_a_request_that_asks_for_it_is_retained_with_what_it_goes_on_from(house: House) -> None:
    house.store()
    worker = house.worker("a")
    prompt = text(100)
    worker.ask("plain", prompt, 5)
    worker.settle()
    assert store_values(house.folder)["pins.keeps"] == 0
    other = house.worker("b")
    other.ask("kept", [*prompt, *text(60, 1)], 5, tenant="acme", retain_s=600.0)
    other.settle()
    values = store_values(house.folder)
    assert 0 < values["pins.keeps"] <= values["host.entries"] and values["pins.owners"] == 1
    assert values["pins.keeps"] > values["host.entries"] - values["pins.keeps"], "the prefix, too"
