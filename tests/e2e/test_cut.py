"""A prefix in a slow file tier, by real processes: one part is computed, one is loaded, and the answer is the cold one.

The tier's pace is in the test's hand, so what happens doesn't depend on how fast this machine is.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from forebay.kvstore.client import StoreClient
from forebay.testing.cluster import Cluster, Completion, wait_for
from tests.e2e.streams import Stream
from tests.e2e.test_identity import figure
from tests.e2e.windowed import tiny_windowed

CHUNK, VOCAB, LENGTH, OUTPUT = 32, 500, 1500, 6
STORED = (LENGTH - 1) // 16 * 16
CUT = ("--prefixes", "cut", "--max-num-batched-tokens", "16", "--max-num-seqs", "4", "--lookup-deadline", "60s")
"""Steps of one unit: many of them, so that the test can act between two."""


@dataclass
class SlowTier:
    """A cluster of one worker that computes, one that cuts, and a tier whose pace is a file."""

    cluster: Cluster

    def set_pace(self, bytes_a_second: float) -> None:
        partial = self.cluster.folder / "pace.partial"
        partial.write_text(str(bytes_a_second))
        partial.replace(self.cluster.folder / "pace")

    def cold(self, prompt: list[int]) -> list[int]:
        """The answer of a worker that has never seen it; afterwards the tier has it, and host memory nothing."""
        self.set_pace(float("inf"))
        answer = self.cluster.complete("front1", prompt, OUTPUT)
        assert answer.cached_tokens == 0
        self.cluster.settle("front1")
        with StoreClient(self.cluster.store_address) as client:
            client.clear()
        assert self.values()["host.bytes_used"] == 0 and self.values()["tier.slow.chunks"] > 0
        return answer.token_ids

    def values(self) -> dict[str, float]:
        return self.cluster.store_values()

    def stat(self, name: str) -> float:
        return figure(self.cluster.figures("front2"), name)

    def restart_cutter(self) -> None:
        """A worker that knows nothing of any rate, and has nothing on its device."""
        if "worker2" in self.cluster.processes:
            assert self.cluster.processes["worker2"].end() == 0
        worker = self.cluster.start_worker("worker2", extra=CUT)
        if "front2" not in self.cluster.processes:
            self.cluster.start_frontend("front2", "worker2")
        self.cluster.wait_healthy("front2", watch=[worker])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cut")
    tiny_windowed(folder / "model")
    (folder / "keep").touch()
    made = Cluster(folder, folder / "model", chunk_tokens=CHUNK, threads=1)
    made.tiers = (
        '[tiers.slow]\nkind = "forebay.testing.throttled:ThrottledFiles"\n'
        f'directory = "{folder}/files"\npace = "{folder}/pace"\nkeep = "{folder}/keep"\nquota_bytes = "1GiB"\n'
    )
    made.start_store()
    made.start_pair("worker1", "front1")
    yield made
    made.stop()


@pytest.fixture
def slow(cluster: Cluster) -> Iterator[SlowTier]:
    made = SlowTier(cluster)
    made.restart_cutter()
    yield made
    made.set_pace(float("inf"))


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, VOCAB) for _ in range(LENGTH)]


class Asking:
    """A completion that is waited for on a thread of its own."""

    def __init__(self, slow: SlowTier, prompt: list[int]) -> None:
        self._answer: Completion | None = None
        self._slow, self._prompt = slow, prompt
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        self._answer = self._slow.cluster.complete("front2", self._prompt, OUTPUT)

    def answer(self) -> Completion:
        self._thread.join(120)
        assert self._answer is not None, "no answer"
        return self._answer


def check_partly(slow: SlowTier, got: Completion, cold: list[int]) -> None:
    """The answer is the cold one; a part of its prefix was loaded from the tier, the rest computed, nothing twice."""
    assert got.token_ids == cold
    loaded, recomputed = slow.stat("tokens.loaded"), slow.stat("tokens.computed_though_stored")
    assert loaded > 0 and recomputed > 0
    assert loaded + recomputed == STORED and slow.stat("tokens.prefilled") == LENGTH - loaded
    assert got.cached_tokens == loaded == slow.stat("cached.slow")


def test_a_tier_that_is_slow_at_first_brings_the_end_while_the_beginning_is_computed(slow: SlowTier) -> None:
    prompt = prompt_of(1)
    cold = slow.cold(prompt)
    slow.set_pace(0)
    asking = Asking(slow, prompt)
    wait_for("some is computed", lambda: slow.stat("tokens.prefilled") > 0)
    slow.set_pace(float("inf"))
    check_partly(slow, asking.answer(), cold)
    assert slow.stat("cut.joined") == 1 and slow.stat("rates.prefill.tokens_per_s") > 0


def test_a_tier_that_stalls_in_the_middle_keeps_nobody(slow: SlowTier) -> None:
    prompt = prompt_of(2)
    cold = slow.cold(prompt)
    before = slow.values().get("tier.slow.promoted", 0)
    slow.set_pace(2e6)
    asking = Asking(slow, prompt)
    # The last two chunk positions have a window's chunk each, beside the one that every position has.
    wait_for("some has come", lambda: slow.values().get("tier.slow.promoted", 0) >= before + 6)
    slow.set_pace(0)
    check_partly(slow, asking.answer(), cold)
    assert (slow.cluster.folder / "pace").read_text() == "0", "it stands still to this moment"
    wait_for("the cut's end", lambda: slow.stat("cut.open") == 0 and slow.stat("requests.loading") == 0)


def test_a_worker_killed_meanwhile_leaves_nothing_behind_and_its_stream_goes_on(slow: SlowTier) -> None:
    prompt = prompt_of(3)
    cold = slow.cold(prompt)
    slow.set_pace(0)
    stream = Stream(slow.cluster, "front2", prompt, OUTPUT)
    wait_for("the load", lambda: slow.stat("cut.open") == 1)
    slow.cluster.processes["worker2"].end(signal.SIGKILL)
    slow.cluster.start_worker("worker2", extra=CUT)
    slow.set_pace(float("inf"))
    assert stream.done() == cold
    wait_for("the store's room", lambda: slow.values()["host.reserved_bytes"] == 0)
    # The next worker may have been asked before it had found the store: then it computes all of it.
    assert slow.stat("tokens.prefilled") + slow.stat("tokens.loaded") == LENGTH
    assert stream.cached == slow.stat("tokens.loaded")


def test_a_cut_answer_is_stored_like_any_other(slow: SlowTier) -> None:
    """What was loaded, and what was computed instead, is in host memory afterwards: the next worker loads all of it."""
    prompt = prompt_of(1)
    slow.set_pace(float("inf"))
    first = slow.cluster.complete("front2", prompt, OUTPUT)
    slow.cluster.settle("front2")
    slow.restart_cutter()
    slow.set_pace(0)
    second = slow.cluster.complete("front2", prompt, OUTPUT)
    assert second.token_ids == first.token_ids and second.cached_tokens == STORED
    assert slow.stat("cached.host") == STORED
