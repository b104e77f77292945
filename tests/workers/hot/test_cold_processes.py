"""Real processes: a squeezed worker begins with what only files, a bucket or a peer have, token for token, and a part
of it never leaves its tier; in a store whose memory is smaller than the prefix, too, and when the tier fails meanwhile.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from forebay.testing.cluster import Cluster, wait_for
from tests.e2e.backends import Backend, Bucket, Files, Peer
from tests.parity.test_serving import ALL
from tests.workers.harness import CHUNK
from tests.workers.hot.conftest import MAKERS, Sparse, load_sparse

CHUNKS, COUNT, LONGER = 60, 3, 2 * CHUNK + 2
HOT = ("--hot-buffers", "--hot-buffer-rows", "96", "--hot-buffer-pool-tokens", "240")
PATIENT, HASTY = ("--hot-buffer-deadline", "60s"), ("--hot-buffer-deadline", "3s")
PLENTY, LITTLE = "64MiB", "4MiB"
"""All rows of a prompt, and about three quarters of them: its 60 chunks take 55 KiB each or more."""
EVERY = list(product(MAKERS, (Files, Bucket, Peer)))
CASES = EVERY if ALL else [("deepseek_v32", Files), ("glm_moe_dsa", Bucket), ("glm_moe_dsa", Peer)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sparse]:
    """A family's checkpoint, made once; its rows are larger than those of other tests."""
    return cache(lambda family: load_sparse(MAKERS[family], tmp_path_factory.mktemp(family), kv_lora_rank=60))


@pytest.fixture
def glm(models: Callable[[str], Sparse]) -> Sparse:
    return models("glm_moe_dsa")


@pytest.fixture
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made: Backend = request.param(tmp_path / "backend")
    yield made
    made.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, tmp_path, threads=1, lookup_deadline="60s")
    yield made
    made.stop()


def tiers_of(cluster: Cluster, backend: Backend) -> str:
    """Peers get more time than usual: a machine that is busy with other things must not make a hit a miss."""
    return backend.tiers(cluster.store_address) + ("stall_s = 30\n" if backend.name == "p2p" else "")


def restart(cluster: Cluster, tiers: str, memory: str) -> None:
    """The store starts over these tiers with nothing in memory."""
    if "store" in cluster.processes:
        assert cluster.processes["store"].end() == 0
    cluster.memory, cluster.tiers = memory, f'[store]\nextent = "1MiB"\n{tiers}'
    cluster.start_store()


def fill(cluster: Cluster, sparse: Sparse, prompt: list[int]) -> None:
    """A worker that has room for everything computes a prompt; then it is in the tier."""
    cluster.model, cluster.device_memory = sparse.path, "64MiB"
    cluster.start_pair("w0", "f0")
    assert cluster.complete("f0", prompt, COUNT).token_ids == sparse.expected(prompt, COUNT)
    cluster.settle("f0")
    for name in ("f0", "w0"):
        assert cluster.processes[name].end() == 0


def start_squeezed(cluster: Cluster, *extra: str) -> str:
    cluster.device_memory = "8MiB"
    cluster.start_worker("w1", extra=(*HOT, *extra))
    cluster.start_frontend("f1", "w1")
    return "f1"


@pytest.mark.parametrize(("family", "backend"), CASES, indirect=["backend"])
def test_a_cold_prefix_is_read_row_by_row_however_small_memory_is(
    cluster: Cluster, models: Callable[[str], Sparse], family: str, backend: Backend
) -> None:
    sparse = models(family)
    prompt = sparse.text(CHUNKS * CHUNK + 1, 81)
    restart(cluster, tiers_of(cluster, backend), PLENTY)
    wait_for("the tier", lambda: backend.ready(cluster.store_values()))
    fill(cluster, sparse, prompt)

    restart(cluster, tiers_of(cluster, backend), PLENTY)
    front = start_squeezed(cluster, *PATIENT)
    wait_for("the tier", lambda: backend.ready(cluster.store_values()))
    answer = cluster.complete(front, prompt, COUNT)
    assert answer.token_ids == sparse.expected(prompt, COUNT) and answer.cached_tokens == CHUNKS * CHUNK
    assert cluster.figure(front, f"cached.{backend.name}") == CHUNKS * CHUNK
    brought = cluster.figure(front, f"hosted.{backend.name}.chunks")
    assert 0 < brought < CHUNKS and cluster.figure(front, "hot.chunks_brought") == brought
    assert cluster.store_values()[f"tier.{backend.name}.promoted"] == CHUNKS + brought, "all index keys, and some rows"
    assert cluster.figure(front, "hot.parked_steps") > 0 and cluster.figure(front, "hot.chunks_left") == 0

    other = [*prompt[:-1], (prompt[-1] + 1) % 256]
    restart(cluster, tiers_of(cluster, backend), LITTLE)
    cluster.wait_healthy(front, watch=[cluster.processes["w1"]])
    wait_for("the tier", lambda: backend.ready(cluster.store_values()))
    answer = cluster.complete(front, other, LONGER)
    assert answer.token_ids == sparse.expected(other, LONGER) and answer.cached_tokens >= CHUNKS * CHUNK
    assert cluster.figure(front, "hosted.begun_cold") == 2 and cluster.figure(front, "hot.chunks_left") > 0
    assert cluster.figure(front, "hot.chunks_brought") > brought + CHUNKS, "some came again and again"
    assert cluster.figure(front, "hot.put_off") == 0, "and what was added found room"
    assert cluster.processes["f1"].end() == cluster.processes["w1"].end() == 0


# --- what goes wrong ---------------------------------------------------------------------------------------------


def slow_files(cluster: Cluster, pace: str = "") -> str:
    """Files behind a link that lets so many bytes a second through."""
    (cluster.folder / "pace").write_text(pace)
    return (
        f'[tiers.slow]\nkind = "forebay.testing.throttled:ThrottledFiles"\npace = "{cluster.folder}/pace"\n'
        f'directory = "{cluster.folder}/files"\nquota_bytes = "1GiB"\n'
    )


@dataclass
class Waiting:
    """A request that waits for rows which a hanging tier has."""

    front: str
    prompt: list[int]
    asking: threading.Thread
    said: list[list[int]]

    def answer(self) -> list[int]:
        self.asking.join(120)
        return self.said[0]


def cold_and_waiting(cluster: Cluster, sparse: Sparse, seed: int, *extra: str) -> Waiting:
    prompt = sparse.text(CHUNKS * CHUNK + 1, seed)
    restart(cluster, slow_files(cluster), PLENTY)
    fill(cluster, sparse, prompt)
    restart(cluster, slow_files(cluster, "400000"), PLENTY)
    front = start_squeezed(cluster, *extra)
    said: list[list[int]] = []
    asking = threading.Thread(target=lambda: said.append(cluster.complete(front, prompt, COUNT).token_ids))
    asking.start()
    wait_for("it has begun", lambda: cluster.figure(front, "hosted.begun_cold") == 1)
    (cluster.folder / "pace").write_text("0")
    wait_for("it waits", lambda: cluster.figure(front, "hot.parked") == 1)
    return Waiting(front, prompt, asking, said)


def test_a_tier_that_hangs_costs_its_deadline_and_no_token(cluster: Cluster, glm: Sparse) -> None:
    waiting = cold_and_waiting(cluster, glm, 83, *HASTY)
    wait_for("it was late", lambda: cluster.figure(waiting.front, "hot.chunks_late") > 0)
    (cluster.folder / "pace").write_text("")
    assert waiting.answer() == glm.expected(waiting.prompt, COUNT)
    assert cluster.figure(waiting.front, "hot.put_off") > 0


def test_a_store_that_is_killed_while_one_waits_costs_no_token(cluster: Cluster, glm: Sparse) -> None:
    waiting = cold_and_waiting(cluster, glm, 84, *PATIENT)
    cluster.processes["store"].end(signal.SIGKILL)
    (cluster.folder / "pace").write_text("")
    cluster.start_store()
    assert waiting.answer() == glm.expected(waiting.prompt, COUNT)
    assert cluster.figure(waiting.front, "hot.put_off") > 0


def test_a_damaged_file_costs_no_token(cluster: Cluster, glm: Sparse) -> None:
    """Every tenth one of those with rows."""
    prompt = glm.text(CHUNKS * CHUNK + 1, 85)
    restart(cluster, Files(cluster.folder / "backend").tiers(cluster.store_address), PLENTY)
    fill(cluster, glm, prompt)
    assert cluster.processes["store"].end() == 0
    rows = sorted((cluster.folder / "backend" / "files" / "chunks").glob("*/*/*-00"))
    assert len(rows) >= CHUNKS
    for path in rows[::10]:
        data = bytearray(path.read_bytes())
        data[-1000] ^= 1
        path.write_bytes(data)
    cluster.start_store()
    front = start_squeezed(cluster, *PATIENT)
    assert cluster.complete(front, prompt, COUNT).token_ids == glm.expected(prompt, COUNT)
    assert cluster.figure(front, "hot.chunks_late") > 0
    assert cluster.figure(front, "hot.chunks_lost") > 0, "nobody waited for the deadline"
    assert cluster.store_values()["tier.fs.load_failed"] > 0
