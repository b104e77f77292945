"""Streams through TLS: nothing shows on the wire, and who is at either end is known by the keys of the control
connection alone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from forebay.errors import ConfigError, TierUnavailable
from forebay.testing.conformance import Pool, make_chunk, numbered
from forebay.testing.ports import free_port
from forebay.tiers.p2p import stream_server, tls
from forebay.tiers.p2p.errors import PeerLost
from forebay.tiers.p2p.stream import ALL, MAGIC, NO_TICKET, REPLY, REQUEST
from forebay.tiers.p2p.stream_server import StreamServer
from forebay.tiers.p2p.streams import Place, Streams
from forebay.tiers.p2p.tls import dialling_context, new_identity, pinned
from tests.tiers.p2p.rig import Asker, Host, own_folder
from tests.tiers.p2p.tap import Tap

CHUNK = make_chunk(granule=1 << 20)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return str(own_folder(tmp_path, "peer"))


@pytest.fixture
def host(keys: str) -> Iterator[Host]:
    made = Host("peer", keys=keys, bulk="tls")
    made.source.put(CHUNK)
    yield made
    made.close()


def server_of(host: Host) -> StreamServer:
    server = host.tier._engine._stream_server
    assert server is not None
    return server


def asker(open_all: ExitStack, pool: Pool, host: Host, keys: str, **options: object) -> Asker:
    given: dict[str, object] = {"bulk": "tls", "keys": keys, "stall_s": 1.0, **options}
    made = open_all.enter_context(closing(Asker(pool, host.address, **given)))
    made.sees("peer")
    return made


def usable(made: Asker) -> None:
    made.until(lambda: made.value("streams_usable") == 1, "the peer's streams")


def test_chunks_are_pulled_through_tls_and_do_not_show_on_the_wire(
    host: Host, open_all: ExitStack, pool: Pool, keys: str
) -> None:
    server, front = server_of(host), host.tier._engine._server
    assert front is not None
    tap = open_all.enter_context(closing(Tap(server.port)))
    front.stream_port = tap.port
    made = asker(open_all, pool, host, keys)
    usable(made)
    assert made.driver.serves(CHUNK)
    assert made.value("loads_by_tls") == 1
    seen = bytes(tap.seen)
    assert len(seen) > len(CHUNK.payload), "the tap works"
    assert CHUNK.payload[5000:5100] not in seen and CHUNK.header.tokens not in seen and MAGIC not in seen


def test_chunks_are_pushed_through_tls(host: Host, open_all: ExitStack, pool: Pool, keys: str) -> None:
    made = asker(open_all, pool, host, keys, push_to="peer")
    usable(made)
    chunk = numbered(5, granule=1 << 19)
    assert made.driver.store(chunk).ok
    assert made.value("pushes_by_tls") == 1
    assert bytes(host.source.chunks[chunk.id].payload) == chunk.payload
    assert host.tier.statistics().values["serve.pushes_stored"] == 1
    assert made.driver.store(chunk).ok and made.value("declined_have") == 1


def test_a_listener_with_another_certificate_is_told_nothing(host: Host, keys: str) -> None:
    """Not even the ticket: the fingerprint is compared before the first word."""
    impostor = new_identity()
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        streams = Streams(Place("127.0.0.1", listener.getsockname()[1], b"t" * 16, server_of(host).fingerprint))

        def listen() -> None:
            connection, _ = listener.accept()
            with impostor.context.wrap_socket(connection, server_side=True) as wrapped:
                heard.extend(wrapped.recv(1 << 16))

        listening = threads.submit(listen)
        with pytest.raises(PeerLost, match="another certificate"):
            streams.reach(5.0)
        listening.result(10)
    assert not heard


def test_without_a_ticket_of_the_control_connection_nothing_is_served(host: Host) -> None:
    server = server_of(host)
    connection = socket.create_connection(("127.0.0.1", server.port))
    pipe = pinned(connection, dialling_context(), server.fingerprint, 5.0)
    pipe.send(REQUEST.pack(MAGIC, b"?" * 16, ALL, 0, CHUNK.id.key, 1 << 30))
    answer = memoryview(bytearray(REPLY.size))
    assert pipe.receive(answer) == REPLY.size and REPLY.unpack(answer)[0] == NO_TICKET
    assert pipe.receive(answer) == 0, "and it hangs up"
    pipe.close()
    assert host.source.lent == 0 and server.connections == 0


def test_a_ticket_ends_with_its_control_connection(host: Host, open_all: ExitStack, pool: Pool, keys: str) -> None:
    made = asker(open_all, pool, host, keys)
    usable(made)
    place = made.tier._engine._reaching.streams["peer"].place
    made.close()
    server = host.tier._engine._server
    assert server is not None
    until(lambda: len(server.guests) == 0)
    streams = Streams(place)
    with pytest.raises(PeerLost, match=f"status {NO_TICKET}"):
        streams.fetch(CHUNK.id, memoryview(bytearray(1 << 22)), time.monotonic() + 5, 5.0, lambda b, n: lambda c: None)
    streams.close()


def test_strangers_who_say_nothing_are_few_and_do_not_last(
    host: Host, open_all: ExitStack, pool: Pool, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "STRANGERS_MAX", 3)
    server = server_of(host)
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
    until(lambda: server.counts["turned_away"] == 2)
    assert server.strangers <= 3
    made = asker(open_all, pool, host, keys)
    usable(made)
    assert made.driver.serves(CHUNK), "and keep nobody out"
    until(lambda: server.strangers == 0)
    for one in crowd:
        one.close()


def test_a_stream_port_that_cannot_be_reached_costs_speed_alone(
    host: Host, open_all: ExitStack, pool: Pool, keys: str
) -> None:
    front = host.tier._engine._server
    assert front is not None
    right, front.stream_port = front.stream_port, free_port()
    made = asker(open_all, pool, host, keys)
    made.until(lambda: made.value("streams_unreached") > 0, "it to be tried")
    assert made.driver.serves(CHUNK) and made.value("loads_by_frames") == 1
    front.stream_port = right
    made.tier._engine._peers["peer"].leave("so that it is greeted again")
    usable(made)
    assert made.driver.serves(CHUNK) and made.value("loads_by_tls") == 1


def test_who_will_have_frames_alone_gets_frames(host: Host, open_all: ExitStack, pool: Pool, keys: str) -> None:
    made = asker(open_all, pool, host, keys, bulk="frames")
    assert made.driver.serves(CHUNK) and made.value("loads_by_frames") == 1


def test_a_stream_port_can_be_chosen_and_one_that_is_taken_is_told(keys: str) -> None:
    port = free_port()
    first = Host("peer", keys=keys, bulk="tls", stream_port=port)
    assert server_of(first).port == port
    with pytest.raises(TierUnavailable, match=str(port)):
        Host("second", keys=keys, bulk="tls", stream_port=port)
    first.close()


def test_without_cryptography_bulk_tls_is_refused_and_auto_takes_frames(
    keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> tls.Identity:
        raise ConfigError("takes cryptography: pip install forebay[p2p]")

    monkeypatch.setattr("forebay.tiers.p2p.engine.new_identity", absent)
    with pytest.raises(ConfigError, match=r"forebay\[p2p\]"):
        Host("peer", keys=keys, bulk="tls")
    everywhere = Host("peer", keys=keys, listen=f"0.0.0.0:{free_port()}")
    assert everywhere.tier._engine._stream_server is None
    everywhere.close()


def until(true: Callable[[], bool]) -> None:
    """Wait for it, for a minute."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
