"""Copies granules of pinned chunks into the device's blocks, and trusts none before it is verified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.errors import CorruptChunk, StoreUnavailable
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.protocol import ChunkRead
from forebay.workers.copying import Copier
from forebay.workers.counters import Counters
from forebay.workers.moves import HOST

TURN_S = 0.001
"""A copy gives others their turn after this long."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Granules [first, first + len(units)) of one pinned chunk, and the blocks that they go into."""

    chunk: ChunkRead
    first: int
    units: range
    blocks: tuple[int, ...]


class Reading:
    """Copies run on the loop's thread: a hand-over would cost more than most of them take; between chunks others get
    their turn."""

    def __init__(self, client: AsyncStoreClient, copiers: Sequence[Copier], counters: Counters) -> None:
        self._client = client
        self._copiers = tuple(copiers)
        self._counters = counters

    async def copy(self, copies: Sequence[Copy]) -> list[ChunkRead]:
        """Carry out copies; returns chunks that are not what they should be, after the first of which it stops. They
        are reported. Raises StoreUnavailable."""
        turn = time.monotonic()
        for copy in copies:
            chunk, copier = copy.chunk, self._copiers[copy.chunk.group]
            size = copier.granule_bytes
            source = self._client.payload(chunk)[copy.first * size : (copy.first + len(copy.blocks)) * size]
            good = self._load(copier, copy, source)
            # The generation is asked after the bytes were read: a slot that was given away meanwhile
            # has another one, whatever its checksums say.
            if not self._client.intact(chunk):
                raise StoreUnavailable("a pinned slot was given away: the store has restarted")
            if good < len(copy.blocks):
                self._counters.add("loads.corrupt")
                self._client.damaged([(chunk.group, chunk.key)])
                return [chunk]
            source_name = chunk.promoted or HOST
            self._counters.add(f"loaded.{source_name}.bytes", len(source))
            self._counters.add(f"loaded.{source_name}.chunks")
            if time.monotonic() - turn > TURN_S:
                await asyncio.sleep(0)
                turn = time.monotonic()
                if not self._client.connected:
                    raise StoreUnavailable("the store went away during a copy")
        return []

    def _load(self, copier: Copier, copy: Copy, source: memoryview) -> int:
        """Copy and verify; how many granules are good."""
        try:
            checksums = self._client.checksums(copy.chunk)
        except CorruptChunk:
            return 0
        return copier.load(source, checksums[8 * copy.first : 8 * (copy.first + len(copy.blocks))], copy.blocks)
