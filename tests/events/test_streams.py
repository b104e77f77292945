from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from forebay.events.codec import decode_batch
from forebay.events.errors import EndpointRefused, EndpointUnavailable, TooManyStreams
from forebay.events.publisher import EventPublisher, PublisherLimits, StreamOptions
from forebay.events.sockets import CurveServer
from forebay.events.streams import NamespaceStreams, nth_endpoint, stream_topic
from tests.events.support import LOOPBACK, Raw, receive_all, seqs, stored

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


@pytest.fixture
def streams() -> Iterator[NamespaceStreams]:
    made = NamespaceStreams(LOOPBACK, owner="host:1", replay=LOOPBACK, options=StreamOptions(epoch="e"), max_streams=3)
    yield made
    made.close()


@pytest.fixture
def raw() -> Iterator[Raw]:
    consumer = Raw()
    yield consumer
    consumer.close()


def test_each_namespace_has_a_port_a_topic_and_a_sequence_of_its_own(streams: NamespaceStreams, raw: Raw) -> None:
    first, second = streams.open(A, "gemma"), streams.open(B, "qwen")
    subs = [raw.subscribe(first), raw.subscribe(second)]
    for namespace in (A, B, A, A):
        streams.publish(namespace, [stored()], 0.0)
    got = [receive_all(sub) for sub in subs]
    assert [seqs(messages) for messages in got] == [[0, 1, 2], [0]]
    assert [messages[0][0] for messages in got] == [b"kv@host:1@gemma", b"kv@host:1@qwen"]
    assert decode_batch(got[1][0][2]).epoch == "e"
    infos = streams.endpoints()
    assert [info.namespace for info in infos] == [A, B]
    assert len({info.endpoint for info in infos} | {info.replay_endpoint for info in infos}) == 4


def test_opening_again_is_the_same_stream(streams: NamespaceStreams) -> None:
    assert streams.open(A, "gemma") is streams.open(A, "other") is streams.get(A)
    assert len(streams) == 1 and streams.get(B) is None


def test_streams_are_capped_and_the_refusal_says_so(streams: NamespaceStreams) -> None:
    for namespace in (A, B, C):
        streams.open(namespace, "m")
    with pytest.raises(TooManyStreams, match="3 namespaces"):
        streams.open(b"d" * 32, "m")
    assert streams.open(A, "m") is streams.get(A)


def test_publishing_without_a_stream_is_counted(streams: NamespaceStreams) -> None:
    assert streams.publish(A, [stored()], 0.0) is None
    assert streams.unrouted_batches == 1


def test_replays_of_all_streams_are_served(streams: NamespaceStreams, raw: Raw) -> None:
    for namespace in (A, B):
        streams.open(namespace, "m")
        streams.publish(namespace, [stored()], 0.0)
    dealers = []
    for info in streams.endpoints():
        assert info.replay_endpoint is not None
        dealers.append(raw.socket(zmq.DEALER, info.replay_endpoint))
        dealers[-1].send_multipart([b"", bytes(8)])
    for dealer in dealers:
        while not dealer.poll(10):
            streams.poll()
        assert dealer.recv_multipart()[2] == bytes(8)


def test_ticks_reach_every_stream() -> None:
    options = StreamOptions(limits=PublisherLimits(heartbeat_seconds=1.0))
    streams = NamespaceStreams(LOOPBACK, owner="h", options=options)
    for namespace in (A, B):
        streams.open(namespace, "m")
    streams.tick(10.0)
    streams.tick(12.0)
    assert [info.stats.heartbeats for info in streams.endpoints()] == [1, 1]
    streams.close()


def test_the_first_stream_has_the_configured_port_and_the_next_the_one_after_the_next() -> None:
    probe = EventPublisher(LOOPBACK)
    port = int(probe.endpoint.rpartition(":")[2])
    probe.close()
    streams = NamespaceStreams(f"tcp://127.0.0.1:{port}", owner="h")
    first = streams.open(A, "m").endpoint
    second = streams.open(B, "m").endpoint
    streams.close()
    assert first == f"tcp://127.0.0.1:{port}"
    assert second != first
    assert nth_endpoint("tcp://127.0.0.1:5557", 3) == "tcp://127.0.0.1:5563"
    assert nth_endpoint("tcp://127.0.0.1:65535", 1) == "tcp://127.0.0.1:0"
    assert nth_endpoint("tcp://127.0.0.1:*", 1) == "tcp://127.0.0.1:*"


def test_a_later_stream_whose_port_is_taken_gets_a_free_one() -> None:
    taken = EventPublisher(LOOPBACK)
    port = int(taken.endpoint.rpartition(":")[2])
    streams = NamespaceStreams(f"tcp://127.0.0.1:{port - 2}", owner="h")
    streams.open(A, "m")
    second = streams.open(B, "m").endpoint
    assert second not in (taken.endpoint, f"tcp://127.0.0.1:{port - 2}")
    streams.close()
    taken.close()


def test_the_configured_port_taken_is_an_error_and_not_another_port() -> None:
    taken = EventPublisher(LOOPBACK)
    streams = NamespaceStreams(taken.endpoint, owner="h")
    with pytest.raises(EndpointUnavailable):
        streams.open(A, "m")
    streams.close()
    taken.close()


def test_local_sockets_get_numbered_paths(tmp_path: Path) -> None:
    streams = NamespaceStreams(f"ipc://{tmp_path}/ev", owner="h", replay=f"ipc://{tmp_path}/re")
    streams.open(A, "m")
    streams.open(B, "m")
    assert [(i.endpoint, i.replay_endpoint) for i in streams.endpoints()] == [
        (f"ipc://{tmp_path}/ev", f"ipc://{tmp_path}/re"),
        (f"ipc://{tmp_path}/ev.1", f"ipc://{tmp_path}/re.1"),
    ]
    streams.close()
    assert list(tmp_path.iterdir()) == []


def test_endpoints_that_can_never_work_are_refused_at_once() -> None:
    with pytest.raises(EndpointRefused, match=r"0\.0\.0\.0"):
        NamespaceStreams("tcp://0.0.0.0:1", owner="h")
    with pytest.raises(EndpointRefused, match=r"0\.0\.0\.0"):
        NamespaceStreams(LOOPBACK, owner="h", replay="tcp://0.0.0.0:1")


def test_one_gate_checks_the_keys_of_all_streams(raw: Raw) -> None:
    server_public, server_secret = zmq.curve_keypair()
    friend_public, friend_secret = zmq.curve_keypair()
    streams = NamespaceStreams(LOOPBACK, owner="h", curve=CurveServer(server_secret, frozenset([friend_public])))
    for namespace in (A, B):
        stream = streams.open(namespace, "m")
        sub = raw.socket(
            zmq.SUB, stream.endpoint,
            curve_serverkey=server_public, curve_publickey=friend_public, curve_secretkey=friend_secret,
        )  # fmt: skip
        sub.subscribe(b"")
        while not sub.poll(10):
            streams.poll()
            streams.publish(namespace, [stored()], 0.0)
    streams.close()


def test_topics_have_exactly_three_parts() -> None:
    assert stream_topic("a@b", "org/model@v1") == "kv@a_b@org/model_v1"
