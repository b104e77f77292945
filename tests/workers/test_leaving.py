"""A worker that is to leave: it takes nothing new, stores what it has before a request moves, and says how it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.workers.control import WorkerControl, WorkerUnavailable
from forebay.workers.protocol import LEAVING, Cancel, Finished
from tests.workers.fake_worker import BUSY_S
from tests.workers.processes import PATIENCE_S, FrontEnd, Running, start_store, start_worker, store_values

PROMPT = [(7 * number) % 200 + 20 for number in range(70)]


@dataclass
class House:
    """A store and two workers."""

    folder: Path
    workers: dict[str, tuple[Running, FrontEnd]]

    def front(self, name: str) -> FrontEnd:
        return self.workers[name][1]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    store = start_store(folder)
    house = House(folder, {name: start_worker(folder, name) for name in ("a", "b")})
    for _, front in house.workers.values():
        front.settle()
    yield house
    for process, _ in house.workers.values():
        process.end()
    store.end()


def in_the_middle(front: FrontEnd, id: str, prompt: list[int], tokens: int) -> None:
    """Begin an answer, and wait until so many tokens of it have come."""
    front.generate(id, prompt, 1500)
    while len(front.heard[id].tokens) < tokens:
        front.receive()


def test_a_request_that_moves_is_stored_to_its_last_unit_before_that_is_told(house: House) -> None:
    front, other = house.front("a"), house.front("b")
    in_the_middle(front, "moves", PROMPT, 45)
    front.send(Cancel(id="moves", attempt=1, move=True))
    moved = front.wait("moves")
    assert moved.finished is not None and moved.finished.reason == "moved"
    known = len(PROMPT) + len(moved.tokens)
    other.generate("moves", PROMPT, len(moved.tokens) + 20, emitted=moved.tokens)
    went_on = other.wait("moves")
    assert went_on.started is not None
    assert went_on.started.cached_tokens == (known - 1) // 16 * 16, "nothing but the last unit is computed again"
    assert went_on.started.cached == {"host": went_on.started.cached_tokens}
    alone = house.front("a").ask("alone", PROMPT, len(moved.tokens) + 20)
    assert moved.tokens + went_on.tokens == alone.tokens


def test_a_prefill_ends_with_its_first_token_and_is_handed_over(house: House) -> None:
    prompt = [token + 1 for token in PROMPT]
    first = house.front("a").ask("prefill", prompt, 30, hand_over=True)
    assert first.finished is not None and first.finished.reason == "moved" and len(first.tokens) == 1
    rest = house.front("b").ask("prefill", prompt, 30, emitted=first.tokens)
    assert rest.started is not None and rest.started.cached_tokens == len(prompt) // 16 * 16
    assert rest.finished is not None and rest.finished.reason == "length" and len(rest.tokens) == 29


def test_an_answer_of_one_token_is_over_and_not_handed_over(house: House) -> None:
    only = house.front("a").ask("one", PROMPT, 1, hand_over=True)
    assert only.finished is not None and only.finished.reason == "length"


def test_a_draining_worker_says_so_at_once_and_takes_nothing_new(house: House) -> None:
    front, bystander = house.front("a"), FrontEnd.to(house.folder / "a.sock", house.workers["a"][0])
    in_the_middle(front, "stays", PROMPT, 3)
    with WorkerControl(f"unix://{house.folder}/a.sock") as control:
        assert not control.describe().draining
        control.drain(True)
        assert control.describe().draining
        refused = front.ask("new", PROMPT, 5).finished
        assert refused == Finished(id="new", attempt=1, reason="error", error=LEAVING)
        while not (bystander.alive and bystander.alive[-1].draining):
            bystander.receive()
        assert front.heard["stays"].finished is None and control.left().requests == 1, "what it has goes on"
        front.cancel("stays")
        front.wait("stays")
        wait_until(lambda: control.left().nothing)
        control.drain(False)
        assert not control.describe().draining
    assert len(front.ask("again", PROMPT, 5).tokens) == 5


def wait_until(true: object) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_told_to_leave_it_ends_well(tmp_path: Path) -> None:
    process, front = start_worker(tmp_path, "w", store=False)
    assert len(front.ask("x", PROMPT, 3).tokens) == 3
    with WorkerControl(f"{tmp_path}/w.sock") as control:
        control.leave()
    assert process.popen.wait(30) == 0
    with pytest.raises(WorkerUnavailable, match=r"w\.sock"), WorkerControl(f"{tmp_path}/w.sock"):
        pass


def test_a_step_that_waits_for_ever_is_told_and_a_long_one_is_not(tmp_path: Path) -> None:
    process, front = start_worker(tmp_path, "w", "label=fragile", store=False)
    front.describe()
    began = time.monotonic()
    front.generate("long", [15], 1)
    heard = front.wait("long")
    longest = max(alive.step_s for alive in front.alive)
    assert time.monotonic() - began > BUSY_S > 1 and longest > 1 and len(heard.tokens) == 1
    assert max(alive.stalled_s for alive in front.alive) < 1, "it computed all the time"
    front.alive.clear()
    front.generate("stuck", [14], 1)
    while not front.alive or front.alive[-1].stalled_s < 1.5:
        front.receive()
    assert front.alive[-1].step_s > 1.5
    process.popen.kill()
    process.popen.wait(30)


def test_what_moves_without_a_store_is_told_at_once(tmp_path: Path) -> None:
    process, front = start_worker(tmp_path, "w", store=False)
    in_the_middle(front, "x", PROMPT, 5)
    front.send(Cancel(id="x", attempt=1, move=True))
    moved = front.wait("x").finished
    assert moved is not None and moved.reason == "moved"
    assert not store_values(tmp_path)
    process.end()
