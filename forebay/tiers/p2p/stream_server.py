"""The serving side of streams: a thread for each connection, which reads the pool in place."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from forebay.errors import TierUnavailable
from forebay.tiers.base import ChunkId
from forebay.tiers.p2p.pipes import Pipe, PlainPipe, TlsPipe, exactly
from forebay.tiers.p2p.receive import Receiver
from forebay.tiers.p2p.remote import Remote
from forebay.tiers.p2p.source import Loan, Source
from forebay.tiers.p2p.stream import (
    MAGIC,
    MISSING,
    NO_TICKET,
    OK,
    PLACE,
    PUSH,
    REPLY,
    REQUEST,
    TOO_LARGE,
)
from forebay.tiers.p2p.tls import Identity

log = logging.getLogger("forebay.tier.p2p")

CONNECTIONS_MAX = 64
STRANGERS_MAX = 32
"""Connections that have shown no good ticket yet. One more costs the oldest of them its place."""
STRANGER_S = 2.0
"""How long they have, to shake hands and again to show it."""
IDLE_S = 30.0
DAEMON_S = 5.0


@dataclass(frozen=True, slots=True)
class Listen:
    """Where: `port` 0 is one of the kernel's choice. With an `identity` through TLS."""

    host: str
    port: int = 0
    identity: Identity | None = None


class StreamServer:
    """Listens. `source` is asked on `loop`, and what it lends at once from any thread; `known` says whether a ticket
    is good; a peer that makes no progress for `stall_s` is hung up on. Raises TierUnavailable if it can't listen."""

    def __init__(
        self, listen: Listen, loop: asyncio.AbstractEventLoop, source: Source, remote: Remote,
        known: Callable[[bytes], bool], stall_s: float,
    ) -> None:  # fmt: skip
        self._loop, self._source, self._identity = loop, source, listen.identity
        self._remote, self._known, self._stall_s = remote, known, stall_s
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        try:
            address = ("" if listen.host == "*" else listen.host, listen.port)
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            raise TierUnavailable(f"p2p can't listen on {listen.host} port {listen.port}: {error}") from error
        self.port = int(self._listener.getsockname()[1])
        self._strangers: dict[socket.socket, None] = {}
        self._connections: dict[socket.socket, Pipe] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.counts: Counter[str] = Counter()
        self._receiver = Receiver(loop, source, self.counts, stall_s, DAEMON_S)
        threading.Thread(target=self._accept, name="p2p-accept", daemon=True).start()

    @property
    def fingerprint(self) -> bytes:
        """Of the certificate; empty without TLS."""
        return self._identity.fingerprint if self._identity else b""

    @property
    def connections(self) -> int:
        """How many have shown a good ticket."""
        return len(self._connections)

    @property
    def strangers(self) -> int:
        """How many haven't."""
        return len(self._strangers)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                self.counts["accept_failures"] += 1  # too many descriptors, or gone again
                time.sleep(0.05)
                continue
            with self._lock:
                if len(self._strangers) >= STRANGERS_MAX:
                    self.counts["turned_away"] += 1
                    _shut(next(iter(self._strangers)))
                    self._strangers.pop(next(iter(self._strangers)))
                self._strangers[connection] = None
            threading.Thread(target=self._serve, args=(connection,), name="p2p-send", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        pipe: Pipe | None = None
        try:
            pipe = self._pipe(connection)
            pipe.limit(STRANGER_S)
            request = exactly(pipe, REQUEST.size)
            if request is None or not self._let_in(connection, pipe, request):
                return
            while request is not None:
                pipe.limit(self._stall_s)
                if not self._answer(pipe, request):
                    return
                pipe.limit(IDLE_S)
                request = exactly(pipe, REQUEST.size)
        except OSError:
            self.counts["broken"] += 1
        except Exception:
            self.counts["failures"] += 1
            log.exception("p2p: serving a stream failed")
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._connections.pop(connection, None)
            (pipe or connection).close()

    def _pipe(self, connection: socket.socket) -> Pipe:
        if self._identity is None:
            return PlainPipe(connection)
        pipe = TlsPipe(connection, self._identity.context, server=True)
        try:
            pipe.limit(STRANGER_S)
            pipe.shake()
        except BaseException:
            pipe.close()
            raise
        return pipe

    def _let_in(self, connection: socket.socket, pipe: Pipe, request: bytes) -> bool:
        """Does the first request show a good ticket, and is there room?"""
        if not self._welcome(pipe, request):
            return False
        with self._lock:
            if connection not in self._strangers or len(self._connections) >= CONNECTIONS_MAX or self._closed:
                self.counts["turned_away"] += 1
                return False
            del self._strangers[connection]
            self._connections[connection] = pipe
        return True

    def _welcome(self, pipe: Pipe, request: bytes) -> bool:
        magic, ticket = REQUEST.unpack(request)[:2]
        if magic == MAGIC and self._known(ticket):
            return True
        self.counts["no_ticket"] += 1
        pipe.send(REPLY.pack(NO_TICKET, 0, 0, 0, 0))
        return False

    def _answer(self, pipe: Pipe, request: bytes) -> bool:
        """Do what is asked; False if the connection can't go on."""
        if not self._welcome(pipe, request):
            return False
        _, _, what, group, key, capacity = REQUEST.unpack(request)
        chunk = ChunkId(group, key)
        if what == PUSH:
            return self._receiver.receive(pipe, chunk, capacity)
        loan = self._source.lend_at_once(chunk) or self._lent(chunk)
        if loan is None:
            pipe.send(REPLY.pack(MISSING, 0, 0, 0, 0))
            return True
        try:
            return self._lend(pipe, loan, what, capacity)
        finally:
            if loan.anywhere:
                loan.give_back()
            else:
                self._loop.call_soon_threadsafe(loan.give_back)

    def _lent(self, chunk: ChunkId) -> Loan | None:
        asked: Future[Loan | None] = asyncio.run_coroutine_threadsafe(self._source.lend(chunk), self._loop)
        try:
            return asked.result(DAEMON_S)
        except TimeoutError:
            asked.cancel()
            return None

    def _lend(self, pipe: Pipe, loan: Loan, what: int, capacity: int) -> bool:
        if len(loan.payload) > capacity:
            pipe.send(REPLY.pack(TOO_LARGE, 0, 0, 0, 0))
            return True
        place = self._remote.address(loan.extent, loan.offset)
        epoch = self._remote.epoch  # read after the address, so that its metadata has it
        pipe.send(REPLY.pack(OK, len(loan.block), len(loan.payload), place, epoch) + loan.block)
        if what == PLACE:
            return bool(pipe.receive(memoryview(bytearray(1))))
        pipe.send(loan.payload)
        self.counts["sent_bytes"] += len(loan.payload)
        return True

    def close(self) -> None:
        """Listen no more, hang up."""
        self._closed = True
        _shut(self._listener)
        self._listener.close()
        with self._lock:
            for pipe in self._connections.values():
                pipe.hang_up()
            for connection in self._strangers:
                _shut(connection)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
