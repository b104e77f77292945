"""The compatibility publisher: what a consumer that knows only workers gets to see of a store and its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from forebay.events.errors import TooManyStreams
from forebay.events.fanout import WorkerStreams
from forebay.events.holdings import HeldIn, Holdings
from forebay.events.publisher import EventPublisher, PublisherLimits, StreamOptions
from forebay.events.relay import Relay
from forebay.events.schema import CPU, GPU, LOCAL, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from forebay.events.subscriber import EventSubscriber, Received
from tests.events.support import LOOPBACK, keys_of, tokens_of

HOST, FILES, DEVICE = HeldIn(CPU, LOCAL), HeldIn(STORAGE, LOCAL), HeldIn(GPU, LOCAL)
KEYS, TOKENS = keys_of(8), tokens_of(8)
LIMITS = PublisherLimits(heartbeat_seconds=0.2, ring_batches=50)


def run(first: int, end: int, place: HeldIn = HOST) -> BlockStored:
    parent = KEYS[first - 1] if first else None
    return BlockStored(
        list(KEYS[first:end]), parent, TOKENS[16 * first : 16 * end], 16, medium=place.medium, locality=place.locality
    )


def gone(first: int, end: int, place: HeldIn = HOST) -> BlockRemoved:
    return BlockRemoved(list(KEYS[first:end]), place.medium, locality=place.locality, reason="evicted")


def follow(endpoint: str, replay: str | None) -> EventSubscriber:
    return EventSubscriber(endpoint, replay=replay, from_start=True, replay_timeout=0.5, retry_seconds=0.2)


class Told:
    """A stream that a test speaks on, with a snapshot of what it said. It can start again."""

    def __init__(self) -> None:
        self.endpoint = self.replay = LOOPBACK
        self.numbers = 0
        self.start("e1")

    def start(self, epoch: str) -> None:
        self.held = Holdings()
        self.publisher = EventPublisher(
            self.endpoint, replay=self.replay, topic="kv@store@tiny",
            options=StreamOptions(epoch=epoch, first_seq=self.numbers, limits=LIMITS), snapshot=self.held.snapshot,
        )  # fmt: skip
        assert self.publisher.replay_endpoint is not None
        self.endpoint, self.replay = self.publisher.endpoint, self.publisher.replay_endpoint

    def again(self, *events: KVEvent) -> None:
        """Killed and started, on the same ports and under higher numbers; holds only this now."""
        self.numbers = self.publisher.stats().next_seq + 1000
        self.publisher.close()
        self.start("e2")
        self.held.apply_events(events)

    def say(self, *events: KVEvent) -> None:
        self.held.apply_events(events)
        self.publisher.publish(events, 0.0)

    def subscriber(self) -> EventSubscriber:
        return follow(self.endpoint, self.replay)


class House:
    """A store, workers with streams of their own, the relay, and consumers of it; all turned by hand."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.store = Told()
        self.workers = {name: Told() for name in ("w0", "w1")}
        self.sources = [self.store, *self.workers.values()]
        for source in self.sources:
            stack.callback(lambda source=source: source.publisher.close())
        self.relay: Relay | None = None
        self.beliefs: dict[str, Holdings] = {}
        self.subscribers: dict[str, EventSubscriber] = {}
        self.seen: dict[str, list[Received]] = {}

    def begin(self) -> None:
        options = StreamOptions(epoch="relay", limits=LIMITS)
        self.relay = Relay(
            self.store.subscriber(),
            {name: worker.subscriber() for name, worker in self.workers.items()},
            lambda shared: WorkerStreams(LOOPBACK, model="tiny", shared=shared, replay=LOOPBACK, options=options),
        )
        self.stack.callback(self.relay.close)
        relay = self.relay
        self.turn(lambda: len(relay.store_blocks) == len(self.store.held))

    def join(self, name: str, worker: str) -> None:
        """A consumer of this worker's stream."""
        assert self.relay is not None
        stream = self.relay.streams.workers[worker]
        subscriber = follow(stream.endpoint, stream.replay_endpoint)
        self.stack.callback(subscriber.close)
        self.subscribers[name], self.beliefs[name], self.seen[name] = subscriber, Holdings(), []

    def settle(self, **expected: dict[HeldIn, int]) -> None:
        """Let everything run until the consumers believe this."""
        self.turn(lambda: all(held(self.beliefs[name]) == want for name, want in expected.items()))
        assert {name: held(self.beliefs[name]) for name in expected} == expected

    def turn(self, done: Callable[[], bool]) -> None:
        """Let everything run: streams are served in threads of their own, so that nobody waits for anybody."""
        over = threading.Event()

        def serve(work: Callable[[], object]) -> None:
            while not over.is_set():
                work()
                time.sleep(0.002)

        def serve_sources() -> None:
            for source in self.sources:
                source.publisher.poll_replay()
                source.publisher.tick(time.time())

        threads = [threading.Thread(target=serve, args=(serve_sources,))]
        if self.relay is not None:
            threads.append(threading.Thread(target=serve, args=(self.relay.turn,)))
        for thread in threads:
            thread.start()
        until = time.monotonic() + 60
        while not done() and time.monotonic() < until:
            for name, subscriber in self.subscribers.items():
                while (received := subscriber.receive(0.02)) is not None:
                    self.seen[name].append(received)
                    self.beliefs[name].apply(received)
        over.set()
        for thread in threads:
            thread.join()

    def events(self, name: str) -> list[KVEvent]:
        return [event for received in self.seen[name] for event in received.batch.events]


def held(holdings: Holdings) -> dict[HeldIn, int]:
    return {place: len(holdings.held(place)) for place in holdings.places()}


@pytest.fixture
def house() -> Iterator[House]:
    with ExitStack() as stack:
        yield House(stack)


def test_the_store_is_told_on_every_worker_and_a_device_on_its_own(house: House) -> None:
    house.store.say(run(0, 2))
    house.begin()
    for name in ("w0", "w1"):
        house.join(name, name)
    house.settle(w0={HOST: 2}, w1={HOST: 2})
    house.store.say(run(2, 4), run(0, 4, FILES))
    house.workers["w0"].say(run(0, 3, DEVICE))
    house.settle(w0={HOST: 4, FILES: 4, DEVICE: 3}, w1={HOST: 4, FILES: 4})
    assert {received.topic for received in house.seen["w1"]} == {"kv@w1@tiny"}
    numbers = [received.seq for received in house.seen["w0"]]
    assert numbers == sorted(numbers) and house.subscribers["w0"].counters.missed == 0
    assert {event.epoch for event in house.events("w0")} == {"relay"}, "a stream has one owner"


def test_a_late_joiner_knows_what_everybody_knows(house: House) -> None:
    house.store.say(run(0, 4), run(0, 2, FILES))
    house.workers["w1"].say(run(0, 2, DEVICE))
    house.begin()
    house.join("early", "w1")
    house.store.say(gone(2, 4))
    house.settle(early={HOST: 2, FILES: 2, DEVICE: 2})
    house.join("late", "w1")
    house.settle(late={HOST: 2, FILES: 2, DEVICE: 2})


def test_a_hot_buffer_that_is_reset_costs_its_own_tier_alone(house: House) -> None:
    house.store.say(run(0, 4))
    house.workers["w0"].say(run(0, 3, DEVICE))
    house.begin()
    house.join("w0", "w0")
    house.settle(w0={HOST: 4, DEVICE: 3})
    house.workers["w0"].say(AllBlocksCleared())
    house.workers["w0"].say(run(0, 1, DEVICE))
    house.settle(w0={HOST: 4, DEVICE: 1})
    assert not any(isinstance(event, AllBlocksCleared) for event in house.events("w0"))
    removed = [event for event in house.events("w0") if isinstance(event, BlockRemoved)]
    assert [(event.medium, event.reason, len(event.block_hashes)) for event in removed] == [(GPU, "cleared", 3)]


def test_a_store_that_starts_again_is_told_as_what_is_gone_and_what_is_new(house: House) -> None:
    house.store.say(run(0, 4), run(0, 4, FILES))
    house.workers["w0"].say(run(0, 2, DEVICE))
    house.begin()
    house.join("w0", "w0")
    house.settle(w0={HOST: 4, FILES: 4, DEVICE: 2})
    before = len(house.seen["w0"])
    house.store.again(run(0, 4, FILES), run(0, 1))
    house.store.say(run(4, 5, FILES))
    house.settle(w0={HOST: 1, FILES: 5, DEVICE: 2})
    after = [event for received in house.seen["w0"][before:] for event in received.batch.events]
    assert sum(len(event.block_hashes) for event in after if isinstance(event, BlockRemoved)) == 3
    assert sum(len(event.block_hashes) for event in after if isinstance(event, BlockStored)) == 1
    assert not any(isinstance(event, AllBlocksCleared) for event in after)


def test_a_worker_that_starts_again_keeps_the_store_in_view(house: House) -> None:
    house.store.say(run(0, 4))
    house.workers["w0"].say(run(0, 4, DEVICE))
    house.begin()
    house.join("w0", "w0")
    house.settle(w0={HOST: 4, DEVICE: 4})
    house.workers["w0"].again()
    house.workers["w0"].say(run(0, 1, DEVICE))
    house.settle(w0={HOST: 4, DEVICE: 1})


def test_an_unknown_medium_is_not_retold(house: House) -> None:
    house.begin()
    house.join("w0", "w0")
    house.store.say(run(0, 1), run(0, 4, HeldIn("FS", LOCAL)))
    house.settle(w0={HOST: 1})
    assert house.beliefs["w0"].counters.unknown_media == 0
    assert house.relay is not None and house.relay.statistics()["store_unknown_media"] == 4


def test_a_worker_that_leaves_frees_its_place_and_streams_are_capped() -> None:
    streams = WorkerStreams(LOOPBACK, model="tiny", shared=lambda: (), max_workers=2)
    try:
        first = streams.attach("w0")
        assert streams.attach("w0") is first and streams.attach("w1") is not first
        with pytest.raises(TooManyStreams, match="run another relay"):
            streams.attach("w2")
        streams.detach("w0")
        streams.attach("w2")
        streams.publish_own("w0", [run(0, 1)], 0.0)
        streams.publish_shared([run(0, 1)], 0.0)
        figures = streams.statistics()
        assert (figures["workers"], figures["workers_max"], figures["events"]) == (2, 2, 2)
    finally:
        streams.close()


def test_a_shared_batch_is_encoded_once_and_its_bytes_are_in_every_ring() -> None:
    streams = WorkerStreams(LOOPBACK, model="tiny", shared=lambda: ())
    try:
        for name in "abc":
            streams.attach(name)
        streams.publish_shared([run(0, 4)], 0.0)
        payloads = {id(stream._history.ring._payloads[0]) for stream in streams.workers.values()}
        assert len(payloads) == 1
    finally:
        streams.close()
