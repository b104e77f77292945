"""A cached answer equals the recomputed one, whatever tier it came from and whoever was killed before.

Tiny checkpoints in fp64: token for token. Every cell proves its path: exact `cached_tokens`, that tier's
bytes above zero, distinct process ids. A silent recompute fails.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.testing.cluster import Cluster
from tests.checkpoints import tiny_qwen3
from tests.e2e.expected import PrefixOracle
from tests.e2e.prompts import sharing_prompts
from tests.e2e.reference import greedy_reference
from tests.e2e.streams import Stream
from tests.e2e.windowed import tiny_windowed

CHUNK, WINDOW, VOCAB, OUTPUT = 32, 40, 500, 6
FAMILIES: dict[str, Callable[[Path], Any]] = {"gemma3": tiny_windowed, "qwen3": tiny_qwen3}


@dataclass
class Case:
    """One family's cluster, its prompts, and what the reference answers to each."""

    cluster: Cluster
    prompts: list[list[int]]
    answers: list[list[int]]
    oracle: PrefixOracle

    def ask_all(self, frontend: str, *, known: bool) -> int:
        """Ask every prompt; each answer must be the reference's, each hit exact. Returns the cached tokens.

        `known` prompts were all computed before: nothing new is to be learned.
        """
        total = 0
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            expected = self.oracle.cached(prompt)
            got = self.cluster.complete(frontend, prompt, OUTPUT)
            assert got.token_ids == answer, f"{len(prompt)} tokens, {got.cached_tokens} cached: another answer"
            assert got.cached_tokens == expected, f"prompt of {len(prompt)}: {got.cached_tokens} cached, not {expected}"
            self.oracle.computed(prompt, answer)
            if not known:
                self.cluster.settle(frontend)
            total += got.cached_tokens
        return total


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    model = folder / "model"
    FAMILIES[request.param](model)
    prompts = sharing_prompts(VOCAB, CHUNK, WINDOW, 50, seed=7, longest=200)
    answers = greedy_reference(model, prompts, OUTPUT)
    cluster = Cluster(folder, model, chunk_tokens=CHUNK, threads=1, lookup_deadline="60s")
    cluster.start_store()
    cluster.start_pair("worker1", "front1")
    yield Case(cluster, prompts, answers, PrefixOracle())
    cluster.stop()


def figure(figures: dict[str, float], name: str) -> float:
    """A worker's figure by its dotted name."""
    wanted = "forebay_worker_" + name.replace(".", "_")
    return next((value for key, value in figures.items() if key == wanted), 0.0)


def adds_up(found: float, figures: dict[str, float], cached: int) -> bool:
    """Is what the worker found what its requests were told? Where this machine stands still for over a second, the
    front end takes the worker for dead and asks it again: then it finds that request's prefix once more."""
    again = figures["forebay_link_resubmitted"]
    return found == cached if again == 0 else cached <= found


def test_cold_then_device(case: Case) -> None:
    case.ask_all("front1", known=False)
    before = case.cluster.figures("front1")
    cached = case.ask_all("front1", known=True)
    after = case.cluster.figures("front1")
    grown = figure(after, "cached.device") - figure(before, "cached.device")
    assert cached > 0 and adds_up(grown, after, cached), "the second time everything comes from the device"


def test_host_hit_from_another_worker(case: Case) -> None:
    case.cluster.start_pair("worker2", "front2")
    pids = {case.cluster.processes[name].pid for name in ("worker1", "worker2", "store")}
    assert len(pids) == 3
    cached = case.ask_all("front2", known=True)
    figures = case.cluster.figures("front2")
    assert figure(figures, "loaded.host.bytes") > 0
    from_host, from_device = figure(figures, "cached.host"), figure(figures, "cached.device")
    assert from_host > 0 and adds_up(from_host + from_device, figures, cached)


def test_file_hit_after_everything_was_restarted(case: Case) -> None:
    cluster = case.cluster
    before = {name: process.pid for name, process in cluster.processes.items()}
    cluster.settle("front1")
    cluster.stop()
    cluster.start_store()
    cluster.start_pair("worker1", "front1")
    assert all(cluster.processes[name].pid != pid for name, pid in before.items() if name in ("store", "worker1"))
    assert cluster.store_values().get("host.readopted", 0) == 0, "memory is empty: the pool went with the clean stop"
    cached = case.ask_all("front1", known=True)
    values, figures = cluster.store_values(), cluster.figures("front1")
    assert values["tier.fs.promoted_bytes"] > 0
    assert figure(figures, "cached.fs") > 0
    assert adds_up(sum(figure(figures, f"cached.{source}") for source in ("device", "host", "fs")), figures, cached)


def test_a_worker_killed_in_mid_stream_is_carried_over(case: Case) -> None:
    cluster = case.cluster
    prompt, length = case.prompts[1][:70], 200
    (wanted,) = greedy_reference(cluster.model, [prompt], length)
    old = cluster.processes["worker1"].pid
    stream = Stream(cluster, "front1", prompt, length)
    stream.reach(10)
    cluster.processes["worker1"].end(signal.SIGKILL)
    at_kill = len(stream.ids)
    cluster.start_worker("worker1")
    assert stream.done() == wanted, "no token is missing, repeated or another"
    assert 10 <= at_kill < length, "the kill landed in mid-stream"
    assert cluster.processes["worker1"].pid != old
    case.oracle.computed(prompt, wanted)
    cluster.settle("front1")


def test_after_the_store_was_killed(case: Case) -> None:
    cluster = case.cluster
    old = cluster.processes["store"].pid
    cluster.processes["store"].end(signal.SIGKILL)
    answer = cluster.complete("front1", case.prompts[1], OUTPUT)
    assert answer.token_ids == case.answers[1], "the worker serves without its store"
    cluster.start_store()
    assert cluster.processes["store"].pid != old
    assert cluster.store_values()["host.readopted"] > 0
    cluster.start_pair("worker3", "front3")
    cached = case.ask_all("front3", known=True)
    figures = cluster.figures("front3")
    assert figure(figures, "cached.host") > 0 and cached > 0
    cluster.wait_healthy("front1", watch=[cluster.processes["worker1"]])
