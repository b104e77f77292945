"""The messages between daemon and tier process, and what a process does with a peer that makes no sense."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ProtocolError
from forebay.ipc.framing import FrameBuffer
from forebay.tiers import messages
from forebay.tiers.base import (
    ChunkId,
    ClearScope,
    JobResult,
    LoadJob,
    LookupResult,
    Query,
    StoreJob,
    TierChange,
    TierStats,
)
from forebay.tiers.messages import Attach, FromTier, Lookup, Start, Started, from_tier_codec, to_tier_codec

CHUNK = ChunkId(1, b"k" * 32)
TO_TIER = [
    messages.Start("fs", "f", {"directory": "/x", "quota_bytes": 5, "odd": None}),
    messages.Attach((1, 2)),
    messages.NoteNamespace(b"n", b"e"),
    messages.Lookup(1, [Query(0, b"k", b"p", b"t")], 0.5),
    messages.Store([StoreJob(1, CHUNK, b"p", 0, 4096, 5000, b"r", True)]),
    messages.Load([LoadJob(2, CHUNK, 0, 8192, 100, 1.5)]),
    messages.Forget(5, [CHUNK], "corrupt"),
    messages.ClearTier(3, ClearScope(b"n", "t", 2, b"p", 32, b"t")),
    messages.GetTierStats(4),
    messages.Stop(),
]
FROM_TIER = [
    messages.Started(7),
    messages.StartFailed("NoSpace", "why"),
    messages.LookupDone(1, [LookupResult("hit", b"k", 16, 32, 5000)]),
    messages.Finished([JobResult(1, False, "io"), JobResult(2, True, "", b"h", 5)]),
    messages.Changes([TierChange(CHUNK, True, "", b"h")]),
    messages.Cleared(3, 10),
    messages.Forgotten(5),
    messages.TierStatsReply(4, TierStats({"a": 1.0}, {"b": "c"})),
]


@pytest.mark.parametrize("message", TO_TIER, ids=lambda m: type(m).__name__)
def test_messages_to_a_tier_survive_the_wire(message: messages.ToTier) -> None:
    codec = to_tier_codec()
    assert list(FrameBuffer(codec).feed(codec.encode(message))) == [message]
    with pytest.raises(ProtocolError):
        from_tier_codec().decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("message", FROM_TIER, ids=lambda m: type(m).__name__)
def test_messages_from_a_tier_survive_the_wire(message: messages.FromTier) -> None:
    codec = from_tier_codec()
    assert list(FrameBuffer(codec).feed(codec.encode(message))) == [message]


def test_every_message_has_a_test() -> None:
    tested = {type(message) for message in (*TO_TIER, *FROM_TIER)}
    assert tested == set(messages.Message.__subclasses__())


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_and_nothing_else(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        list(FrameBuffer(to_tier_codec()).feed(data))


@pytest.fixture
def peer() -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.tiers.process", "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
        pass_fds=[theirs.fileno()], stderr=subprocess.PIPE,
    )  # fmt: skip
    theirs.close()
    yield ours, process
    ours.close()
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def receive(connection: socket.socket) -> FromTier:
    frames: FrameBuffer[FromTier] = FrameBuffer(from_tier_codec())
    while True:
        for message in frames.feed(connection.recv(4096)):
            return message


Peer = tuple[socket.socket, subprocess.Popen[bytes]]


def test_garbage_ends_the_process(peer: Peer) -> None:
    connection, process = peer
    connection.sendall(to_tier_codec().encode(Start("memory", "m", {})))
    assert isinstance(receive(connection), Started)
    connection.sendall(b"\x05\x00\x00\x00hello")
    assert process.wait(20) != 0


def test_a_frame_that_announces_a_gibibyte_ends_the_process(peer: Peer) -> None:
    connection, process = peer
    connection.sendall((1 << 30).to_bytes(4, "little"))
    assert process.wait(20) != 0


def test_an_attach_without_its_descriptor_ends_the_process(peer: Peer) -> None:
    connection, process = peer
    connection.sendall(to_tier_codec().encode(Start("memory", "m", {})) + to_tier_codec().encode(Attach((1,))))
    assert process.wait(20) != 0


def test_a_first_message_that_is_no_start_ends_the_process(peer: Peer) -> None:
    connection, process = peer
    connection.sendall(to_tier_codec().encode(Lookup(1, [], 1.0)))
    assert process.wait(20) == 0


def test_messages_that_come_a_byte_at_a_time_are_understood(peer: Peer) -> None:
    connection, _ = peer
    for byte in to_tier_codec().encode(Start("memory", "m", {})):
        connection.sendall(bytes([byte]))
    assert isinstance(receive(connection), Started)


def test_the_end_of_the_socket_ends_the_process(peer: Peer) -> None:
    connection, process = peer
    connection.sendall(to_tier_codec().encode(Start("memory", "m", {})))
    receive(connection)
    connection.close()
    assert process.wait(20) == 0


def test_a_process_whose_parent_is_not_the_one_that_started_it_ends_at_once() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "forebay.tiers.process", "--fd", str(theirs.fileno()), "--parent", "1"]
    done = subprocess.run(command, pass_fds=[theirs.fileno()], timeout=20, check=False)
    assert done.returncode == 1
    ours.close()
    theirs.close()
