"""Frames: a u32 little endian length, then that many bytes of msgpack.

The length is checked against a cap before anything is allocated, so a client that announces 1 GiB costs
nothing but its own connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from forebay.errors import ProtocolError

FRAME_BYTES_MAX = 16 << 20
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and decodes the messages of one protocol, `union` being their tagged union type."""

    def __init__(self, union: object, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()
        self.frame_bytes_max = frame_bytes_max

    def encode(self, message: object) -> bytes:
        """One frame. Raises ProtocolError if the message is over the cap."""
        body = self._encoder.encode(message)
        if len(body) > self.frame_bytes_max:
            raise ProtocolError(
                f"a message of {len(body)} bytes is over the limit of {self.frame_bytes_max}; "
                "ask for less in one batch"
            )
        return _LENGTH.pack(len(body)) + body

    def frame_length(self, prefix: bytes | memoryview) -> int:
        """Length that a frame's first four bytes announce. Raises ProtocolError over the cap."""
        (length,) = _LENGTH.unpack(prefix)
        if length > self.frame_bytes_max:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.frame_bytes_max}")
        return int(length)

    def decode(self, body: bytes | memoryview) -> M:
        """The message in a frame's body. Raises ProtocolError on anything else."""
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"not a message of this protocol: {error}") from error


class FrameBuffer(Generic[M]):
    """Collects received bytes and yields whole messages. Holds at most one frame and what follows it."""

    def __init__(self, codec: Codec[M]) -> None:
        self._codec = codec
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Messages that `data` completes, in order. Raises ProtocolError; the connection is then over."""
        self._data += data
        at = 0
        while len(self._data) - at >= LENGTH_BYTES:
            length = self._codec.frame_length(bytes(self._data[at : at + LENGTH_BYTES]))
            if len(self._data) - at - LENGTH_BYTES < length:
                break
            body = bytes(self._data[at + LENGTH_BYTES : at + LENGTH_BYTES + length])
            at += LENGTH_BYTES + length
            yield self._codec.decode(body)
        del self._data[:at]
