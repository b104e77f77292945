from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from forebay.errors import ConfigError, ForebayError
from forebay.events.errors import EndpointRefused, EndpointUnavailable
from forebay.events.publisher import EventPublisher
from forebay.events.sockets import CurveClient, CurveServer, check_endpoint
from forebay.events.subscriber import EventSubscriber
from tests.events.support import LOOPBACK, stored

SERVER_PUBLIC, SERVER_SECRET = zmq.curve_keypair()
FRIEND_PUBLIC, FRIEND_SECRET = zmq.curve_keypair()
STRANGER_PUBLIC, STRANGER_SECRET = zmq.curve_keypair()
KEYS = CurveServer(SERVER_SECRET, frozenset([FRIEND_PUBLIC]))


@contextmanager
def polled(publisher: EventPublisher) -> Iterator[EventPublisher]:
    """A thread that owns the publisher for a while and only polls it."""
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(0.005):
            publisher.poll_replay()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield publisher
    finally:
        stop.set()
        thread.join()
        publisher.close()


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:5557",
        "tcp://*:5557",
        "tcp://10.0.0.1:1",
        "tcp://[::]:5557",
        "tcp://eth0:5557",
        "tcp://localhost:1",
    ],
)
def test_an_endpoint_off_loopback_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(EndpointRefused) as refusal:
        EventPublisher(endpoint)
    assert endpoint in str(refusal.value) and "CURVE" in str(refusal.value)
    assert isinstance(refusal.value, ConfigError) and refusal.value.exit_code == 2


def test_a_replay_endpoint_off_loopback_is_refused_too() -> None:
    with pytest.raises(EndpointRefused, match=r"10\.0\.0\.1"):
        EventPublisher(LOOPBACK, replay="tcp://10.0.0.1:1")


def test_with_keys_the_network_is_allowed() -> None:
    check_endpoint("tcp://10.0.0.1:5557", curve=True)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.8.9.1:0", "tcp://[::1]:0", "ipc:///run/forebay/events", "tcp://127.0.0.1:*"],
)
def test_loopback_and_local_sockets_need_no_keys(endpoint: str) -> None:
    check_endpoint(endpoint, curve=False)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:1",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "udp://127.0.0.1:1",
        "ipc://",
    ],
)
def test_what_is_no_endpoint_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(EndpointRefused, match="tcp://ADDRESS:PORT"):
        check_endpoint(endpoint, curve=True)


def test_a_taken_port_is_unavailable_and_says_so() -> None:
    first = EventPublisher(LOOPBACK)
    with pytest.raises(EndpointUnavailable, match=first.endpoint) as error:
        EventPublisher(first.endpoint)
    assert isinstance(error.value, ForebayError)
    first.close()


def test_a_publisher_that_could_not_start_holds_no_port() -> None:
    first = EventPublisher(LOOPBACK)
    free = EventPublisher(LOOPBACK)
    endpoint = free.endpoint
    free.close()
    with pytest.raises(EndpointUnavailable):
        EventPublisher(endpoint, replay=first.endpoint)
    EventPublisher(endpoint).close()
    first.close()


def test_a_local_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "events"
    publisher = EventPublisher(f"ipc://{path}")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    publisher.close()


def test_a_client_on_the_allow_list_gets_live_batches_and_replays() -> None:
    publisher = EventPublisher(LOOPBACK, replay=LOOPBACK, curve=KEYS)
    publisher.publish([stored()], 0.0)
    with polled(publisher):
        keys = CurveClient(FRIEND_SECRET, KEYS.public_key)
        with EventSubscriber(publisher.endpoint, replay=publisher.replay_endpoint, from_start=True, curve=keys) as sub:
            received = sub.receive(5.0)
    assert received is not None and received.seq == 0
    assert KEYS.public_key == SERVER_PUBLIC


@pytest.mark.parametrize("case", ["a stranger", "no keys", "another server"])
def test_everyone_else_is_refused(case: str) -> None:
    publisher = EventPublisher(LOOPBACK, replay=LOOPBACK, curve=KEYS)
    publisher.publish([stored()], 0.0)
    keys = {
        "a stranger": CurveClient(STRANGER_SECRET, SERVER_PUBLIC),
        "no keys": None,
        "another server": CurveClient(FRIEND_SECRET, STRANGER_PUBLIC),
    }[case]
    with (
        polled(publisher),
        EventSubscriber(
            publisher.endpoint,
            replay=publisher.replay_endpoint,
            from_start=True,
            curve=keys,
            replay_timeout=0.5,
        ) as sub,
    ):
        assert sub.receive(0.3) is None
        assert sub.counters.failed_replays == 1
    stats = publisher.stats()
    assert stats.replays == 0
    assert (stats.denied > 0) == (case == "a stranger")


def test_live_batches_reach_friends_and_not_strangers() -> None:
    publisher = EventPublisher(LOOPBACK, curve=KEYS)
    context = zmq.Context()
    subs = {}
    for name, secret in (("friend", FRIEND_SECRET), ("stranger", STRANGER_SECRET)):
        subs[name] = context.socket(zmq.SUB)
        CurveClient(secret, SERVER_PUBLIC).apply(subs[name])
        subs[name].subscribe(b"")
        subs[name].connect(publisher.endpoint)
    deadline = time.monotonic() + 60
    while not subs["friend"].poll(10) and time.monotonic() < deadline:
        publisher.poll_replay()
        publisher.publish([stored()], 0.0)
    assert subs["friend"].poll(0)
    assert not subs["stranger"].poll(200)
    context.destroy(linger=0)
    publisher.close()


def test_keys_are_checked_when_they_are_given() -> None:
    with pytest.raises(EndpointRefused, match="allowed"):
        CurveServer(SERVER_SECRET, frozenset())
    for bad in (b"short", b"x" * 41, b"", b"\0" * 40):
        with pytest.raises(EndpointRefused, match="Z85"):
            CurveServer(bad, frozenset([FRIEND_PUBLIC]))
        with pytest.raises(EndpointRefused, match="Z85"):
            CurveClient(bad, SERVER_PUBLIC)
