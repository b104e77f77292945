"""Rank 0's connection to the store: when it has one, every rank has one, in the same group and to the same boot."""

from __future__ import annotations

import asyncio
import ctypes
import os
from contextlib import suppress

from forebay.errors import StoreUnavailable
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import Namespace
from forebay.kvstore.layout import Shard
from forebay.workers.ranks.crew import Crew
from forebay.workers.ranks.errors import RankLost
from forebay.workers.ranks.messages import Attach, Detach, Done, Place, See

GROUP_BYTES = 16


class LeadClient(AsyncStoreClient):
    """As its base, for all ranks of `crew`. While the others connect, so does this thread's loop wait: without a
    connection it has nothing else to do."""

    def __init__(self, address: str, crew: Crew) -> None:
        self._group = os.urandom(GROUP_BYTES)
        super().__init__(address, kind="worker", group=self._group)
        self._address, self._crew = address, crew
        self._attached = False
        self._broken = False

    @property
    def connected(self) -> bool:
        """Not any more once a rank has lost its connection: then all of them connect anew."""
        return super().connected and not self._broken

    async def register(self, namespace: Namespace, label: str = "", *, shard: Shard | None = None) -> bytes:
        """As the base's, and the same for every rank. Raises StoreUnavailable if one can't."""
        known = await super().register(namespace, label, shard=shard)
        self._attached = True
        self.agreed(self._crew.order(Attach(self._address, self._group, self.boot)))
        return known

    async def map_extents(self) -> None:
        """As the base's, and the same for every rank: what this one may name the others can find, also if whoever has
        asked for it has gone meanwhile. This one won't ask for these extents again."""
        try:
            await super().map_extents()
        except asyncio.CancelledError:
            self._have_others_see()
            raise
        self._have_others_see()

    def _have_others_see(self) -> None:
        if self._attached:
            self.agreed(self._crew.order(See()))

    async def close(self) -> None:
        """End every rank's connection."""
        if self._attached:
            with suppress(RankLost):  # the worker ends, and says why
                self._crew.order(Detach())
        self._attached = self._broken = False
        await super().close()

    def agreed(self, answers: list[Done]) -> list[Done]:
        """The answers, if all went well. Raises StoreUnavailable, after which every rank connects anew."""
        failed = next((answer.failed for answer in answers if answer.failed), "")
        if failed:
            self._broken = True
            raise StoreUnavailable(f"another rank failed: {failed}")
        return answers

    def place_of(self, memory: memoryview) -> Place:
        """Where in the pool a window is that this client has given."""
        at = _address(memory)
        for extent, view in self._session.pool.views.items():
            offset = at - _address(view)
            if offset >= 0 and offset + memory.nbytes <= view.nbytes:
                return Place(extent, offset, memory.nbytes)
        raise StoreUnavailable("the store has gone, and its pool with it")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
