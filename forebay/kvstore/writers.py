"""Processes that may be writing into the pool: let in, watched, and let go of once they can't write any more.

A connection's end says nothing about its process: that may be stopped, or slow, and still have the pool mapped. Its
flock says it, at the latest when the kernel has ended the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from forebay.kvstore.core import Client, StoreCore
from forebay.kvstore.extents import ClientLocks
from forebay.kvstore.identity import party_of
from forebay.kvstore.protocol import Hello

DEATH_CHECKS_S = (0.0, 0.01, 0.05)
"""A dying process closes its socket before its lock: look again so soon, then at every `check_all`."""


class Writers:
    """All connected clients by id, and owners of slots in quarantine. Lives on the daemon's loop.

    `abort(client)` ends the connection of a client.
    """

    def __init__(self, core: StoreCore, locks: ClientLocks, abort: Callable[[Client], None]) -> None:
        self._core, self._locks, self._abort = core, locks, abort
        self._connected: dict[bytes, Client] = {}
        self._parties: dict[bytes, bytes] = {}

    def welcome(self, hello: Hello) -> tuple[Client, int]:
        """Take a client in; its lock, to be handed over. It writes nothing from before any more.

        Raises AlreadyRunning if a living process has that name.
        """
        # Whoever holds the old lock open may be writing, whatever this Hello says: first see that nobody does.
        lock = self._locks.create(hello.client)
        before = self._connected.pop(hello.client, None)
        if before is not None:
            self._core.drop_client(before, writing=False)
            self._abort(before)
        self._core.end_quarantine(hello.client)
        if hello.group:
            party = self._parties[hello.client] = party_of(hello.group)
            self._locks.join_party(party, hello.client)
        client = self._connected[hello.client] = Client(hello.client, hello.group, hello.tenant)
        self._core.leases.attach(client)
        return client, lock

    def gone(self, client: Client) -> None:
        """A client's connection has ended: its promises end now, its slots once nobody can be writing into them."""
        if self._connected.get(client.id) is not client:
            return  # it has come back already, and was let go of then
        del self._connected[client.id]
        writing = bool(client.reservations) and self._locks.alive(client.id)
        self._core.drop_client(client, writing=writing)
        if writing or client.id in self._core.quarantine:
            self._check_again(client.id, 0)
        else:
            self._forget(client.id)

    def _forget(self, owner: bytes) -> None:
        self._locks.forget(owner)
        party = self._parties.pop(owner, None)
        if party is not None and not self._locks.writers_of(party):
            self._locks.forget(party)

    def _check_again(self, owner: bytes, attempt: int) -> None:
        if attempt < len(DEATH_CHECKS_S):
            delay = DEATH_CHECKS_S[attempt]
            asyncio.get_running_loop().call_later(delay, self._check, owner, attempt + 1)

    def _check(self, owner: bytes, attempt: int) -> None:
        if not self.end_if_dead(owner):
            self._check_again(owner, attempt)

    def end_if_dead(self, owner: bytes) -> bool:
        """Free the slots of a writer if its process is gone, or if none are left."""
        if owner in self._connected or (self._core.may_write(owner) and self._locks.alive(owner)):
            return False
        freed = self._core.end_quarantine(owner)
        self._forget(owner)
        self._core.counters.add("host.quarantine_freed", freed)
        return True

    def check_all(self) -> None:
        """Owners of slots in quarantine may have died."""
        for owner in self._core.quarantine:
            if owner not in self._connected:
                self.end_if_dead(owner)
