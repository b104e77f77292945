from __future__ import annotations

import threading
import time

from forebay.events.publisher import EventPublisher, PublisherLimits, StreamOptions
from forebay.events.subscriber import EventSubscriber
from forebay.events.threaded import PublisherThread, run_in_thread
from tests.events.support import LOOPBACK, stored


def test_many_threads_may_publish_and_every_batch_gets_a_number() -> None:
    store = run_in_thread(EventPublisher(LOOPBACK, replay=LOOPBACK), interval=0.005)
    threads = [threading.Thread(target=lambda: [store.publish([stored()]) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with EventSubscriber(store.endpoint, replay=store.replay_endpoint, from_start=True) as subscriber:
        seqs: list[int] = []
        while len(seqs) < 200 and (received := subscriber.receive(2.0)):
            seqs.append(received.seq)
    store.close()
    assert seqs == list(range(200))


def test_what_does_not_fit_into_the_queue_is_lost_and_leaves_a_gap() -> None:
    gate = threading.Event()

    class Stuck(EventPublisher):
        """Its thread waits at its first tick, so that the queue fills up."""

        def tick(self, now: float) -> None:
            gate.wait(10)
            super().tick(now)

    publisher = Stuck(LOOPBACK, replay=LOOPBACK)
    store = PublisherThread(publisher, capacity=3, interval=0.001)
    time.sleep(0.05)
    results = [store.publish([stored()]) for _ in range(8)]
    assert results.count(False) == 5 and store.queued == 3
    gate.set()
    deadline = time.monotonic() + 60
    while store.queued and time.monotonic() < deadline:
        time.sleep(0.005)
    assert store.publish([stored()])
    store.close()
    stats = publisher.stats()
    assert stats.next_seq == 9 and stats.lost_batches == 5


def test_a_loss_is_owned_up_to_even_if_nothing_is_published_after_it() -> None:
    gate = threading.Event()

    class Stuck(EventPublisher):
        def tick(self, now: float) -> None:
            gate.wait(10)
            super().tick(now)

    publisher = Stuck(LOOPBACK)
    store = PublisherThread(publisher, capacity=1, interval=0.001)
    time.sleep(0.05)
    assert [store.publish([stored()]) for _ in range(4)] == [True, False, False, False]
    gate.set()
    deadline = time.monotonic() + 60
    while publisher.stats().next_seq < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    store.close()
    assert publisher.stats().next_seq == 4 and publisher.stats().lost_batches == 3


def test_closing_publishes_what_is_queued_first() -> None:
    publisher = EventPublisher(LOOPBACK)
    store = run_in_thread(publisher)
    for _ in range(500):
        assert store.publish([stored()])
    store.close()
    assert publisher.stats().next_seq == 500
    assert store.publish([stored()]) is False
    store.close()


def test_heartbeats_come_by_themselves() -> None:
    options = StreamOptions(limits=PublisherLimits(heartbeat_seconds=0.05))
    publisher = EventPublisher(LOOPBACK, options=options)
    store = run_in_thread(publisher, interval=0.005)
    deadline = time.monotonic() + 60
    while publisher.stats().heartbeats < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    store.close()
    assert publisher.stats().heartbeats >= 2
