"""A peer that speaks the protocol and lies: each way of lying is a small function."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash
import zmq

from forebay.kvstore.header import encode_header
from forebay.testing.conformance import Made, numbered
from forebay.tiers.base import LookupResult
from forebay.tiers.p2p.wire import (
    LISTENER,
    VERSION,
    Answer,
    Ask,
    Bytes,
    Hello,
    Message,
    NotOpened,
    Open,
    Opened,
    Ping,
    Pong,
    Read,
    Welcome,
    encode,
)

Reply = list[tuple[Any, bytes | None]]
HIT_TOKENS = 32


class Liar:
    """Claims to have every chunk; its `way` decides what comes when it is asked for `chunk`."""

    def __init__(self, chunk: Made, way: str) -> None:
        self.chunk, self.way = chunk, WAYS[way]
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._stop = threading.Event()
        self.opened = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            identity, body, *_ = self._socket.recv_multipart()
            for message, piece in self._answers(LISTENER.decode(body)):
                raw = message if isinstance(message, bytes) else encode(message)
                self._socket.send_multipart([identity, raw] if piece is None else [identity, raw, piece])
        self._socket.close()
        self._context.term()

    def _answers(self, message: object) -> Reply:
        match message:
            case Hello():
                return [(Welcome(VERSION, "liar", b"l" * 16, 0, b"t" * 16, b"", 0), None)]
            case Ping():
                return [(Pong(0), None)]
            case Ask(rid=rid, queries=queries):
                hits = [LookupResult("hit", q.key, HIT_TOKENS, HIT_TOKENS, self.chunk.length) for q in queries]
                return [(Answer(rid, hits), None)]
            case Open() | Read():
                self.opened += isinstance(message, Open)
                return self.way(self.chunk, message)
        return []

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def _opened(rid: int, chunk: Made, block: bytes | None = None, length: int | None = None) -> Message:
    size = len(chunk.payload) if length is None else length
    return Opened(rid, chunk.block if block is None else block, size, 0, 0)


def _honest(chunk: Made, message: Open | Read) -> Reply:
    if isinstance(message, Open):
        return [(_opened(message.rid, chunk), None)]
    piece = chunk.payload[message.offset : message.offset + message.length]
    return [(Bytes(message.rid, message.offset), piece)]


def _whole(chunk: Made) -> int:
    return len(chunk.payload)


def _opens_with(block: Callable[[Made], bytes], length: Callable[[Made], int] = _whole) -> Any:
    def way(chunk: Made, message: Open | Read) -> Reply:
        if isinstance(message, Open):
            return [(_opened(message.rid, chunk, block(chunk), length(chunk)), None)]
        return _honest(chunk, message)

    return way


def _reads_with(change: Callable[[Bytes, bytes], Reply]) -> Any:
    def way(chunk: Made, message: Open | Read) -> Reply:
        if isinstance(message, Open):
            return _honest(chunk, message)
        ((head, piece),) = _honest(chunk, message)
        return change(head, piece)

    return way


def _changed(chunk: Made, **changes: Any) -> bytes:
    return encode_header(msgspec.structs.replace(chunk.header, **changes))


def _other(chunk: Made, message: Open | Read) -> Reply:
    return _honest(dataclasses.replace(numbered(777)), message)


def _one_checksum_more(chunk: Made) -> bytes:
    return _changed(chunk, checksums=xxhash.xxh3_64(b"").digest() * (len(chunk.header.checksums) // 8))


WAYS: dict[str, Callable[[Made, Any], Reply]] = {
    "a flipped bit": _reads_with(lambda head, piece: [(head, piece[:-1] + bytes([piece[-1] ^ 1]))]),
    "other checksums": _opens_with(_one_checksum_more),
    "another chunk": _other,
    "another namespace": _opens_with(lambda chunk: _changed(chunk, namespace=b"z" * 32)),
    "a key that isn't that of its tokens": _opens_with(lambda chunk: _changed(chunk, tokens=b"\7" * 128)),
    "a slot that is being written": _opens_with(lambda chunk: _changed(chunk, owner=b"o" * 16)),
    "a longer payload than its header says": _opens_with(lambda c: c.block, lambda chunk: len(chunk.payload) + 16),
    "a payload without end": _opens_with(lambda c: c.block, lambda chunk: 1 << 60),
    "no header": _opens_with(lambda chunk: b"?" * 4096),
    "a header with something behind it": _opens_with(lambda chunk: chunk.block + b"\0"),
    "a piece that is too short": _reads_with(lambda head, piece: [(head, piece[:-1])]),
    "a piece that is too long": _reads_with(lambda head, piece: [(head, piece + b"!")]),
    "a piece from elsewhere": _reads_with(lambda head, piece: [(Bytes(head.rid, head.offset + 16), piece)]),
    "a piece without bytes": _reads_with(lambda head, piece: [(head, None)]),
    "every piece a hundred times": _reads_with(lambda head, piece: [(head, piece)] * 100),
    "no piece": _reads_with(lambda head, piece: []),
    "something that is no message": _reads_with(lambda head, piece: [(b"\xc1garbage", None)]),
    "an answer to something else": _reads_with(lambda head, piece: [(Answer(head.rid, []), None)]),
    "nothing at all": lambda chunk, message: [],
    "not there after all": lambda chunk, message: [(NotOpened(message.rid, "missing"), None)],
}
"""By what comes instead of the chunk. `every piece a hundred times` ends well for a chunk of one piece."""
