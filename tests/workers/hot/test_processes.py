"""Real processes: a squeezed worker takes rows from every tier, and outlives its store, token for token."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from forebay.testing.cluster import Cluster
from tests.checkpoints import tiny_glm_moe_dsa
from tests.workers.harness import wait_until
from tests.workers.hot.conftest import Sparse, load_sparse

HOT = ("--hot-buffers", "--hot-buffer-rows", "96", "--hot-buffer-pool-tokens", "240")
"""Room for one request with a hot buffer: 240 tokens' rows, where the prompts have 300."""
COUNT = 10


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return load_sparse(tiny_glm_moe_dsa, tmp_path_factory.mktemp("model"))


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, sparse: Sparse) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hot")
    made = Cluster(folder, sparse.path, threads=1, device_memory="8MiB", memory="64MiB")
    made.start_store()
    yield made
    made.stop()


def start(cluster: Cluster, number: int) -> str:
    cluster.start_worker(f"w{number}", extra=HOT)
    cluster.start_frontend(f"f{number}", f"w{number}")
    return f"f{number}"


def end(cluster: Cluster, number: int) -> None:
    for part in ("f", "w"):
        assert cluster.processes[f"{part}{number}"].end() == 0


def test_rows_come_from_the_device_from_host_memory_and_from_files(cluster: Cluster, sparse: Sparse) -> None:
    prompt = sparse.text(300, 21)
    expected = sparse.expected(prompt, COUNT)
    cold = start(cluster, 1)
    assert cluster.complete(cold, prompt, COUNT).token_ids == expected
    assert cluster.figure(cold, "hot.misses") > 0
    cluster.settle(cold)
    end(cluster, 1)

    warm = start(cluster, 2)
    answer = cluster.complete(warm, prompt, COUNT)
    assert answer.token_ids == expected and answer.cached_tokens == 288
    assert cluster.figure(warm, "hosted.host.chunks") > 0 and cluster.figure(warm, "hot.started_with_none") == 1
    end(cluster, 2)

    assert cluster.processes["store"].end() == 0
    cluster.start_store()
    again = start(cluster, 3)
    answer = cluster.complete(again, prompt, COUNT)
    assert answer.token_ids == expected and answer.cached_tokens == 288
    assert cluster.figure(again, "hosted.fs.chunks") > 0
    end(cluster, 3)


def test_a_store_that_is_killed_in_mid_answer_costs_no_token(cluster: Cluster, sparse: Sparse) -> None:
    prompt = sparse.text(300, 22)
    expected = sparse.expected(prompt, 60)
    front = start(cluster, 1)
    said: list[list[int]] = []
    asking = threading.Thread(target=lambda: said.append(cluster.complete(front, prompt, 60).token_ids))
    asking.start()
    wait_until("it reads in host memory", lambda: cluster.figure(front, "hot.misses") > 0, 60)
    cluster.processes["store"].end(signal.SIGKILL)
    cluster.start_store()
    asking.join(120)
    assert said == [expected]
    end(cluster, 1)
