"""Frames: length, length again in another guise, checksum, then that many bytes of msgpack.

    0   length of the body       u32 little endian
    4   length ^ GUISE           u32: a length that was damaged is known before anybody waits for its bytes
    8   xxh3_64 of the body      u32, its low half
    12  body

The length is checked against a cap before anything is allocated, so a client that announces 1 GiB costs
nothing but its own connection. A frame with any byte changed is a ProtocolError, never another message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec
import xxhash

from forebay.errors import ProtocolError

FRAME_BYTES_MAX = 16 << 20
_HEAD = struct.Struct("<III")
HEAD_BYTES = _HEAD.size
_GUISE = 0x59424546  # "FEBY": what doesn't speak this protocol shows at its first frame
_LOW = 0xFFFFFFFF

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
        return frame(body)

    def body_length(self, head: bytes) -> int:
        """Length of the body that a frame's head announces, or what has come of it: 4 bytes or more.

        Raises ProtocolError over the cap, and for what is no frame.
        """
        length = int.from_bytes(head[:4], "little")
        if length > self.frame_bytes_max:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.frame_bytes_max}")
        if not (length ^ _GUISE).to_bytes(4, "little").startswith(head[4:8]):
            raise ProtocolError("no frame begins here; is the other side of another version?")
        return length

    def open(self, head: bytes, body: bytes) -> M:
        """The message of a whole frame. Raises ProtocolError if it was damaged on its way."""
        if xxhash.xxh3_64_intdigest(body) & _LOW != int.from_bytes(head[8:], "little"):
            raise ProtocolError("a frame's checksum differs")
        return self.decode(body)

    def decode(self, body: bytes | memoryview) -> M:
        """The message in a frame's body. Raises ProtocolError on anything else."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message of this protocol: {error}") from error


def frame(body: bytes) -> bytes:
    """A frame around a body that is encoded already."""
    length = len(body)
    return _HEAD.pack(length, length ^ _GUISE, xxhash.xxh3_64_intdigest(body) & _LOW) + body


class FrameBuffer(Generic[M]):
    """Collects received bytes and yields whole messages. Holds at most one frame and what follows it."""

    def __init__(self, codec: Codec[M]) -> None:
        self._codec = codec
        self._data = bytearray()
        self.last_bytes = 0
        """Length of the body of the message that was yielded last."""

    @property
    def pending(self) -> int:
        """Bytes of a frame that isn't whole yet."""
        return len(self._data)

    def feed(self, data: bytes) -> Iterator[M]:
        """Messages that `data` completes, in order. Raises ProtocolError; the connection is then over."""
        self._data += data
        at = 0
        while len(self._data) - at >= 4:
            head = bytes(self._data[at : at + HEAD_BYTES])
            begin = at + HEAD_BYTES
            end = begin + self._codec.body_length(head)
            if len(self._data) < end:
                break
            body = bytes(memoryview(self._data)[begin:end])  # one copy, and the view is gone again
            at, self.last_bytes = end, end - begin
            yield self._codec.open(head, body)
        del self._data[:at]
