"""Chunks that are pushed here over streams: into room that our store makes, verified piece by piece.

Bytes come into memory of this thread's own, and a piece at a time goes from there into the slot: once our connection
to the daemon is lost nothing more may be written, and a read from the network couldn't be called off.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from forebay.errors import CorruptChunk
from forebay.kvstore.header import HEADER_BYTES_MAX, ChunkHeader
from forebay.tiers.base import ChunkId
from forebay.tiers.p2p.checks import check_wanted, checked_header
from forebay.tiers.p2p.errors import Damaged
from forebay.tiers.p2p.pipes import Pipe, exactly
from forebay.tiers.p2p.source import NoRoom, Room, Source
from forebay.tiers.p2p.stream import DECLINED, NAMESPACE_BYTES_MAX, OFFER, OK, REPLY
from forebay.tiers.p2p.verifier import Verifier

log = logging.getLogger("forebay.tier.p2p")

PIECE_BYTES = 256 << 10
"""Small enough to stay in a core's cache between the network, the checksum and the slot."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Receiver:
    """`source` is asked on `loop` and has `daemon_s`; who sends nothing for `stall_s` is given up."""

    loop: asyncio.AbstractEventLoop
    source: Source
    counts: Counter[str]
    stall_s: float
    daemon_s: float

    def receive(self, pipe: Pipe, chunk: ChunkId, length: int) -> bool:
        """One push, from its offer to its end; False if the connection can't go on. Raises OSError."""
        raw = exactly(pipe, OFFER.size)
        block_length, namespace_length = OFFER.unpack(raw) if raw else (0, 0)
        if not 0 < block_length <= HEADER_BYTES_MAX or namespace_length > NAMESPACE_BYTES_MAX:
            return False
        block, namespace = exactly(pipe, block_length), exactly(pipe, namespace_length)
        if block is None or namespace is None:
            return False
        try:
            header = checked_header(block, length, None)
            check_wanted(header, chunk, length)
        except CorruptChunk as error:
            self.counts["offers_corrupt"] += 1
            log.warning("p2p: a peer offers what is no chunk: %s", error)
            return _decline(pipe, "corrupt")
        room = self._room(header, namespace)
        if isinstance(room, NoRoom):
            self.counts[f"offers_{room.reason}"] += 1
            return _decline(pipe, room.reason)
        return self._into(pipe, header, room)

    def _room(self, header: ChunkHeader, namespace: bytes) -> Room | NoRoom:
        asked = self._on_loop(self.source.reserve(header, namespace))
        try:
            room = asked.result(self.daemon_s)
        except TimeoutError:
            # Room that comes after all isn't wanted any more.
            asked.add_done_callback(lambda done: self._give_up(done.result()))
            return NoRoom("busy")
        if isinstance(room, Room) and len(room.payload) != header.payload_length:
            self._give_up(room)
            return NoRoom("corrupt")
        return room

    def _into(self, pipe: Pipe, header: ChunkHeader, room: Room) -> bool:
        stored = False
        try:
            pipe.send(REPLY.pack(OK, 0, 0, 0, 0))
            why = self._fill(pipe, header, room)
            if not why:
                stored = self._on_loop(self.source.commit(room, header.checksums)).result(self.daemon_s)
        finally:
            if not stored:
                self._give_up(room)
        if not stored:
            return _decline(pipe, why or "io")
        self.counts["pushes_stored"] += 1
        pipe.send(REPLY.pack(OK, 0, 0, 0, 0))
        return True

    def _fill(self, pipe: Pipe, header: ChunkHeader, room: Room) -> str:
        """Read all of a payload; empty once it is in the room and verified, else why not. Raises OSError."""
        length = len(room.payload)
        piece = memoryview(bytearray(min(PIECE_BYTES, length)))
        verifier = Verifier(header, room.payload)
        why, at = "", 0
        while at < length:
            pipe.limit(self.stall_s)
            part = piece[: length - at]
            if pipe.receive(part) < len(part):
                raise ConnectionError("cut off in the middle of a push")
            at += len(part)
            self.counts["received_bytes"] += len(part)
            if not why:  # else the rest is read and thrown away, so that the answer finds the peer listening
                why = self._take(room, at - len(part), part, verifier)
        return why

    def _take(self, room: Room, at: int, part: memoryview, verifier: Verifier) -> str:
        if not self.source.write(room, at, part):
            return "io"
        try:
            verifier.came(at + len(part))
        except Damaged as error:
            self.counts["pushes_corrupt"] += 1
            log.warning("p2p: what was pushed here isn't what its header says: %s", error)
            return "corrupt"
        return ""

    def _on_loop(self, asked: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(asked, self.loop)

    def _give_up(self, room: Room | NoRoom) -> None:
        if isinstance(room, Room):
            self.loop.call_soon_threadsafe(self.source.abort, room)


def _decline(pipe: Pipe, reason: str) -> bool:
    pipe.send(REPLY.pack(DECLINED.get(reason, DECLINED["io"]), 0, 0, 0, 0))
    return True


