"""The worker as a process: its door, its manners, its end."""

from __future__ import annotations

import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.kvstore.identity import decode_namespace
from tests.workers.fake_model import VOCAB
from tests.workers.processes import FrontEnd, Running, start, start_worker


@dataclass
class Alone:
    """A worker without a store, and a way to connect to it. Shared by tests that leave it running."""

    process: Running
    path: Path

    def connect(self) -> FrontEnd:
        return FrontEnd.to(self.path, self.process)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    folder = tmp_path_factory.mktemp("alone")
    process, front = start_worker(folder, "w", store=False)
    front.connection.close()
    yield Alone(process, folder / "w.sock")
    assert process.end() == 0


def test_it_says_what_it_is(alone: Alone) -> None:
    front = alone.connect()
    described = front.describe()
    assert described.pid == alone.process.popen.pid
    assert (described.model, described.vocab_size, described.store) == ("fake", VOCAB, "none")
    namespace = decode_namespace(described.namespace)
    assert [group.name for group in namespace.groups] == ["full", "window"]
    assert namespace.chunk_tokens == 32 and namespace.compute == "float64"
    assert stat.S_IMODE(alone.path.stat().st_mode) == 0o600


def test_its_heart_beats_while_it_computes(alone: Alone) -> None:
    front = alone.connect()
    front.generate("long", [1] * 10, 2000)
    while len(front.alive) < 2:
        front.receive()
    assert front.heard["long"].finished is None
    assert len({alive.boot for alive in front.alive}) == 1
    front.cancel("long")
    finished = front.wait("long").finished
    assert finished is not None and finished.reason == "cancelled"


def test_front_ends_hear_of_their_own_requests_only(alone: Alone) -> None:
    front = alone.connect()
    other = alone.connect()
    front.generate("same-id", [1, 2, 3], 5)
    other.generate("same-id", [4, 5, 6, 7], 7)
    assert len(front.wait("same-id").tokens) == 5
    assert len(other.wait("same-id").tokens) == 7


def test_a_front_end_that_leaves_takes_its_requests_along(alone: Alone) -> None:
    front = alone.connect()
    other = alone.connect()
    other.generate("orphan", [1, 2, 3], 2000)
    while not other.heard["orphan"].tokens:
        other.receive()
    cancelled = front.stats().values.get("requests.cancelled", 0)
    other.connection.close()
    while front.stats().values["requests.running"]:
        time.sleep(0.01)
    assert front.stats().values["requests.cancelled"] == cancelled + 1


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\x3f", b"\x03\x00\x00\x00abc", b"GET / HTTP/1.1\r\n\r\n"])
def test_garbage_costs_its_sender_the_connection_and_nobody_else(alone: Alone, garbage: bytes) -> None:
    front = alone.connect()
    vandal = alone.connect()
    vandal.connection.sendall(garbage)
    with pytest.raises(ConnectionError):
        vandal.receive_all()
    assert len(front.ask("fine", [1, 2], 3).tokens) == 3


def test_a_second_worker_on_the_same_socket_fails_and_names_the_remedy(alone: Alone, tmp_path: Path) -> None:
    front = alone.connect()
    second = start(tmp_path / "second.log", "tests.workers.fake_worker", str(alone.path), "")
    assert second.popen.wait(60) != 0
    assert "another process serves" in second.log.read_text()
    assert len(front.ask("fine", [1, 2], 3).tokens) == 3


def test_sigterm_ends_it_cleanly_in_the_middle_of_a_request(tmp_path: Path) -> None:
    process, front = start_worker(tmp_path, "w", store=False)
    front.generate("long", [1] * 100, 1500)
    while not front.heard["long"].tokens:
        front.receive()
    assert process.end(signal.SIGTERM) == 0, process.log.read_text()
    with pytest.raises(ConnectionError):
        front.receive_all()
    assert front.heard["long"].finished is None, "its front end goes on elsewhere"
    assert not (tmp_path / "w.sock").exists()


def test_a_failing_engine_ends_the_process_with_its_reason_and_no_goodbye(tmp_path: Path) -> None:
    process, front = start_worker(tmp_path, "w", "label=fragile", store=False)
    front.generate("poison", [1, 13, 2], 5)
    with pytest.raises(ConnectionError):
        front.receive_all()
    assert process.popen.wait(30) != 0
    assert front.heard["poison"].finished is None, "its front end tries elsewhere"
    assert "the engine failed: thirteen" in process.log.read_text()
    assert not (tmp_path / "w.sock").exists()


def test_a_socket_path_that_cannot_be_bound_is_a_clear_error(tmp_path: Path) -> None:
    process = start(tmp_path / "w.log", "tests.workers.fake_worker", f"{tmp_path}/no/such/folder/w.sock", "")
    assert process.popen.wait(60) != 0
    assert "is its folder there and writable?" in process.log.read_text()


def test_the_socket_is_free_again_after_a_kill(tmp_path: Path) -> None:
    process, front = start_worker(tmp_path, "w", store=False)
    front.describe()
    process.end(signal.SIGKILL)
    assert (tmp_path / "w.sock").exists()
    process, front = start_worker(tmp_path, "w", store=False)
    assert len(front.ask("fine", [1, 2], 3).tokens) == 3
    process.end()
    with pytest.raises(OSError, match=r"No such file|refused"), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(f"{tmp_path}/w.sock")


def test_requests_beyond_all_queues_are_answered_busy_even_during_a_step(tmp_path: Path) -> None:
    process, front = start_worker(tmp_path, "w", "max_num_seqs=1", "max_waiting=1", store=False)
    ids = [f"r{i}" for i in range(40)]
    for id in ids:
        front.generate(id, [1] * 300, 1)
    finished = [front.wait(id).finished for id in ids]
    errors = [f.error for f in finished if f is not None and f.reason == "error"]
    assert errors and set(errors) == {"busy"} and len(errors) < len(ids)
    assert front.stats().values["inbox.messages"] == 0
    assert process.end() == 0
