"""Where a load's bytes go: the header into a buffer, the payload into the pool, until its deadline and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from forebay.errors import CorruptChunk
from forebay.kvstore.header import HEADER_BYTES_MAX, ChunkHeader, decode_header, header_bytes
from forebay.tiers.base import JobResult, LoadJob
from forebay.tiers.chunks import stored_header, verify_payload
from forebay.tiers.codec.codec import Codec
from forebay.tiers.codec.envelope import is_enveloped
from forebay.tiers.codec.errors import UnsealedChunk
from forebay.tiers.s3.bucket import GivenUp

_BODY_LENGTH_AT = 32
_BODY_AT = 36


class TooLarge(CorruptChunk):
    """The chunk is whole, but the slot doesn't take it."""


class LoadSlot:
    """Takes one answer after another (see `bucket.Sink`); a result is told once, whoever comes first.

    The pool is written under a lock, so that once the deadline has been told of nothing is written any more, however
    late an answer comes.
    """

    def __init__(
        self, job: LoadJob, memory: memoryview, finish: Callable[[JobResult], None], codec: Codec | None = None
    ) -> None:
        self.job = job
        self._codec = codec or Codec()
        self._memory = memory
        self._finish = finish
        self._lock = threading.Lock()
        self.finished = False
        self.started = False
        """Has an answer begun to come?"""
        self.expected = 0
        """How many bytes the answer must have; 0: not known."""
        self.modified = 0.0
        self._reset(0)

    def _reset(self, length: int) -> None:
        self._length = length
        self._front = bytearray()
        self._block_bytes = 0
        self._enveloped = False
        self._at = 0

    def begin(self, length: int, modified: float) -> None:
        """See `bucket.Sink`. Raises CorruptChunk if this can't be the chunk."""
        if self.finished:
            raise GivenUp
        self.started = True
        self.modified = modified
        self._reset(length)
        if self.expected and length != self.expected:
            raise CorruptChunk(f"the object has {length} bytes, {self.expected} were stored")
        if length > self.job.capacity + HEADER_BYTES_MAX:
            raise TooLarge(f"{length} bytes, the slot takes {self.job.capacity}")

    def take(self, data: bytes) -> None:
        """See `bucket.Sink`."""
        if not self._block_bytes:
            self._front += data
            self._begin_payload()
        else:
            self._write(memoryview(data))

    def _begin_payload(self) -> None:
        """If all of the header is there, go on with the payload."""
        if len(self._front) < _BODY_AT:
            return
        if is_enveloped(bytes(self._front[:_BODY_AT])):
            self._enveloped = True  # it is decoded once all of it is there
            return
        if self._codec.sealing:
            raise UnsealedChunk("a chunk in clear text where chunks are encrypted")
        body_end = _BODY_AT + int.from_bytes(self._front[_BODY_LENGTH_AT:_BODY_AT], "little")
        if body_end > HEADER_BYTES_MAX:
            raise CorruptChunk("no chunk begins here")
        if len(self._front) < body_end:
            return
        header = decode_header(bytes(self._front[:body_end]))
        size = header_bytes(header.token_count, len(header.extra))
        if self._length != size + header.payload_length:
            raise CorruptChunk(f"the object has {self._length} bytes, its chunk {size} + {header.payload_length}")
        if header.payload_length > self.job.capacity:
            raise TooLarge(f"payload of {header.payload_length} bytes, the slot takes {self.job.capacity}")
        if len(self._front) < size:
            return
        self._block_bytes = size
        rest = self._front[size:]
        del self._front[size:]
        self._write(memoryview(rest))

    def _write(self, data: memoryview) -> None:
        with self._lock:
            if self.finished:
                raise GivenUp
            if self._at + len(data) > self.job.capacity:
                raise TooLarge(f"more than the slot's {self.job.capacity} bytes")
            self._memory[self._at : self._at + len(data)] = data
            self._at += len(data)

    def verified(self) -> ChunkHeader:
        """The header of what has come, once all of it agrees. Raises CorruptChunk, CannotDecode."""
        if self._enveloped:
            self._decode()
        header = stored_header(bytes(self._front))
        if (header.group, header.key) != (self.job.chunk.group, self.job.chunk.key):
            raise CorruptChunk("the object holds another chunk than was asked for")
        verify_payload(header, self._memory[: self._at])
        return header

    def _decode(self) -> None:
        """Open the envelope: its payload goes into the pool, its header block stays in front."""
        stored = bytes(self._front)
        told = self._codec.front(stored)
        if told.stored_length != len(stored):
            raise CorruptChunk(f"the object has {len(stored)} bytes, {told.stored_length} were stored")
        if told.header.payload_length > self.job.capacity:
            raise TooLarge(f"payload of {told.header.payload_length} bytes, the slot takes {self.job.capacity}")
        with self._lock:
            if self.finished:
                raise GivenUp
            found = self._codec.decode(stored, self._memory)
        self._front = bytearray(found.block)
        self._at = found.header.payload_length
        self._enveloped = False

    def succeed(self) -> bool:
        """Tell that the chunk is in the slot, unless something else was told."""
        return self._tell(JobResult(self.job.id, True, "", bytes(self._front), self._at))

    def fail(self, reason: str) -> bool:
        """Tell why it isn't, unless something else was told. From now on the pool isn't written."""
        return self._tell(JobResult(self.job.id, False, reason))

    def _tell(self, result: JobResult) -> bool:
        with self._lock:
            if self.finished:
                return False
            self.finished = True
        self._finish(result)
        return True
