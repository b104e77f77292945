"""Ranks that read rows of one and the same chunks in the store's pool: real processes, tiny sparse models in fp64.

They say what one process says that holds everything, and come to the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.testing.cluster import wait_for
from tests.ranks.conftest import CHUNK, Crowd, Worker
from tests.ranks.hot import HOT, nothing_held, nothing_void, same_decisions
from tests.ranks.test_workers import figures
from tests.workers.hot.conftest import MAKERS, Sparse, load_sparse
from tests.workers.processes import start_store, store_values

COUNT, CHUNKS = 10, 12
COLD = ("--lookup-deadline", "30s", "--hot-buffer-deadline", "60s")


@pytest.fixture(scope="module", params=MAKERS)
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return load_sparse(MAKERS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def worker(sparse: Sparse, crowd: Crowd) -> Iterator[Worker]:
    """Two ranks that have room for one such request."""
    name = sparse.model.info.family
    crowd.start(name, sparse.path, 2, *HOT, "--max-num-batched-tokens", "64")
    yield crowd.worker(name)
    crowd.workers.pop(name).end()


def test_they_answer_as_one_process_that_holds_everything(worker: Worker, sparse: Sparse) -> None:
    prompts = [sparse.text(length, length) for length in (300, 230, 260)]
    for number, prompt in enumerate(prompts):
        worker.front.generate(f"beside {number}", prompt, COUNT)
    for number, prompt in enumerate(prompts):
        assert worker.front.wait(f"beside {number}").tokens == sparse.expected(prompt, COUNT)
    same_decisions(worker)
    nothing_void(worker)
    nothing_held(worker)


def test_they_start_on_a_prefix_of_which_no_row_is_on_a_device(worker: Worker, sparse: Sparse, crowd: Crowd) -> None:
    """Ranks of another worker have computed it; its chunks are pinned once, however many read them."""
    prompt, name = sparse.text(300, 31), f"{sparse.model.info.family}-more"
    worker.front.ask("computed", prompt, 1)
    worker.front.settle()
    crowd.start(name, sparse.path, 2, *HOT, "--max-num-batched-tokens", "64")
    other = crowd.worker(name)
    heard = other.front.ask("loaded", prompt, COUNT)
    assert heard.started is not None and heard.started.cached_tokens == 288
    assert heard.tokens == sparse.expected(prompt, COUNT)
    found = figures(other)
    assert found["hot.started_with_none"] == 1 and found["hosted.host.chunks"] == 288 // CHUNK
    same_decisions(other)
    nothing_void(other)
    nothing_held(other)
    crowd.workers.pop(name).end()


def test_rows_that_only_files_have_come_for_all_of_them_as_they_are_chosen(sparse: Sparse, crowd: Crowd) -> None:
    """The store has been started again, and its memory is empty. What comes is pinned once, and every rank reads it."""
    prompt, name = sparse.text(CHUNKS * CHUNK + 1, 33), f"{sparse.model.info.family}-cold"
    crowd.start(name, sparse.path, 2, *HOT, *COLD, "--max-num-batched-tokens", "64")
    worker = crowd.worker(name)
    worker.front.ask("computed", prompt, 1)
    worker.front.settle()
    wait_for("files", lambda: not sum(v for k, v in store_values(crowd.folder).items() if k.endswith("stores_running")))
    assert crowd.store.end() == 0
    wait_for("no store", lambda: worker.front.stats().store == "down")
    crowd.store = start_store(crowd.folder)
    worker.front.settle()
    before = figures(worker)
    heard = worker.front.ask("cold", prompt, COUNT)
    assert heard.started is not None and heard.started.cached_tokens == CHUNKS * CHUNK
    assert heard.tokens == sparse.expected(prompt, COUNT)
    after = figures(worker)
    assert after["hosted.begun_cold"] == 1 and after["hosted.fs.chunks"] > 0 and after["hot.parked_steps"] > 0
    assert after.get("hot.put_off", 0) == before.get("hot.put_off", 0)
    same_decisions(worker)
    nothing_held(worker)
    crowd.workers.pop(name).end()
