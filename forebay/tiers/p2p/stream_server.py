"""The serving side of streams: a thread for each connection, which reads the pool in place."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from forebay.tiers.base import ChunkId
from forebay.tiers.p2p.remote import Remote
from forebay.tiers.p2p.source import Loan
from forebay.tiers.p2p.stream import (
    MAGIC,
    MISSING,
    NO_TICKET,
    OK,
    PLACE,
    REPLY,
    REQUEST,
    TOO_LARGE,
    limit,
    tune,
)

log = logging.getLogger("forebay.tier.p2p")

CONNECTIONS_MAX = 64
IDLE_S = 30.0
DAEMON_S = 5.0


class StreamServer:
    """Listens on `host` at a port of the kernel's choice. `lend` is a coroutine function of `loop`, which
    is asked for what `at_once`, called from any thread, hasn't got; `known` says
    whether a ticket is good; a peer that makes no progress for `stall_s` is hung up on."""

    def __init__(
        self,
        host: str,
        loop: asyncio.AbstractEventLoop,
        lend: Callable[[ChunkId], Coroutine[Any, Any, Loan | None]],
        at_once: Callable[[ChunkId], Loan | None],
        remote: Remote,
        known: Callable[[bytes], bool],
        stall_s: float,
    ) -> None:
        self._loop, self._lend, self._at_once = loop, lend, at_once
        self._remote, self._known, self._stall_s = remote, known, stall_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        threading.Thread(target=self._accept, name="p2p-accept", daemon=True).start()

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if len(self._connections) >= CONNECTIONS_MAX:
                    self.counts["turned_away"] += 1
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="p2p-send", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            tune(connection)
            while True:
                limit(connection, IDLE_S)
                request = _exactly(connection, REQUEST.size)
                if request is None:
                    return
                limit(connection, self._stall_s)
                if not self._answer(connection, request):
                    return
        except OSError:
            self.counts["broken"] += 1
        except Exception:
            self.counts["failures"] += 1
            log.exception("p2p: serving a stream failed")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, request: bytes) -> bool:
        magic, ticket, what, group, key, capacity = REQUEST.unpack(request)
        if magic != MAGIC or not self._known(ticket):
            self.counts["no_ticket"] += 1
            connection.sendall(REPLY.pack(NO_TICKET, 0, 0, 0, 0))
            return False
        chunk = ChunkId(group, key)
        loan = self._at_once(chunk) or _result(asyncio.run_coroutine_threadsafe(self._lend(chunk), self._loop))
        if loan is None:
            connection.sendall(REPLY.pack(MISSING, 0, 0, 0, 0))
            return True
        try:
            if len(loan.payload) > capacity:
                connection.sendall(REPLY.pack(TOO_LARGE, 0, 0, 0, 0))
                return True
            place = self._remote.address(loan.extent, loan.offset)
            epoch = self._remote.epoch  # read after the address, so that its metadata has it
            connection.sendall(REPLY.pack(OK, len(loan.block), len(loan.payload), place, epoch) + loan.block)
            if what == PLACE:
                return bool(connection.recv(1))
            connection.sendall(loan.payload)
            self.counts["sent_bytes"] += len(loan.payload)
            return True
        finally:
            if loan.anywhere:
                loan.give_back()
            else:
                self._loop.call_soon_threadsafe(loan.give_back)

    def close(self) -> None:
        """Listen no more, hang up."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def _result(asked: Future[Loan | None]) -> Loan | None:
    try:
        return asked.result(DAEMON_S)
    except TimeoutError:
        asked.cancel()
        return None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    """So many bytes; None if the other side has hung up before the first."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            if data:
                raise ConnectionError("cut off in the middle of a message")
            return None
        data += piece
    return bytes(data)
