"""Chunks of the pool that are read in place: pinned, and verified once, before anybody reads a row of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from forebay.errors import CorruptChunk
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.protocol import ChunkRead, NewChunk, Slot
from forebay.tiers.base import Query
from forebay.workers.hot.mirror import HostChunk
from forebay.workers.hot.telling import ChunkPlace

LEASE_MS = 120_000
"""How long a lease lasts that nobody renews: as long as a worker may be stopped without losing its rows."""

TURN_BYTES = 8 << 20
"""So much is hashed before others get their turn."""


async def verified(client: AsyncStoreClient, chunk: ChunkRead, granule_bytes: int) -> bool:
    """Are a pinned chunk's bytes what its header says? Reads all of them. What isn't is reported."""
    good = True
    try:
        checksums = client.checksums(chunk)
        payload = client.payload(chunk)
    except CorruptChunk:
        client.damaged([(chunk.group, chunk.key)])
        return False
    expected: list[int] = np.frombuffer(checksums, dtype="<u8").tolist()
    read = 0
    for at, checksum in enumerate(expected):
        granule = payload[at * granule_bytes : (at + 1) * granule_bytes]
        if xxhash.xxh3_64_intdigest(granule) != checksum:
            good = False
            break
        read += granule_bytes
        if read >= TURN_BYTES:
            await asyncio.sleep(0)
            read = 0
    if not good or not client.intact(chunk):
        client.damaged([(chunk.group, chunk.key)])
        return False
    return True


def host_chunk(client: AsyncStoreClient, chunk: ChunkRead, lease: int, shares: int, upto: int) -> HostChunk:
    """A verified chunk, as far as position `upto`."""
    tokens = min(chunk.tokens, upto - chunk.start) // MATCH_UNIT * MATCH_UNIT
    place = ChunkPlace(client.boot, chunk.extent, chunk.slot_offset, chunk.payload_offset, chunk.generation)
    return HostChunk(
        chunk.group, chunk.start, tokens, client.payload(chunk), lease, shares, client.witness(chunk), place
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk that has just been stored. `own`: by this process, so that its bytes needn't be doubted."""

    chunk: NewChunk
    granule_bytes: int
    own: bool


async def hold_kept(client: AsyncStoreClient, stored: Stored, slot: Slot) -> HostChunk | None:
    """A chunk that is pinned with the room that its request had set aside; None if it turns out to be damaged. It has
    no lease of its own."""
    chunk = stored.chunk
    tokens = len(chunk.tokens) // 4
    read = ChunkRead(
        chunk.group, chunk.start, tokens, slot.extent, slot.slot_offset, slot.payload_offset,
        tokens // MATCH_UNIT * stored.granule_bytes, slot.generation, chunk.key,
    )  # fmt: skip
    good = stored.own or await verified(client, read, stored.granule_bytes)
    return host_chunk(client, read, 0, 0, chunk.start + tokens) if good else None


async def hold_stored(client: AsyncStoreClient, wanted: Sequence[Stored]) -> list[HostChunk | None]:
    """Pin chunks that have just been stored, under one lease; None for those that have gone already, or turn out to be
    damaged."""
    queries = [Query(one.chunk.group, one.chunk.key, one.chunk.parent, b"") for one in wanted]
    held = await client.hold(queries, lease_ms=LEASE_MS)
    reads = [held.chunks[place] if place >= 0 else None for place in held.places]
    found: list[ChunkRead | None] = []
    for read, one in zip(reads, wanted, strict=True):
        good = read is not None and (one.own or await verified(client, read, one.granule_bytes))
        found.append(read if good else None)
    shares = sum(read is not None for read in found)
    if held.lease and not shares:
        client.release([held.lease])
    return [
        None if read is None else host_chunk(client, read, held.lease, shares, read.start + read.tokens)
        for read in found
    ]
