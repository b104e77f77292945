from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from forebay.events.codec import encode_batch
from forebay.events.publisher import END, SNAPSHOT_REQUEST, EventPublisher, PublisherLimits, StreamOptions
from forebay.events.schema import CPU, BlockRemoved, BlockStored, KVEvent, WireProfile, low64
from forebay.events.subscriber import EventSubscriber, Received
from forebay.events.threaded import PublisherThread, run_in_thread
from forebay.testing.ports import free_port
from tests.events.support import LOOPBACK, Held, apply, keys_of, stored


def started(
    *, epoch: str = "e1", endpoint: str = LOOPBACK, replay: str | None = LOOPBACK, ring: int = 1000,
    heartbeat: float = 3600.0, held: Held | None = None, first_seq: int = 0,
) -> PublisherThread:  # fmt: skip
    """A publisher with its own thread. With `held` it can make snapshots of that."""
    limits = PublisherLimits(ring_batches=ring, heartbeat_seconds=heartbeat)

    def snapshot() -> list[BlockStored]:
        return [BlockStored([block], None, list(range(16)), 16, medium=medium) for medium, block in held or ()]

    return run_in_thread(
        EventPublisher(
            endpoint, topic="kv@host@model", replay=replay,
            options=StreamOptions(epoch=epoch, limits=limits, first_seq=first_seq),
            snapshot=None if held is None else snapshot,
        ),
        interval=0.005,
    )  # fmt: skip


class Scripted:
    """A PUB that says exactly what a test tells it to: gaps, repetitions, other epochs, rubbish."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"

    def say(self, seq: int, *events: KVEvent) -> None:
        self.pub.send_multipart([b"kv@host@model", seq.to_bytes(8, "big"), encode_batch(0.0, events).payload])

    def join(self, subscriber: EventSubscriber) -> None:
        """Wait until the subscription has arrived."""
        while not subscriber.counters.malformed:
            self.pub.send(b"probe")
            subscriber.receive(0.01)
        while subscriber.receive(0.05):
            pass
        subscriber.counters.malformed = 0


Answers = dict[int, list[tuple[int, list[KVEvent]]]]


class Answering:
    """A replay socket that answers each start with what a test wrote down for it."""

    def __init__(self, answers: Answers) -> None:
        self.asked: list[int] = []
        self._answers = answers
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Answering:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._over.is_set():
            if not self._router.poll(10):
                continue
            name, _, start = self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for seq, events in self._answers.get(self.asked[-1], []):
                payload = encode_batch(0.0, [*events], profile=WireProfile()).payload
                self._router.send_multipart([name, b"", b"kv@host@model", seq.to_bytes(8, "big"), payload])
            self._router.send_multipart([name, b"", b"", END, b""])


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    publisher = Scripted()
    yield publisher
    publisher.context.destroy(linger=0)


@contextmanager
def listening(endpoint: str, **settings: object) -> Iterator[EventSubscriber]:
    with EventSubscriber(endpoint, **settings) as subscriber:  # type: ignore[arg-type]
        yield subscriber


def take(subscriber: EventSubscriber, count: int, timeout: float = 5.0) -> list[Received]:
    batches: list[Received] = []
    while len(batches) < count and (received := subscriber.receive(timeout)) is not None:
        batches.append(received)
    return batches


def test_a_late_joiner_gets_the_history_and_goes_on_live() -> None:
    store = started()
    for n in range(5):
        store.publish([stored(n + 1)])
    with listening(store.endpoint, replay=store.replay_endpoint, from_start=True) as subscriber:
        batches = take(subscriber, 5)
        store.publish([stored(9)])
        store.publish([stored(10)])
        batches += take(subscriber, 2)
    store.close()
    assert [b.seq for b in batches] == list(range(7))
    assert [b.replayed for b in batches[:5]] == [True] * 5
    assert {b.missed for b in batches} == {0} and subscriber.counters.restarts == 0
    assert subscriber.epoch == "e1"


def test_from_start_on_a_quiet_stream_needs_no_live_batch() -> None:
    store = started(held={(CPU, 7)}, ring=1)
    for _ in range(3):
        store.publish([stored()])
    with listening(store.endpoint, replay=store.replay_endpoint, from_start=True) as subscriber:
        batches = take(subscriber, 1)
    store.close()
    assert batches[0].compacted and batches[0].missed == 0 and batches[0].seq == 2


def test_a_gap_is_filled_from_the_replay_socket(scripted: Scripted) -> None:
    store = started(replay=LOOPBACK)
    for n in range(6):
        store.publish([stored(n + 1)])
    with listening(scripted.endpoint, replay=store.replay_endpoint) as subscriber:
        scripted.join(subscriber)
        scripted.say(1, stored(2))
        scripted.say(5, stored(6))
        batches = take(subscriber, 5)
    store.close()
    assert [b.seq for b in batches] == [1, 2, 3, 4, 5]
    assert [b.replayed for b in batches] == [False, True, True, True, True]
    assert [len(b.batch.events[0].block_hashes) for b in batches] == [2, 3, 4, 5, 6]  # type: ignore[union-attr]
    assert subscriber.counters.gaps == 1 and subscriber.counters.missed == 0


def test_a_gap_without_a_replay_socket_is_reported(scripted: Scripted) -> None:
    with listening(scripted.endpoint) as subscriber:
        scripted.join(subscriber)
        for seq in (3, 4, 9):
            scripted.say(seq, stored())
        batches = take(subscriber, 3)
    assert [(b.seq, b.missed) for b in batches] == [(3, 0), (4, 0), (9, 4)]


def test_a_replay_that_has_not_all_of_it_says_how_much_is_missing(scripted: Scripted) -> None:
    store = started(ring=2)
    for _ in range(10):
        store.publish([stored()])
    with listening(scripted.endpoint, replay=store.replay_endpoint) as subscriber:
        scripted.join(subscriber)
        scripted.say(1, stored())
        scripted.say(9, stored())
        batches = take(subscriber, 3)
    store.close()
    assert [(b.seq, b.missed) for b in batches] == [(1, 0), (8, 6), (9, 0)]


def test_a_gap_that_no_replay_fills_is_answered_with_a_snapshot(scripted: Scripted) -> None:
    parts: Answers = {SNAPSHOT_REQUEST: [(9, [stored(3)]), (9, [stored(1, first=800)])]}
    with (
        Answering({2: [(8, [stored(9)])], **parts}) as router,
        listening(scripted.endpoint, replay=router.endpoint) as subscriber,
    ):
        scripted.join(subscriber)
        for seq in (1, 9, 10):
            scripted.say(seq, stored(2))
        batches = take(subscriber, 4)
    assert [(b.seq, b.restart, b.missed) for b in batches] == [
        (1, None, 0), (9, "snapshot", 0), (9, None, 0), (10, None, 0),
    ]  # fmt: skip
    assert router.asked == [2, SNAPSHOT_REQUEST], "once: a snapshot brings no second recovery"
    assert (subscriber.counters.snapshots, subscriber.counters.restarts) == (1, 0)
    assert subscriber.counters.duplicates == 1, "the live batch was in the snapshot"


def test_what_a_failed_replay_could_not_bring_is_asked_for_again(scripted: Scripted) -> None:
    now = [0.0]
    with Answering({}) as router:
        silent = Answering({})  # bound and never served
        with listening(
            scripted.endpoint, replay=silent.endpoint, replay_timeout=0.1, retry_seconds=30, clock=lambda: now[0]
        ) as subscriber:
            scripted.join(subscriber)
            for seq in (1, 3, 9):
                scripted.say(seq, stored(2))
            assert [(b.seq, b.missed) for b in take(subscriber, 3)] == [(1, 0), (3, 1), (9, 5)]
            assert subscriber.counters.failed_replays == 1, "who has just failed isn't asked at every gap"
            subscriber._replay_endpoint = router.endpoint
            router._answers[SNAPSHOT_REQUEST] = [(10, [stored(3)])]
            now[0] = 31.0
            scripted.say(10, stored(2))
            batches = take(subscriber, 2)
        silent._context.destroy(linger=0)
    assert [(b.seq, b.restart) for b in batches] == [(10, None), (10, "snapshot")]
    assert router.asked == [SNAPSHOT_REQUEST]


def test_an_answer_without_an_end_of_its_bytes_is_given_up(scripted: Scripted) -> None:
    with (
        Answering({2: [(2, [stored(50)])] * 100}) as router,
        listening(scripted.endpoint, replay=router.endpoint, replay_bytes=20_000) as subscriber,
    ):
        scripted.join(subscriber)
        for seq in (1, 9):
            scripted.say(seq, stored(2))
        batches = take(subscriber, 3)
    assert batches[-1].seq == 9 and batches[-1].missed == 6
    assert subscriber.counters.failed_replays == 1


def test_a_replay_socket_that_is_silent_costs_its_timeout_and_is_counted(
    scripted: Scripted,
) -> None:
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    with listening(scripted.endpoint, replay=f"tcp://127.0.0.1:{port}", replay_timeout=0.2) as subscriber:
        scripted.join(subscriber)
        scripted.say(1, stored())
        scripted.say(3, stored())
        batches = take(subscriber, 2)
    context.destroy(linger=0)
    assert [(b.seq, b.missed) for b in batches] == [(1, 0), (3, 1)]
    assert subscriber.counters.failed_replays == 1


def test_a_sequence_that_goes_backwards_is_a_restart(scripted: Scripted) -> None:
    with listening(scripted.endpoint) as subscriber:
        scripted.join(subscriber)
        for seq in (41, 42, 0, 1):
            scripted.say(seq, BlockRemoved([1], CPU))
        batches = take(subscriber, 4)
    assert [(b.seq, b.restart) for b in batches] == [
        (41, None),
        (42, None),
        (0, "sequence"),
        (1, None),
    ]
    assert subscriber.counters.restarts == 1


def test_another_epoch_is_a_restart_even_if_the_numbers_fit(scripted: Scripted) -> None:
    with listening(scripted.endpoint) as subscriber:
        scripted.join(subscriber)
        scripted.say(1, BlockRemoved([1], CPU, epoch="a"))
        scripted.say(2, BlockRemoved([1], CPU, epoch="b"))
        scripted.say(3, BlockRemoved([1], CPU, epoch="b"))
        batches = take(subscriber, 3)
    assert [(b.seq, b.restart) for b in batches] == [(1, None), (2, "epoch"), (3, None)]


def test_a_restart_above_all_old_numbers_is_noticed_by_its_epoch() -> None:
    held: Held = {(CPU, 7)}
    first = started(epoch="a", held=held)
    first.publish([stored(3)])
    with listening(first.endpoint, replay=first.replay_endpoint, from_start=True) as subscriber:
        take(subscriber, 1)
        endpoint, replay = first.endpoint, first.replay_endpoint
        first.close()
        second = started(epoch="b", endpoint=endpoint, replay=replay, heartbeat=0.05, held=held, first_seq=10**9)
        batches = take(subscriber, 1)
        second.close()
    assert batches[0].restart is not None and batches[0].compacted
    assert [type(event).__name__ for event in batches[0].batch.events] == ["BlockStored"]


@pytest.mark.parametrize("batches_of_the_new_one", [1, 5, 6, 30])
def test_a_restarted_publisher_is_noticed_and_its_state_fetched(
    batches_of_the_new_one: int,
) -> None:
    first = started(epoch="a")
    for _ in range(5):
        first.publish([stored(3)])
    with listening(first.endpoint, replay=first.replay_endpoint, from_start=True) as subscriber:
        take(subscriber, 5)
        live_before = first.publish([stored(4)]) and take(subscriber, 1)[0].seq
        endpoint, replay = first.endpoint, first.replay_endpoint
        first.close()
        second = started(epoch="b", endpoint=endpoint, replay=replay, heartbeat=0.05)
        for _ in range(batches_of_the_new_one):
            second.publish([stored(1)])
        batches = take(subscriber, batches_of_the_new_one)
        second.close()
    assert live_before == 5
    assert batches[0].restart is not None
    assert [b.seq for b in batches] == list(range(batches_of_the_new_one))
    assert [b.restart for b in batches[1:]] == [None] * (batches_of_the_new_one - 1)
    assert subscriber.epoch == "b" and subscriber.counters.restarts == 1


def test_a_new_publisher_whose_heartbeats_fit_is_told_by_its_history(scripted: Scripted) -> None:
    store = started(epoch="b")
    for _ in range(6):
        store.publish([stored()])
    with listening(scripted.endpoint, replay=store.replay_endpoint) as subscriber:
        scripted.join(subscriber)
        scripted.say(4, BlockRemoved([1], CPU, epoch="a"))
        assert take(subscriber, 1)[0].seq == 4
        subscriber._doubt = True  # as after a new connection
        scripted.say(5)
        batches = take(subscriber, 6)
    store.close()
    assert [b.seq for b in batches] == [0, 1, 2, 3, 4, 5]
    assert [b.restart for b in batches] == ["history", None, None, None, None, None]


def test_a_silent_replay_socket_is_not_asked_at_every_batch_whether_the_publisher_is_a_new_one(
    scripted: Scripted,
) -> None:
    now = [0.0]
    nobody = f"tcp://127.0.0.1:{free_port()}"
    with EventSubscriber(
        scripted.endpoint, replay=nobody, replay_timeout=0.05, retry_seconds=10.0, clock=lambda: now[0]
    ) as subscriber:
        scripted.join(subscriber)
        scripted.say(0, stored(1))
        take(subscriber, 1)
        subscriber._doubt = True  # as after a new connection
        for seq in range(1, 6):
            scripted.say(seq)
        assert [b.seq for b in take(subscriber, 5)] == [1, 2, 3, 4, 5]
        assert subscriber.counters.failed_replays == 1
        now[0] = 11.0
        scripted.say(6)
        take(subscriber, 1)
        assert subscriber.counters.failed_replays == 2, "but it isn't forgotten"


def test_parts_of_a_snapshot_whose_numbers_go_back_are_left_out(scripted: Scripted) -> None:
    parts: list[tuple[int, list[KVEvent]]] = [(41, [stored(3)]), (7, [stored(2, first=800)]), (42, [stored(4)])]
    with (
        Answering({SNAPSHOT_REQUEST: parts}) as router,
        EventSubscriber(scripted.endpoint, replay=router.endpoint, from_start=True) as subscriber,
    ):
        assert [(b.seq, b.missed) for b in take(subscriber, 2)] == [(41, 0), (42, 0)]
        assert subscriber.counters.missed == 0


def test_a_publisher_that_was_only_out_of_reach_is_not_taken_for_a_new_one() -> None:
    store = started()
    limits = {"replay": store.replay_endpoint, "from_start": True}
    store.publish([stored()])
    with listening(store.endpoint, **limits) as subscriber:
        take(subscriber, 1)
        subscriber._sub.disconnect(store.endpoint)
        store.publish([stored(2)])
        subscriber._doubt = True
        subscriber._sub.connect(store.endpoint)
        batches: list[Received] = []
        while len(batches) < 3:
            store.publish([stored(3)])
            batches += take(subscriber, 1, timeout=0.1)
    store.close()
    assert [b.seq for b in batches] == list(range(1, 1 + len(batches)))
    assert subscriber.counters.restarts == 0 and subscriber.counters.missed == 0


def test_a_restart_that_has_come_further_than_we_were_is_seen_in_the_replay(
    scripted: Scripted,
) -> None:
    store = started(epoch="b")
    for _ in range(8):
        store.publish([stored()])
    with listening(scripted.endpoint, replay=store.replay_endpoint) as subscriber:
        scripted.join(subscriber)
        scripted.say(3, BlockRemoved([1], CPU, epoch="a"))
        scripted.say(7)
        batches = take(subscriber, 9)
    store.close()
    assert [b.seq for b in batches] == [3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert batches[1].restart == "epoch" and batches[2].restart is None


def test_what_is_no_batch_is_counted_and_passed_over(scripted: Scripted) -> None:
    with listening(scripted.endpoint) as subscriber:
        scripted.join(subscriber)
        scripted.pub.send_multipart([b"kv@host@model", b"short", b""])
        scripted.pub.send_multipart([b"kv@host@model", bytes(8), b"\xc1rubbish"])
        scripted.pub.send_multipart([b"a", b"b"])
        scripted.say(0, stored())
        assert [b.seq for b in take(subscriber, 1)] == [0]
    assert subscriber.counters.malformed == 3


def test_nothing_within_the_timeout_is_none(scripted: Scripted) -> None:
    with listening(scripted.endpoint) as subscriber:
        assert subscriber.receive(0.02) is None
        assert list(subscriber.drain(0.02)) == []


def test_a_consumer_converges_on_the_state_under_losses_and_a_small_ring() -> None:
    """Publishing goes on in a thread; the consumer joins in the middle and its queue is tiny."""
    truth: Held = set()
    lock = threading.Lock()
    keys = keys_of(8)

    def snapshot() -> list[BlockStored]:
        with lock:
            return [BlockStored([key], None, list(range(16)), 16, medium=CPU) for _, key in sorted(truth)]

    limits = PublisherLimits(ring_batches=20, send_queue=10, heartbeat_seconds=0.05)
    store = run_in_thread(
        EventPublisher(LOOPBACK, replay=LOOPBACK, options=StreamOptions(epoch="a", limits=limits), snapshot=snapshot),
        interval=0.005, capacity=16,
    )  # fmt: skip

    def publish() -> None:
        for n in range(600):
            key = keys[(n * 7) % 8]
            event: KVEvent = (
                BlockRemoved([key], CPU) if n % 3 == 2
                else BlockStored([key], None, list(range(16)), 16, medium=CPU)
            )  # fmt: skip
            with lock:
                apply(truth, [event])
                store.publish([event])
            if n % 50 == 0:
                time.sleep(0.01)

    thread = threading.Thread(target=publish)
    believed: Held = set()
    with listening(store.endpoint, replay=store.replay_endpoint, from_start=True) as subscriber:
        thread.start()
        while subscriber.last_seq < 600:
            received = subscriber.receive(5.0)
            assert received is not None
            if received.restart or received.missed:
                believed.clear()
            apply(believed, received.batch.usable)
    thread.join()
    stats = store.stats()
    store.close()
    assert subscriber.counters.restarts == 0
    assert believed == {(medium, low64(key)) for medium, key in truth if isinstance(key, bytes)}
    assert stats.lost_batches > 0 and stats.compactions > 0, "the test should have forced some"
