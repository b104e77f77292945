"""The transfer thread: order, bounds, and what becomes of pushes when the store does not play along."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from forebay.kvstore.identity import Chain, Namespace, pack_tokens, root_key
from forebay.kvstore.protocol import NewChunk
from forebay.workers import pushing
from forebay.workers.counters import Counters
from forebay.workers.moves import GroupRoom, Pull, Pulled, Push, Pushed, StoreChanged
from forebay.workers.prefix import GroupShape
from forebay.workers.pushing import PushQueue
from forebay.workers.ranks.errors import RankLost
from forebay.workers.transfer import Transfer, TransferConfig
from tests.scheduler.simulation import geometry
from tests.workers.fake_store import FakeStore
from tests.workers.harness import wait_until

CHUNK = 32
GROUP = geometry("full")
NAMESPACE = Namespace(weights=b"w" * 32, groups=(GROUP,), chunk_tokens=CHUNK)
BLOCKS = 16


@dataclass
class Ear:
    """Collects what the transfer thread delivers."""

    pushed: list[Pushed] = field(default_factory=list)
    pulled: list[Pulled] = field(default_factory=list)
    connected: list[bool] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, message: Any) -> None:
        with self.lock:
            if isinstance(message, Pushed):
                self.pushed.append(message)
            elif isinstance(message, Pulled):
                self.pulled.append(message)
            elif isinstance(message, StoreChanged):
                self.connected.append(message.connected)


def pool() -> torch.Tensor:
    return torch.arange(BLOCKS * 2 * 16 * 2, dtype=torch.float32).view(BLOCKS, 1, 2, 1, 16, 2)


@contextmanager
def transfer(store: FakeStore, **settings: Any) -> Iterator[tuple[Transfer, Ear]]:
    ear = Ear()
    config = TransferConfig("unix:///nowhere", NAMESPACE, **settings)
    shapes = [GroupShape(GROUP, CHUNK, 64)]
    made = Transfer(config, shapes, {"full": pool()}, ear, client=store.client())  # type: ignore[arg-type]
    made.start()
    try:
        yield made, ear
    finally:
        made.stop(2)


def pushes(count: int, tenant: str = "t") -> list[Push]:
    """Consecutive chunks of one sequence, each from two blocks."""
    tokens = list(range(CHUNK * count))
    chain = Chain(root_key(NAMESPACE.id), tokens, chunk_tokens=CHUNK)
    made = []
    for index in range(count):
        start, end = index * CHUNK, (index + 1) * CHUNK
        chunk = NewChunk(0, chain.key_at(end), chain.key_at(start), start, pack_tokens(tokens[start:end]))
        made.append(Push("r", tenant, chunk, (2 * index, 2 * index + 1), 2 * GROUP.granule_bytes))
    return made


def test_chunks_are_stored_with_their_bytes_in_the_order_they_were_offered() -> None:
    store = FakeStore()
    with transfer(store) as (t, ear):
        wait_until("connected", lambda: t.connected)
        offered = pushes(4)
        assert all(t.push(push) for push in offered)
        wait_until("stored", lambda: len(ear.pushed) == 4)
    assert store.order == [push.chunk for push in offered]
    assert not any(done.lost for done in ear.pushed)
    rows = pool().view(BLOCKS, -1).view(torch.uint8).numpy()
    for push in offered:
        stored = store.chunks[0, push.chunk.key]
        assert bytes(stored.payload) == b"".join(rows[block].tobytes() for block in push.blocks)
        assert len(stored.checksums) == 8 * len(push.blocks)


def test_a_lost_store_loses_what_was_queued_and_says_so() -> None:
    store = FakeStore()
    with transfer(store) as (t, ear):
        wait_until("connected", lambda: t.connected)
        store.hung = True
        for push in pushes(3):
            t.push(push)
        wait_until("under way", lambda: t.pushes_running > 0)
        store.lose_connections()
        store.hung = False
        wait_until("answered", lambda: len(ear.pushed) == 3)
        assert all(done.lost for done in ear.pushed)
        wait_until("told", lambda: ear.connected == [True, False])
        store.up = True
        wait_until("back", lambda: t.connected)


def test_a_store_that_hangs_is_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "ANSWER_S", 0.1)
    store = FakeStore()
    with transfer(store) as (t, ear):
        wait_until("connected", lambda: t.connected)
        store.hung = True
        t.push(pushes(1)[0])
        wait_until("given up", lambda: ear.pushed)
        assert ear.pushed[0].lost
        wait_until("disconnected", lambda: False in ear.connected)
        store.hung = False


def test_shedding_answers_everything_that_only_waits() -> None:
    store = FakeStore()
    with transfer(store) as (t, ear):
        wait_until("connected", lambda: t.connected)
        store.hung = True
        first, *rest = pushes(4)
        t.push(first)
        wait_until("under way", lambda: t.pushes_running > 0 and not len(t.queue))
        for push in rest:
            t.push(push)
        t.shed()
        assert [done.push for done in ear.pushed] == rest
        store.hung = False
        wait_until("the first", lambda: len(ear.pushed) == 4)
    assert store.order == [first.chunk]


def test_stopping_stores_what_is_queued() -> None:
    store = FakeStore()
    with transfer(store) as (t, _):
        wait_until("connected", lambda: t.connected)
        for push in pushes(5):
            t.push(push)
    assert len(store.order) == 5


def test_stopping_gives_up_on_a_store_that_hangs() -> None:
    store = FakeStore()
    with transfer(store) as (t, ear):
        wait_until("connected", lambda: t.connected)
        store.hung = True
        t.push(pushes(1)[0])
        wait_until("under way", lambda: t.pushes_running > 0)
        t.stop(0.1)
        assert ear.pushed[0].lost


def test_the_queue_counts_bytes_and_batches_by_tenant() -> None:
    counters = Counters()
    size = 2 * GROUP.granule_bytes
    queue = PushQueue(4 * size, counters)
    a, b = pushes(2, "a"), pushes(3, "b")
    assert [queue.offer(push) for push in (*a, *b)] == [True] * 4 + [False]
    assert queue.bytes == 4 * size and counters["push.dropped"] == 1
    assert queue.take() == a
    assert queue.take() == b[:2]
    assert queue.take() == [] and queue.bytes == 0


def test_the_queue_batches_by_retention_and_the_store_is_told() -> None:
    store = FakeStore()
    with transfer(store) as (t, ear):
        wait_until("connected", lambda: t.connected)
        offered = [dataclasses.replace(push, retain_s=60.0 * (at == 1)) for at, push in enumerate(pushes(3))]
        assert all(t.push(push) for push in offered)
        wait_until("stored", lambda: len(ear.pushed) == 3)
    assert store.retained == [0.0, 60.0, 0.0]


def test_a_rank_that_is_lost_in_a_load_is_a_line_in_the_log_and_the_load_is_answered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*asked: object) -> Pulled:
        raise RankLost("rank 1 is gone")

    with caplog.at_level("WARNING"), transfer(FakeStore()) as (made, ear):
        wait_until("connected", lambda: made.connected)
        monkeypatch.setattr(made._puller, "pull", lost)
        made.pull(Pull("r", b"", b"", b"", 16, 0, ()))
        wait_until("the answer", lambda: ear.pulled)
    assert [(pulled.request, pulled.hit) for pulled in ear.pulled] == [("r", 0)]
    assert "a pull failed: rank 1 is gone" in caplog.text and "Traceback" not in caplog.text


def test_a_pull_that_outlived_its_connection_brings_nothing_that_was_pinned_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited for room while the connection was lost, and there was another one before it looked again."""
    monkeypatch.setattr("forebay.workers.transfer.WATCH_S", 0.005)
    monkeypatch.setattr("forebay.workers.hot.promising.LOOK_S", 0.7)
    monkeypatch.setattr("forebay.workers.hot.bringing.PATIENCE_S", 1.5)
    store = FakeStore()
    with transfer(store) as (t, ear):
        wait_until("connected", lambda: t.connected)
        for push in (stored := pushes(2)):
            t.push(push)
        wait_until("stored", lambda: len(ear.pushed) == 2)
        store.room = 0
        tokens = list(range(CHUNK * 2))
        chain = Chain(root_key(NAMESPACE.id), tokens, chunk_tokens=CHUNK)
        room = GroupRoom((), (8,))
        t.pull(
            Pull("r", root_key(NAMESPACE.id), pack_tokens(tokens), chain.chunk_keys(len(chain.keys)), len(tokens), 0,
                 (room,), hosted=frozenset({0}), chunks=4)
        )  # fmt: skip
        wait_until("it waits for room", lambda: store.lookups == 1 and store.leases == 1)
        time.sleep(0.1)
        store.lose_connections()
        store.up, store.room = True, 100
        wait_until("there is another one", lambda: ear.connected == [True, False, True])
        wait_until("answered", lambda: ear.pulled)
        assert ear.pulled[0].hit == ear.pulled[0].aside == 0 and not ear.pulled[0].hosted
        assert ear.pulled[0].refused == "now", "it is to ask again"
        wait_until("let go of", lambda: store.leases == store.released and not store.asides)
        assert len(stored) == 2 and t.gauges()["hosted.leases"] == 0
