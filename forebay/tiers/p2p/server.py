"""The serving side: what this host's store has, for peers that dial in.

Quick messages are answered at once; those that need our daemon run as tasks, a bounded number a guest. A guest that
doesn't take its answers loses them, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import zmq

from forebay.errors import CorruptChunk, ForebayError, ProtocolError, RequestRefused
from forebay.tiers.base import ClearScope
from forebay.tiers.chunks import verify_payload
from forebay.tiers.p2p.checks import checked_header
from forebay.tiers.p2p.guests import OPENS_MAX, PUSHES_MAX, Guest, Guests, Push
from forebay.tiers.p2p.remote import Remote
from forebay.tiers.p2p.sockets import Socket, send_now
from forebay.tiers.p2p.source import NoRoom, Source
from forebay.tiers.p2p.wire import (
    ASK_QUERIES_MAX,
    LISTENER,
    PIECE_BYTES,
    VERSION,
    Accepted,
    Answer,
    Ask,
    Bye,
    Bytes,
    Clear,
    Cleared,
    Close,
    Damaged,
    Declined,
    GetNixl,
    Hello,
    Message,
    Nixl,
    NotOpened,
    Offer,
    Open,
    Opened,
    Ping,
    Pong,
    Read,
    Refused,
    Stored,
    Taken,
    ToListener,
    Welcome,
    Withdraw,
    encode,
    sound,
)

log = logging.getLogger("forebay.tier.p2p")

BUSY_MAX = 32
"""Requests of one guest that wait for our daemon."""
DAEMON_S = 5.0
CLEAR_S = 60.0
SWEEP_S = 1.0


@dataclass
class Server:
    """Serves one socket. `stream_port` is where tickets are taken (0: nowhere), with a `fingerprint` through TLS.
    `clear` carries out a guest's clear and returns how many chunks memory lost; None: guests may not clear."""

    socket: Socket
    name: str
    boot: bytes
    source: Source
    remote: Remote
    stream_port: int = 0
    fingerprint: bytes = b""
    clear: Callable[[ClearScope], Awaitable[int]] | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.guests = Guests(self._loop.time, self.source.abort)
        self.counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        sweeper = asyncio.create_task(self._sweep())
        try:
            while True:
                frames = await self.socket.recv_multipart(copy=False)
                if 2 <= len(frames) <= 3:
                    self._handle(frames[0].bytes, frames[1].buffer, frames[2].buffer if len(frames) == 3 else None)
        finally:
            sweeper.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(sweeper, *self._tasks, return_exceptions=True)
            self.guests.remove_all()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.guests.sweep()

    def _send(self, identity: bytes, message: Message, piece: memoryview | None = None) -> None:
        frames: list[Any] = [identity, encode(message)]
        if piece is not None:
            frames.append(piece)
        error = send_now(self.socket, frames, copy=piece is None)
        if error is not None:
            self.counts["replies_lost"] += 1
            if not isinstance(error, zmq.Again):  # nobody has this routing id any more
                self.guests.remove(identity)

    def _handle(self, identity: bytes, body: memoryview, piece: memoryview | None) -> None:
        try:
            message = LISTENER.decode(body)
        except ProtocolError as error:
            self.counts["not_understood"] += 1
            self._send(identity, Refused(0, str(error)[:200]))
            return
        if isinstance(message, Hello):
            self._hello(identity, message)
            return
        guest = self.guests.get(identity)
        if guest is None:
            self._send(identity, Refused(0, "say Hello first"))
        elif isinstance(message, Bye):
            self.guests.remove(identity)
        elif isinstance(message, Ping):
            self._send(identity, Pong(self.remote.epoch))
        elif isinstance(message, GetNixl):
            metadata = self.remote.metadata() if guest.nixl else b""
            self._send(identity, Nixl(metadata, self.remote.epoch))
        else:
            self._request(guest, identity, message, piece)

    def _request(self, guest: Guest, identity: bytes, message: ToListener, piece: memoryview | None) -> None:
        match message:
            case Ask():
                self._start(guest, identity, message.rid, self._ask(identity, message))
            case Open():
                self._start(guest, identity, message.rid, self._open(guest, identity, message))
            case Read():
                self._read(guest, identity, message)
            case Close(rid=rid):
                loan = guest.loans.pop(rid, None)
                if loan is not None:
                    loan.give_back()
            case Offer():
                self._start(guest, identity, message.rid, self._offer(guest, identity, message))
            case Bytes():
                self._bytes(guest, identity, message, piece)
            case Withdraw(rid=rid):
                self._withdraw(guest, rid)
            case Clear():
                self._start(guest, identity, message.rid, self._clear(guest, identity, message))
            case Damaged(chunk=chunk):
                self.counts["told_damaged"] += 1
                self.source.damaged(chunk)

    def _hello(self, identity: bytes, hello: Hello) -> None:
        if hello.version != VERSION:
            self._send(identity, Refused(0, f"this host speaks version {VERSION}, you {hello.version}"))
            return
        if hello.boot == self.boot:
            self._send(identity, Refused(0, "that is myself"))
            return
        guest = self.guests.welcome(identity, hello.name[:64], hello.boot, hello.keeper)
        if guest is None:
            self._send(identity, Refused(0, "too many peers are here already"))
            return
        guest.nixl = hello.nixl
        metadata = self.remote.metadata() if hello.nixl else b""
        self._send(
            identity,
            Welcome(
                VERSION, self.name, self.boot, self.stream_port, guest.ticket, metadata, self.remote.epoch,
                self.fingerprint,
            ),
        )  # fmt: skip

    def _start(self, guest: Guest, identity: bytes, rid: int, work: Coroutine[Any, Any, None]) -> bool:
        """Do something that takes our daemon; False if the guest has too much of that under way."""
        if guest.busy >= BUSY_MAX:
            work.close()
            self.counts["refused_busy"] += 1
            self._send(identity, Refused(rid, "busy"))
            return False
        guest.busy += 1
        task = asyncio.create_task(self._finish(guest, identity, rid, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _finish(self, guest: Guest, identity: bytes, rid: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except TimeoutError:
            self.counts["daemon_late"] += 1
            self._send(identity, Refused(rid, "busy"))
        except Exception:
            self.counts["failures"] += 1
            log.exception("p2p: a request of %s failed", guest.name)
            self._send(identity, Refused(rid, "failed"))
        finally:
            guest.busy -= 1

    # --- reading ---------------------------------------------------------------------------------------

    async def _ask(self, identity: bytes, message: Ask) -> None:
        if len(message.queries) > ASK_QUERIES_MAX or not all(sound(query) for query in message.queries):
            self._send(identity, Refused(message.rid, f"at most {ASK_QUERIES_MAX} queries, with keys of 32 bytes"))
            return
        results = await asyncio.wait_for(self.source.find(message.queries), DAEMON_S)
        self.counts["answers"] += 1
        self.counts["answered_hits"] += sum(result.outcome == "hit" for result in results)
        self._send(identity, Answer(message.rid, results))

    async def _open(self, guest: Guest, identity: bytes, message: Open) -> None:
        if len(guest.loans) >= OPENS_MAX or message.rid in guest.loans:
            self._send(identity, NotOpened(message.rid, "busy"))
            return
        loan = await asyncio.wait_for(self.source.lend(message.chunk), DAEMON_S)
        if loan is None:
            self._send(identity, NotOpened(message.rid, "missing"))
            return
        if len(loan.payload) > message.capacity or self.guests.get(identity) is not guest:
            loan.give_back()
            self._send(identity, NotOpened(message.rid, "corrupt"))
            return
        guest.loans[message.rid] = loan
        self.counts["opened"] += 1
        address = self.remote.address(loan.extent, loan.offset)
        self._send(identity, Opened(message.rid, loan.block, len(loan.payload), address, self.remote.epoch))

    async def _clear(self, guest: Guest, identity: bytes, message: Clear) -> None:
        if self.clear is None:
            self.counts["clears_refused"] += 1
            self._send(identity, Refused(message.rid, "clears aren't taken here: clear_peers isn't set"))
            return
        try:
            chunks = await asyncio.wait_for(self.clear(message.scope), CLEAR_S)
        except ForebayError as error:
            self.counts["clears_failed"] += 1
            log.warning("p2p: a clear that %s has passed on failed: %s", guest.name, error)
            busy = isinstance(error, RequestRefused) and error.code == "busy"
            self._send(identity, Refused(message.rid, "busy" if busy else str(error)[:200]))
            return
        log.info("p2p: %s has passed on a clear: %d chunks of memory are gone", guest.name, chunks)
        self._send(identity, Cleared(message.rid, chunks))

    def _read(self, guest: Guest, identity: bytes, message: Read) -> None:
        loan = guest.loans.get(message.rid)
        end = message.offset + message.length
        if loan is None or not 0 <= message.offset < end <= len(loan.payload) or message.length > PIECE_BYTES:
            self._send(identity, Refused(message.rid, "no such piece is open"))
            return
        self.counts["sent_bytes"] += message.length
        self._send(identity, Bytes(message.rid, message.offset), loan.payload[message.offset : end])

    # --- being pushed to -------------------------------------------------------------------------------

    async def _offer(self, guest: Guest, identity: bytes, message: Offer) -> None:
        if len(guest.pushes) >= PUSHES_MAX or message.rid in guest.pushes:
            self._send(identity, Declined(message.rid, "busy"))
            return
        try:
            header = checked_header(message.header, message.length, None)
        except CorruptChunk as error:
            self.counts["offers_corrupt"] += 1
            log.warning("p2p: %s offers what is no chunk: %s", guest.name, error)
            self._send(identity, Declined(message.rid, "corrupt"))
            return
        room = await self.source.reserve(header, message.namespace)
        if isinstance(room, NoRoom):
            self.counts[f"offers_{room.reason}"] += 1
            self._send(identity, Declined(message.rid, room.reason))
            return
        if self.guests.get(identity) is not guest or len(room.payload) != message.length:
            self.source.abort(room)
            return
        guest.pushes[message.rid] = Push(header, room)
        self._send(identity, Accepted(message.rid))

    def _bytes(self, guest: Guest, identity: bytes, message: Bytes, piece: memoryview | None) -> None:
        push = guest.pushes.get(message.rid)
        if push is None:
            return  # it has been answered already
        left = push.header.payload_length - push.received
        in_order = piece is not None and message.offset == push.received and 0 < len(piece) <= left
        if piece is None or not in_order or not self.source.writable(push.room):
            self._withdraw(guest, message.rid)
            self._send(identity, Stored(message.rid, False, "corrupt"))
            return
        push.room.payload[push.received : push.received + len(piece)] = piece
        push.received += len(piece)
        self.counts["received_bytes"] += len(piece)
        if len(piece) == left:
            del guest.pushes[message.rid]
            if not self._start(guest, identity, message.rid, self._store(identity, message.rid, push)):
                self.source.abort(push.room)
        else:
            self._send(identity, Taken(message.rid, push.received))

    async def _store(self, identity: bytes, rid: int, push: Push) -> None:
        committed = False
        try:
            await asyncio.to_thread(verify_payload, push.header, push.room.payload)
            if self.source.writable(push.room):
                committed = await self.source.commit(push.room, push.header.checksums)
        except CorruptChunk as error:
            self.counts["pushes_corrupt"] += 1
            log.warning("p2p: what was pushed here isn't what its header says: %s", error)
        finally:
            if not committed:
                self.source.abort(push.room)
        self.counts["pushes_stored"] += committed
        self._send(identity, Stored(rid, committed, "" if committed else "corrupt"))

    def _withdraw(self, guest: Guest, rid: int) -> None:
        push = guest.pushes.pop(rid, None)
        if push is not None:
            self.source.abort(push.room)

    def figures(self) -> dict[str, float]:
        """Gauges and counters."""
        counts = {f"serve.{name}": float(count) for name, count in self.counts.items()}
        return counts | self.guests.figures() | {"serve.tasks": float(len(self._tasks))}
