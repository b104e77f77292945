"""Ranks that read rows in the store's pool, and what they read there goes, or the store, or one of them: no token is
another one, and a step of a request is void for all of them, or for none.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from forebay.kvstore.header import SlotState, mark_slot
from forebay.kvstore.identity import Chain, decode_namespace, pack_tokens, root_key
from forebay.testing import web
from forebay.testing.ports import free_port
from tests.checkpoints import tiny_glm_moe_dsa
from tests.cli.test_serve import Serving
from tests.e2e.streams import Stream
from tests.ranks.conftest import CHUNK, Crowd, Worker, children, wait_gone
from tests.ranks.hot import HOT, nothing_held, same_decisions
from tests.ranks.test_loss import Front
from tests.ranks.test_workers import figures
from tests.workers.hot.conftest import Sparse, load_sparse
from tests.workers.processes import start_store

LENGTH, KILL_AT = 60, 12


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return load_sparse(tiny_glm_moe_dsa, tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def worker(sparse: Sparse, crowd: Crowd) -> Iterator[Worker]:
    """Two ranks that have room for one such request."""
    crowd.start("hot", sparse.path, 2, *HOT, "--max-num-batched-tokens", "64")
    yield crowd.worker("hot")
    crowd.workers.pop("hot").end()


def in_the_middle(worker: Worker, prompt: list[int]) -> None:
    """Ask for a long answer, and wait until ranks read rows in the pool for it."""
    worker.front.heard.clear()
    worker.front.generate("long", prompt, LENGTH)
    before = figures(worker).get("hot.misses", 0)
    while len(worker.front.heard["long"].tokens) < KILL_AT or figures(worker)["hot.misses"] == before:
        worker.front.receive()


def test_a_slot_that_was_given_away_makes_the_step_void_for_all(worker: Worker, sparse: Sparse, crowd: Crowd) -> None:
    prompt = sparse.text(300, 32)
    before = figures(worker)
    in_the_middle(worker, prompt)
    give_away(worker, crowd, prompt)
    assert worker.front.wait("long").tokens == sparse.expected(prompt, LENGTH)
    after = figures(worker)
    assert after["hot.put_off"] > before.get("hot.put_off", 0), "it was computed anew"
    assert after["hot.void_elsewhere"] > before.get("hot.void_elsewhere", 0) and after["hot.rows_changed"] > 0
    same_decisions(worker)


def give_away(worker: Worker, crowd: Crowd, prompt: list[int]) -> None:
    """What the store has of a prompt's rows becomes other bytes, of other generations, while ranks read there."""
    namespace = decode_namespace(worker.front.describe().namespace)
    root, limit = root_key(namespace.id, b""), len(prompt) // 16 * 16
    keys = Chain(root, prompt, chunk_tokens=CHUNK).chunk_keys(limit // 16)
    with StoreClient(f"{crowd.folder}/store.sock") as client:
        client.register(namespace)
        found = client.lookup(namespace.id, root, pack_tokens(prompt[:limit]), keys, limit=limit)
        rows = [chunk for chunk in found.chunks if chunk.group == 0]
        assert len(rows) > 4
        for chunk in rows:
            payload = client.payload(chunk)
            head = memoryview(payload.obj)[chunk.slot_offset : chunk.payload_offset]  # type: ignore[arg-type]
            mark_slot(head, SlotState.COMMITTED, chunk.generation + 1)
            payload[:] = bytes(len(payload))
            head.release()
            payload.release()


def test_a_store_that_is_killed_in_mid_answer_costs_no_token(worker: Worker, sparse: Sparse, crowd: Crowd) -> None:
    prompt = sparse.text(300, 33)
    in_the_middle(worker, prompt)
    crowd.store.end(signal.SIGKILL)
    crowd.store = start_store(crowd.folder)
    assert worker.front.wait("long").tokens == sparse.expected(prompt, LENGTH)
    assert figures(worker)["store.reconnects"] > 0
    same_decisions(worker)
    nothing_held(worker)


def test_when_a_rank_is_killed_its_successors_go_on_from_the_store(sparse: Sparse, tmp_path: Path) -> None:
    prompt = sparse.text(300, 34)
    serving = Serving(tmp_path, sparse.path, free_port())
    serving.start("--dtype", "float64", "--tensor-parallel-size", "2", "--threads", "1", *HOT)
    try:
        serving.ready()
        worker = serving.pids()["worker"]
        (rank,) = children(worker)
        stream = Stream(Front(serving), "front", prompt, LENGTH)  # type: ignore[arg-type]
        stream.reach(KILL_AT)
        os.kill(rank, signal.SIGKILL)
        seen = len(stream.ids)
        assert stream.done() == sparse.expected(prompt, LENGTH) and seen < LENGTH
        wait_gone([worker, rank])
        assert "has ended (killed by SIGKILL), so this worker ends" in serving.log
        another = serving.pids()["worker"]
        assert "forebay_worker_hot_misses_elsewhere" in metrics(serving), "its successors read rows in the pool, too"
        last = [another, *children(another)]
    finally:
        assert serving.stop() == 0
    wait_gone(last)
    serving.nothing_left()


def metrics(serving: Serving) -> str:
    return web.get(f"http://127.0.0.1:{serving.port}/metrics", timeout=10).text
