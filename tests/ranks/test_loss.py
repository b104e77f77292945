"""A rank that dies, stops, or whose rank 0 dies: all of that worker end, another goes on, nothing is left or hangs."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.testing.cluster import Cluster
from forebay.testing.ports import free_port
from forebay.testing.standstill import pause
from tests.checkpoints import tiny_llama
from tests.cli.test_serve import Serving
from tests.e2e.reference import greedy_reference
from tests.e2e.streams import Stream
from tests.ranks.conftest import Crowd, Worker, children, wait_gone

PROMPT = [(37 * i) % 480 + 16 for i in range(75)]
LENGTH, KILL_AT = 150, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[int]:
    (answer,) = greedy_reference(model, [PROMPT], LENGTH)
    return answer


# --- under a supervisor --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Front:
    """What a `Stream` wants to know of a front end."""

    serving: Serving

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.serving.port}"

    @staticmethod
    def body(prompt: list[int], length: int, **more: Any) -> dict[str, Any]:
        return Cluster.body(prompt, length, **more)


def over_a_killed_rank(serving: Serving, wanted: list[int], number: int = signal.SIGKILL) -> tuple[int, int]:
    """Kill, or stop, the last rank in the middle of a stream, which must go on to its end; the process ids of the
    worker that was, of which nothing is left, and of its successor."""
    worker = serving.pids()["worker"]
    *_, rank = ranks = children(worker)
    stream = Stream(Front(serving), "front", PROMPT, LENGTH)  # type: ignore[arg-type]
    stream.reach(KILL_AT)
    pause(rank) if number == signal.SIGSTOP else os.kill(rank, number)
    seen = len(stream.ids)
    assert stream.done() == wanted and seen < LENGTH, "no token is missing, repeated or another"
    wait_gone([worker, *ranks])
    return worker, serving.pids()["worker"]


def test_a_killed_rank_ends_its_worker_and_the_stream_goes_on(model: Path, wanted: list[int], tmp_path: Path) -> None:
    serving = Serving(tmp_path, model, free_port())
    serving.start("--dtype", "float64", "--tensor-parallel-size", "2", "--threads", "1")
    try:
        serving.ready()
        worker, another = over_a_killed_rank(serving, wanted)
        assert another != worker and len(children(another)) == 1
        assert "has ended (killed by SIGKILL), so this worker ends" in serving.log
        assert "the worker has ended (exit code 1)" in serving.log
        assert not (serving.runtime / "worker.sock.ranks").exists()
        last = [another, *children(another)]
    finally:
        assert serving.stop() == 0
    wait_gone(last)
    serving.nothing_left()


# --- a worker by itself --------------------------------------------------------------------------------------


def start(crowd: Crowd, name: str, model: Path, *more: str) -> tuple[Worker, int]:
    """A worker of two ranks, and the process of the second."""
    crowd.start(name, model, 2, *more)
    worker = crowd.worker(name)
    (rank,) = children(worker.pid)
    return worker, rank


def in_the_middle(worker: Worker) -> None:
    """Ask for a long answer, and wait until it has begun."""
    worker.front.generate("long", PROMPT, LENGTH)
    while len(worker.front.heard["long"].tokens) < KILL_AT:
        worker.front.receive()


def ended(crowd: Crowd, name: str) -> int:
    """Wait for its end; its exit code."""
    worker = crowd.workers.pop(name)
    code = worker.running.popen.wait(60)
    worker.front.connection.close()
    return code


def test_ranks_end_with_rank_0(crowd: Crowd, model: Path) -> None:
    worker, rank = start(crowd, "killed", model)
    in_the_middle(worker)
    os.kill(worker.pid, signal.SIGKILL)
    assert ended(crowd, "killed") == -signal.SIGKILL
    wait_gone([rank])
    for left in ("killed.sock", "killed.sock.ranks"):  # of the socket the kernel keeps the name
        assert (crowd.folder / left).exists() == (left == "killed.sock")
    (crowd.folder / "killed.sock").unlink()


def test_a_stopped_rank_is_waited_for_so_long_and_no_longer(crowd: Crowd, model: Path) -> None:
    worker, rank = start(crowd, "stopped", model, "--distributed-timeout", "5s")
    in_the_middle(worker)
    pause(rank)
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        worker.front.receive_all()
    assert ended(crowd, "stopped") == 1
    assert time.monotonic() - began > 4.5, "it was waited for"
    wait_gone([rank])


def test_ctrl_c_reaches_all_and_what_was_computed_is_stored(crowd: Crowd, model: Path, wanted: list[int]) -> None:
    """A terminal sends it to every process: only rank 0 minds, and with the others' help it stores the tail."""
    worker, rank = start(crowd, "asked", model)
    in_the_middle(worker)
    os.killpg(worker.pid, signal.SIGINT)
    with pytest.raises(ConnectionError):
        worker.front.receive_all()
    told = len(worker.front.heard["long"].tokens)
    assert told < LENGTH, "it was interrupted"
    assert ended(crowd, "asked") == 0
    wait_gone([rank])
    crowd.start("next", model, 1)
    successor = crowd.worker("next")
    heard = successor.front.ask("long", PROMPT, LENGTH, emitted=wanted[:told])
    assert wanted[:told] + heard.tokens == wanted
    assert heard.started is not None
    known = (len(PROMPT) + told - 1) // 16 * 16
    assert heard.started.cached_tokens == known, "all but the open unit"
    crowd.workers.pop("next").end()
