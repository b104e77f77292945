"""The main job over each kind of tier: what was computed before the store's memory was lost comes back from the tier.

One pair of workers for all kinds. The first computes; the store ends and starts again with nothing in memory; the
second, whose device has never seen these prompts, is asked. Its hits are exact, its answers the reference's, and the
counters say that they came from that tier.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.testing.cluster import Cluster, wait_for
from tests.e2e.backends import BACKENDS, Backend
from tests.e2e.expected import PrefixOracle
from tests.e2e.prompts import sharing_prompts
from tests.e2e.reference import greedy_reference
from tests.e2e.test_identity import CHUNK, OUTPUT, VOCAB, WINDOW, Case, adds_up, figure
from tests.e2e.windowed import tiny_windowed

COUNT, LONGEST = 6, 110
FRONTS = ("front1", "front2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tiers")
    tiny_windowed(folder / "model")
    made = Cluster(folder, folder / "model", chunk_tokens=CHUNK, threads=1, lookup_deadline="60s")
    yield made
    made.stop()


@pytest.fixture(params=BACKENDS, ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    kind: Callable[[Path], Backend] = request.param
    made = kind(tmp_path / "backend")
    yield made
    made.close()


def chunk_prompts(seed: int) -> list[list[int]]:
    """Prompts that share whole chunks and leave no tail: for tiers that know keys alone."""
    rng = random.Random(seed)
    base = [rng.randrange(16, VOCAB) for _ in range(4 * CHUNK)]
    own = [[rng.randrange(16, VOCAB) for _ in range(1 + CHUNK * rng.randrange(2))] for _ in range(COUNT)]
    return [base[: CHUNK * (number % 5)] + tail for number, tail in enumerate(own)]


def restart(cluster: Cluster, backend: Backend) -> None:
    """The store starts over this backend with nothing in memory; the workers find it."""
    store = cluster.processes.get("store")
    if store is not None and store.running:
        assert store.end() == 0
    cluster.tiers = backend.tiers(cluster.store_address)
    cluster.start_store()
    if "front1" not in cluster.processes:
        for number in (1, 2):
            cluster.start_worker(f"worker{number}")
        for number in (1, 2):
            cluster.start_frontend(f"front{number}", f"worker{number}")
    for front in FRONTS:
        cluster.wait_healthy(front, watch=[store for name, store in cluster.processes.items() if "worker" in name])
    wait_for("the tier", lambda: backend.ready(cluster.store_values()))


def test_a_hit_from_this_tier_is_exact_and_its_answer_the_same(cluster: Cluster, backend: Backend) -> None:
    seed = sum(backend.name.encode())
    prompts = chunk_prompts(seed)
    if backend.partial:
        prompts = sharing_prompts(VOCAB, CHUNK, WINDOW, COUNT, seed=seed, longest=LONGEST)
    case = Case(cluster, prompts, greedy_reference(cluster.model, prompts, OUTPUT), PrefixOracle())
    restart(cluster, backend)
    case.ask_all("front1", known=False)
    assert cluster.store_values().get(f"tier.{backend.name}.promoted_bytes", 0) == 0
    first = cluster.processes["store"].pid

    restart(cluster, backend)
    values = cluster.store_values()
    assert cluster.processes["store"].pid != first
    assert values.get("host.readopted", 0) == 0 and values["host.bytes_used"] == 0, "nothing is in memory"
    before = cluster.figures("front2")
    cached = case.ask_all("front2", known=True)
    after, values = cluster.figures("front2"), cluster.store_values()
    grown = {source: figure(after, f"cached.{source}") - figure(before, f"cached.{source}")
             for source in (backend.name, "host", "device")}  # fmt: skip
    assert cached > 0 and adds_up(sum(grown.values()), after, cached)
    assert grown[backend.name] > 0 and values[f"tier.{backend.name}.promoted_bytes"] > 0
