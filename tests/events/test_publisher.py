from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from forebay.events.codec import decode_batch
from forebay.events.publisher import END, SNAPSHOT_REQUEST
from forebay.events.schema import BlockStored, WireProfile
from tests.events.support import (
    LOOPBACK,
    Raw,
    publishing,
    receive_all,
    removed,
    seqs,
    state,
    stored,
)


@pytest.fixture
def raw() -> Iterator[Raw]:
    consumer = Raw()
    yield consumer
    consumer.close()


def test_batches_arrive_in_order_with_topic_number_and_payload(raw: Raw) -> None:
    with publishing(topic="kv@host@model") as publisher:
        sub = raw.subscribe(publisher)
        assert [publisher.publish([stored(n + 1)], 1.5) for n in range(50)] == list(range(50))
        messages = receive_all(sub)
        assert seqs(messages) == list(range(50))
        assert {message[0] for message in messages} == {b"kv@host@model"}
        batch = decode_batch(messages[2][2])
        assert batch.ts == 1.5 and batch.dp_rank == 0 and batch.epoch == "e1"
        assert isinstance(batch.events[0], BlockStored) and len(batch.events[0].block_hashes) == 3


def test_the_real_ports_are_known() -> None:
    with publishing() as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        assert publisher.endpoint != publisher.replay_endpoint
        assert not publisher.endpoint.endswith(":0")


def test_a_late_joiner_gets_the_history_by_replay(raw: Raw) -> None:
    with publishing() as publisher:
        for n in range(5):
            publisher.publish([stored(n + 1)], 0.0)
        messages = raw.ask(publisher, 0)
        assert seqs(messages) == [0, 1, 2, 3, 4]
        assert all(message[:2] == [b"", b"kv@host@model"] for message in messages)


def test_a_replay_is_what_was_sent_live(raw: Raw) -> None:
    with publishing() as publisher:
        sub = raw.subscribe(publisher)
        publisher.publish([stored(2)], 3.0)
        publisher.publish([removed(1)], 4.0)
        live = receive_all(sub)
        assert [message[1:] for message in raw.ask(publisher, 0)] == live


def test_a_gap_is_filled_from_the_number_that_was_asked_for(raw: Raw) -> None:
    with publishing() as publisher:
        for _ in range(200):
            publisher.publish([stored()], 0.0)
        assert seqs(raw.ask(publisher, 150)) == list(range(150, 200))
        assert raw.ask(publisher, 200) == [] == raw.ask(publisher, 2**64 - 1)


def test_the_ring_is_bounded_by_count(raw: Raw) -> None:
    with publishing(ring_batches=10) as publisher:
        for _ in range(100):
            publisher.publish([stored()], 0.0)
        assert publisher.stats().ring_batches == 10
        assert seqs(raw.ask(publisher, 0)) == list(range(90, 100))


def test_the_ring_is_bounded_by_bytes() -> None:
    with publishing(ring_bytes=5_000) as publisher:
        for _ in range(100):
            publisher.publish([stored(4)], 0.0)
        stats = publisher.stats()
        assert 0 < stats.ring_bytes <= 5_000 and 0 < stats.ring_batches < 100


def test_a_late_joiner_beyond_the_ring_gets_a_compacted_history(raw: Raw) -> None:
    with publishing(ring_batches=2, snapshot=lambda: [stored(3)]) as publisher:
        publisher.publish([stored(5)], 0.0)
        publisher.publish([removed(2, first=5)], 0.0)
        publisher.publish([removed(2, first=500)], 0.0)
        messages = raw.ask(publisher, 0)
        assert seqs(messages)[-1] == publisher.stats().next_seq - 1
        assert len(state(messages)) == 3
        assert decode_batch(messages[0][-1]).events[0].reason == "snapshot"
        assert decode_batch(messages[0][-1]).epoch == "e1"
        assert publisher.stats().compactions == 1


def test_a_snapshot_can_be_asked_for_by_a_number_that_is_never_reached(raw: Raw) -> None:
    with publishing(snapshot=lambda: [stored(3)]) as publisher:
        for _ in range(4):
            publisher.publish([stored(1)], 0.0)
        messages = raw.ask(publisher, SNAPSHOT_REQUEST)
        assert seqs(messages) == [3] and len(state(messages)) == 3
        batch = decode_batch(messages[0][-1])
        assert batch.events[0].reason == "snapshot" and batch.epoch == "e1"
        assert publisher.stats().snapshots == 1 and publisher.stats().compactions == 0


def test_a_snapshot_before_the_first_batch_is_given_a_number(raw: Raw) -> None:
    with publishing(snapshot=lambda: [stored(3)]) as publisher:
        messages = raw.ask(publisher, SNAPSHOT_REQUEST)
        assert seqs(messages) == [0] and len(state(messages)) == 3
        assert publisher.publish([stored()], 0.0) == 1


def test_without_a_source_a_request_for_a_snapshot_is_answered_with_nothing(raw: Raw) -> None:
    with publishing() as publisher:
        publisher.publish([stored()], 0.0)
        assert raw.ask(publisher, SNAPSHOT_REQUEST) == []


def test_a_large_snapshot_is_made_in_slices_while_publishing_goes_on(raw: Raw) -> None:
    units = [stored(1, first=16 * n) for n in range(5_000)]
    with publishing(ring_batches=50, snapshot=lambda: iter(units)) as publisher:
        for _ in range(60):
            publisher.publish([stored()], 0.0)
        dealer = raw.dealer(publisher)
        dealer.send_multipart([b"", bytes(8)])
        deadline = time.monotonic() + 60
        polls = 0
        messages: list[list[bytes]] = []
        while not messages or messages[-1][2] != END:
            assert time.monotonic() < deadline
            if publisher.poll_replay():
                publisher.publish([stored()], 0.0)
                polls += 1
            while dealer.poll(2):
                messages.append(dealer.recv_multipart())
        assert polls >= 5_000 // 1024
        numbers = seqs(messages[:-1])
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert len(state(messages[:-1])) >= 5_000


def test_a_slow_subscriber_does_not_block_and_costs_only_itself(raw: Raw) -> None:
    with publishing(send_queue=5) as publisher:
        slow = raw.subscribe(publisher, rcvhwm=1, rcvbuf=4096)
        good = raw.subscribe(publisher)
        large = stored(2_000)
        got = 0
        begin = time.monotonic()
        for _ in range(100):
            publisher.publish([large], 0.0)
            while good.poll(2):
                got += len(good.recv_multipart()) == 3
        elapsed = time.monotonic() - begin
        got += len(receive_all(good))
        assert got == 100 and elapsed < 20
        assert publisher.stats().fell_behind >= 1 and publisher.stats().send_errors == 0
        assert 0 < len([m for m in receive_all(slow) if len(m) == 3]) < 100


def test_nobody_listening_costs_nothing() -> None:
    with publishing(replay=None) as publisher:
        assert publisher.replay_endpoint is None
        assert publisher.publish([stored()], 0.0) == 0
        assert publisher.poll_replay() is False


def test_a_quiet_stream_sends_heartbeats_by_the_callers_clock(raw: Raw) -> None:
    with publishing(heartbeat_seconds=10.0) as publisher:
        sub = raw.subscribe(publisher)
        publisher.publish([stored()], 100.0)
        for now in (101.0, 109.9, 110.0, 111.0, 119.0, 120.0):
            publisher.tick(now)
        messages = receive_all(sub)
        assert seqs(messages) == [0, 1, 2]
        beats = [decode_batch(message[2]) for message in messages[1:]]
        assert [(beat.ts, beat.events) for beat in beats] == [(110.0, ()), (120.0, ())]
        assert publisher.stats().heartbeats == 2


def test_a_clock_that_jumps_back_starts_the_quiet_time_again(raw: Raw) -> None:
    with publishing(heartbeat_seconds=10.0) as publisher:
        publisher.publish([stored()], 1_000.0)
        publisher.tick(50.0)
        publisher.tick(59.0)
        assert publisher.stats().heartbeats == 0
        publisher.tick(60.0)
        assert publisher.stats().heartbeats == 1


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [b"", b"short"],
        [b"x", bytes(8)],
        [b"", bytes(8), b"more"],
        [b"hello"],
        [bytes(8)],
    ],
)
def test_garbage_on_the_replay_socket_is_ignored_and_counted(raw: Raw, frames: list[bytes]) -> None:
    with publishing() as publisher:
        publisher.publish([stored()], 0.0)
        dealer = raw.dealer(publisher)
        dealer.send_multipart(frames)
        deadline = time.monotonic() + 60
        while publisher.stats().replay_garbage == 0 and time.monotonic() < deadline:
            publisher.poll_replay()
            time.sleep(0.005)
        assert publisher.stats().replay_garbage == 1
        assert not dealer.poll(50)
        assert seqs(raw.ask(publisher, 0)) == [0]


def test_a_huge_message_to_the_replay_socket_is_not_even_read(raw: Raw) -> None:
    with publishing() as publisher:
        dealer = raw.dealer(publisher)
        dealer.send_multipart([b"", b"x" * 50_000_000])
        for _ in range(20):
            publisher.poll_replay()
            time.sleep(0.005)
        stats = publisher.stats()
        assert (stats.replay_garbage, stats.replays) == (0, 0)
        assert raw.ask(publisher, 0) == []


def test_bytes_that_are_no_zmq_harm_nobody(raw: Raw) -> None:
    import socket

    with publishing() as publisher:
        for endpoint in (publisher.endpoint, publisher.replay_endpoint):
            assert endpoint is not None
            host, _, port = endpoint.removeprefix("tcp://").partition(":")
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
        publisher.publish([stored()], 0.0)
        assert seqs(raw.ask(publisher, 0)) == [0]


def test_a_consumer_that_does_not_take_its_replay_is_given_up(raw: Raw) -> None:
    with publishing(replay_slice=4, replay_seconds=5.0) as publisher:
        for _ in range(60):
            publisher.publish([stored(2_000)], 100.0)
        dealer = raw.dealer(publisher, rcvhwm=1, rcvbuf=4096)
        dealer.send_multipart([b"", bytes(8)])
        publisher.tick(100.0)
        deadline = time.monotonic() + 60
        while publisher.stats().replays == 0 and time.monotonic() < deadline:
            publisher.poll_replay()
        for _ in range(200):
            publisher.poll_replay()
            time.sleep(0.002)
        assert publisher.stats().replays_active == 1, "it should be stuck by now"
        assert seqs(raw.ask(publisher, 55)) == list(range(55, 60)), "others are served meanwhile"
        publisher.tick(106.0)
        stats = publisher.stats()
        assert (stats.replays_active, stats.replays_given_up) == (0, 1)


def test_the_number_of_replays_at_once_is_capped(raw: Raw) -> None:
    with publishing(replay_clients=2, replay_slice=1) as publisher:
        for _ in range(50):
            publisher.publish([stored()], 0.0)
        dealers = [raw.dealer(publisher) for _ in range(4)]
        for dealer in dealers:
            dealer.send_multipart([b"", bytes(8)])
        until = time.monotonic() + 30
        while (stats := publisher.stats()).replays_refused < 2 and time.monotonic() < until:
            publisher.poll_replay()
        assert stats.replays_active == 2 and stats.replays_refused == 2


def test_a_second_request_on_a_connection_replaces_the_first(raw: Raw) -> None:
    with publishing() as publisher:
        for _ in range(10):
            publisher.publish([stored()], 0.0)
        dealer = raw.dealer(publisher)
        dealer.send_multipart([b"", bytes(8)])
        dealer.send_multipart([b"", (8).to_bytes(8, "big")])
        time.sleep(0.2)
        messages: list[list[bytes]] = []
        while not messages or messages[-1][2] != END:
            publisher.poll_replay()
            while dealer.poll(5):
                messages.append(dealer.recv_multipart())
        assert seqs(messages[:-1]) == [8, 9]


def test_publishing_never_raises_whatever_it_is_given(raw: Raw) -> None:
    with publishing() as publisher:
        junk = [
            object(),
            BlockStored([1], None, [1], 16),
            BlockStored([1], None, [-(2**70)] * 16, 16),
        ]
        assert publisher.publish([*junk, stored()], 0.0) == 0  # type: ignore[list-item]
        assert publisher.stats().refused_events == 3
        assert decode_batch(raw.ask(publisher, 0)[0][-1]).events[0].epoch == "e1"
    assert publisher.publish([stored()], 0.0) is None
    assert publisher.stats().lost_batches == 1


def test_no_events_are_no_batch() -> None:
    with publishing() as publisher:
        assert publisher.publish([], 0.0) is None
        assert publisher.stats().next_seq == 0


def test_lost_batches_leave_a_gap_in_the_numbers(raw: Raw) -> None:
    with publishing(snapshot=lambda: [stored(2)]) as publisher:
        publisher.publish([stored()], 0.0)
        publisher.lose(3)
        assert publisher.publish([stored()], 0.0) == 4
        assert len(state(raw.ask(publisher, 1))) == 2


def test_closing_twice_is_fine_and_frees_the_port() -> None:
    with publishing() as publisher:
        endpoint = publisher.endpoint
    publisher.close()
    with zmq.Context() as context, context.socket(zmq.PUB) as again:
        again.bind(endpoint)


def test_a_profile_decides_how_hashes_are_sent(raw: Raw) -> None:
    from forebay.events.publisher import EventPublisher, StreamOptions

    options = StreamOptions(profile=WireProfile(hash_format="bytes32"))
    publisher = EventPublisher(LOOPBACK, replay=LOOPBACK, options=options)
    publisher.publish([stored(2)], 0.0)
    [message] = raw.ask(publisher, 0)
    assert decode_batch(message[-1]).events == (stored(2),)
    publisher.close()
