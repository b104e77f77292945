"""Someone who dials a p2p tier and says whatever a test likes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

import zmq

from forebay.tiers.p2p.wire import DIALER, VERSION, Hello, Message, Pong, Welcome, encode

M = TypeVar("M", bound=Message)


class Dialer:
    """A DEALER; `keys` are its own public and secret key and the server's public one."""

    def __init__(self, port: int, *, hello: bool = True, keys: tuple[bytes, bytes, bytes] | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, 2000)
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey, self._socket.curve_serverkey = keys
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        if hello:
            self.say(Hello(VERSION, "dialer", b"d" * 16, False))
            self.welcome = self.hear(Welcome)

    def say(self, message: Message | bytes, piece: bytes | None = None) -> None:
        raw = message if isinstance(message, bytes) else encode(message)
        # To whoever isn't let in nothing can be sent: ZMQ would wait for ever.
        with suppress(zmq.Again):
            self._socket.send_multipart([raw] if piece is None else [raw, piece])

    def hear_any(self, timeout_s: float = 5.0) -> tuple[Any, bytes | None]:
        assert self._socket.poll(timeout_s * 1000), "nothing came"
        body, *piece = self._socket.recv_multipart()
        return DIALER.decode(body), piece[0] if piece else None

    def hear(self, kind: type[M], timeout_s: float = 5.0) -> M:
        message, _ = self.hear_any(timeout_s)
        while isinstance(message, Pong) and kind is not Pong:
            message, _ = self.hear_any(timeout_s)
        assert isinstance(message, kind), message
        return message

    def silent(self, seconds: float) -> bool:
        """Does nothing come for so long?"""
        return not self._socket.poll(seconds * 1000)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
