"""Ranks that read rows of one and the same chunks in the store's pool: real processes, tiny sparse models in fp64.

They say what one process says that holds everything, and come to the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.conftest import CHUNK, Crowd, Worker
from tests.ranks.hot import HOT, nothing_held, nothing_void, same_decisions
from tests.ranks.test_workers import figures
from tests.workers.hot.conftest import MAKERS, Sparse, load_sparse

COUNT = 10


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
