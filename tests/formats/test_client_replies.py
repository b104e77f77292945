"""A client whose store answers with damaged or unfinished frames gets a typed error, and never waits for ever."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.errors import ProtocolError, StoreError, StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.kvstore.protocol import REPLIES, Stats, Welcome
from tests.formats.mutations import cuts, flips

WELCOME = REPLIES.encode(Welcome(rid=1, boot=b"b" * 16, extent_bytes=1 << 20))


@contextmanager
def answering(folder: Path, reply: bytes) -> Iterator[str]:
    """A store that answers whatever comes first with these bytes, and hangs up."""
    path = folder / "s.sock"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"unix://{path}"
        thread.join()


def test_a_damaged_answer_is_a_protocol_error(tmp_path: Path) -> None:
    for _, changed in flips(WELCOME, patterns=(0x11,)):
        with answering(tmp_path, changed) as address, pytest.raises(ProtocolError):
            StoreClient(address).__enter__()


def test_an_answer_that_is_cut_short_is_a_store_that_is_gone(tmp_path: Path) -> None:
    for beginning in cuts(WELCOME, step=7):
        with answering(tmp_path, beginning) as address, pytest.raises(StoreUnavailable):
            StoreClient(address).__enter__()


@pytest.mark.parametrize(
    "reply",
    [
        WELCOME,  # without the descriptor that has to come with it
        REPLIES.encode(Welcome(rid=1, boot=b"b" * 16, extent_bytes=1 << 20, version=99)),
        REPLIES.encode(Stats(rid=1, boot=b"", pid=1, values={}, info={}, namespaces=[], tiers=[])),
        WELCOME + WELCOME,
    ],
    ids=["no descriptor", "another version", "another message", "twice"],
)
def test_an_answer_that_does_not_fit_is_a_store_error(tmp_path: Path, reply: bytes) -> None:
    with answering(tmp_path, reply) as address, pytest.raises(StoreError):
        StoreClient(address).__enter__()
