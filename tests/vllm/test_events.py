"""With `events`, vLLM tells the store's events in its own stream: who hears the engine alone knows the store as well as
who hears the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.connectors.relay import stream_of
from forebay.events.schema import CPU, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored
from forebay.events.subscriber import EventSubscriber
from forebay.kvstore.client import StoreClient
from forebay.testing.cluster import Cluster
from tests.vllm import models
from tests.vllm.conftest import server
from tests.vllm.prompts import longest_hit, sharing
from tests.vllm.servers import Engine, running, settle, wait

LABEL = "tiny"
Held = dict[str, dict[int | bytes, tuple[int, ...]]]
"""By medium: tokens of each block."""


@pytest.fixture(scope="module")
def told(folder: Path) -> Iterator[Cluster]:
    """A store that tells its events."""
    (folder / "told").mkdir()
    cluster = Cluster(folder / "told", models.qwen3(folder / "told" / "model"), dtype="float32")
    cluster.start_store(events=f"ipc://{cluster.folder}/s.events", replay=f"ipc://{cluster.folder}/s.replay")
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def teller(told: Cluster) -> Iterator[Engine]:
    """vLLM that tells them again, beside those of its device."""
    events = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", '
        f'"endpoint": "ipc://{told.folder}/v.events", "replay_endpoint": "ipc://{told.folder}/v.replay"}}'
    )
    one = server(told, "teller", "--kv-events-config", events, settings={"events": True, "label": LABEL})
    with running(one):
        yield one


class Listener:
    """What somebody believes who applies one stream from its start; `stored` is all that it was told."""

    def __init__(self, endpoint: str, replay: str | None) -> None:
        self.subscriber = EventSubscriber(endpoint, replay=replay, from_start=True)
        self.held: Held = {CPU: {}, STORAGE: {}}
        self.stored: list[BlockStored] = []

    def listen(self) -> Held:
        """All that has come by now."""
        while (received := self.subscriber.receive(0.3)) is not None:
            for event in received.batch.events:
                assert not isinstance(event, AllBlocksCleared), "it would be taken for the engine's own blocks"
                if event.medium in self.held:
                    self._apply(event)
        return self.held

    def _apply(self, event: BlockStored | BlockRemoved) -> None:
        held = self.held[str(event.medium)]
        if isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                held.pop(block, None)
            return
        self.stored.append(event)
        size = event.block_size
        for place, block in enumerate(event.block_hashes):
            held[block] = tuple(event.token_ids[place * size : (place + 1) * size])


@pytest.fixture(scope="module")
def listeners(told: Cluster, teller: Engine) -> Iterator[tuple[Listener, Listener]]:
    """One of the store's own stream, one of vLLM's."""
    with StoreClient(told.store_address) as client:
        stats = client.stats()
    namespace = next(bytes.fromhex(row["id"]) for row in stats.namespaces if row["label"] == LABEL)
    stream = stream_of(namespace, stats.namespaces, stats.info)
    assert stream is not None and stream.replay is not None
    engines = tuple(f"ipc://{told.folder}/v.{name}" for name in ("events", "replay"))
    both = Listener(stream.endpoint, stream.replay), Listener(*engines)
    yield both
    for one in both:
        one.subscriber.close()


def step(engine: Engine) -> None:
    """vLLM takes events when it steps: something short, which isn't stored."""
    engine.complete([1, 2, 3], 1)


def test_who_hears_the_engine_knows_what_the_store_holds(
    told: Cluster, teller: Engine, listeners: tuple[Listener, Listener]
) -> None:
    prompts = sharing(6, seed=31)
    for prompt in prompts:
        teller.complete(prompt)
    settle(told)

    def same() -> bool:
        step(teller)
        of_store, of_engine = (one.listen() for one in listeners)
        return of_engine == of_store and bool(of_store[STORAGE])

    wait("the same beliefs", same)
    known = set(listeners[1].held[CPU].values())
    for prompt in prompts:
        units = [prompt[start : start + 16] for start in range(0, longest_hit(prompt), 16)]
        assert known.issuperset(units)
    assert {event.locality for event in listeners[1].stored} == {event.locality for event in listeners[0].stored}
    assert {event.block_size for event in listeners[1].stored} == {16}


def test_what_the_store_loses_the_engine_takes_back(
    told: Cluster, teller: Engine, listeners: tuple[Listener, Listener]
) -> None:
    assert listeners[1].held[CPU]
    with StoreClient(told.store_address) as client:
        client.clear()

    def empty() -> bool:
        step(teller)
        of_store, of_engine = (one.listen() for one in listeners)
        return not any(of_store.values()) and not any(of_engine.values())

    wait("nothing left", empty)
