"""The proxy does to a connection what its weather says, and nothing else."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from forebay.testing.chaosproxy import ChaosProxy, Weather

DATA = random.Random(1).randbytes(300_000)


class Echo:
    """A server that sends back what it gets; one thread a connection."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(10)


@pytest.fixture
def proxy() -> Iterator[ChaosProxy]:
    echo = Echo()
    with ChaosProxy(("127.0.0.1", echo.port), seed=3) as made:
        yield made
    echo.close()


def connect(proxy: ChaosProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def read(connection: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size and (piece := connection.recv(size - len(got))):
        got += piece
    return bytes(got)


def is_reset(connection: socket.socket, data: bytes) -> bool:
    """Does sending this end in a reset rather than in an answer or an orderly end?"""
    try:
        connection.sendall(data)
        while connection.recv(100):
            pass
    except ConnectionError:
        return True
    return False


def breaks(proxy: ChaosProxy, data: bytes) -> bool:
    """The same of a new connection, which may be reset before it is ours."""
    try:
        connection = connect(proxy)
    except ConnectionError:
        return True
    with connection:
        return is_reset(connection, data)


def echoed(proxy: ChaosProxy, data: bytes) -> bytes:
    with connect(proxy) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        got = read(connection, len(data))
        sender.join(10)
        return got


@pytest.mark.parametrize("weather", [Weather(), Weather(slice_bytes=1000), Weather(jitter_s=0.01)])
def test_bytes_pass_whole_and_in_order(proxy: ChaosProxy, weather: Weather) -> None:
    proxy.weather = weather
    assert echoed(proxy, DATA) == DATA
    assert proxy.counts["bytes"] == 2 * len(DATA)


def test_an_end_is_passed_on_after_the_bytes_before_it(proxy: ChaosProxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"last words")
        connection.shutdown(socket.SHUT_WR)
        assert read(connection, 100) == b"last words"


def test_bits_flip_about_as_often_as_asked(proxy: ChaosProxy) -> None:
    proxy.weather = Weather(flip_every=10_000, direction="to_client")
    got = echoed(proxy, DATA)
    different = sum((one ^ other).bit_count() for one, other in zip(DATA, got, strict=True))
    assert different == proxy.counts["flips"] and 5 < different < 100


def test_a_delay_holds_every_byte_back_at_least_that_long(proxy: ChaosProxy) -> None:
    proxy.weather = Weather(delay_s=0.1)
    before = time.monotonic()
    assert echoed(proxy, b"x") == b"x"
    assert time.monotonic() - before >= 0.2


def test_silence_passes_nothing_and_what_was_held_comes_late(proxy: ChaosProxy) -> None:
    with connect(proxy) as connection:
        proxy.weather = Weather(silent=True)
        connection.sendall(b"late")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.weather = Weather()
        connection.settimeout(10)
        assert read(connection, 4) == b"late"


def test_a_silent_streams_sender_is_made_to_wait(proxy: ChaosProxy) -> None:
    """What is held back is bounded."""
    with connect(proxy) as connection:
        proxy.weather = Weather(silent=True)
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.sendall(bytes(64 << 20))


def test_a_reset_after_so_many_bytes(proxy: ChaosProxy) -> None:
    proxy.weather = Weather(reset_after=1000, direction="to_client")
    assert breaks(proxy, DATA[:2000])
    assert proxy.counts["resets"] == 1


def test_an_early_end_after_so_many_bytes(proxy: ChaosProxy) -> None:
    proxy.weather = Weather(end_after=1000, direction="to_client")
    with connect(proxy) as connection:
        connection.sendall(DATA[:2000])
        assert read(connection, 2000) == DATA[:1000]


def test_refused_connections_are_reset_and_the_open_ones_live(proxy: ChaosProxy) -> None:
    with connect(proxy) as old:
        old.sendall(b"a")
        assert read(old, 1) == b"a"
        proxy.weather = Weather(refuse=True)
        assert breaks(proxy, b"b")
        old.sendall(b"c")
        assert read(old, 1) == b"c"
        proxy.reset_all()
        assert is_reset(old, b"d")


def test_a_server_that_is_away_is_a_reset(proxy: ChaosProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with ChaosProxy(("127.0.0.1", port)) as nowhere:
        assert breaks(nowhere, b"x")
        assert nowhere.counts["target_away"] == 1


def test_closing_leaves_no_thread_and_no_connection(proxy: ChaosProxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"x")
        assert read(connection, 1) == b"x"
        proxy.close()
        proxy.close()
        assert proxy.open == 0 and f"chaos proxy {proxy.port}" not in {t.name for t in threading.enumerate()}
