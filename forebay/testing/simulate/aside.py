"""A worker that has room set aside before it stores, and what it may then rely on: none of it is refused, and what it
has stored stays as it was for as long as its lease does."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.errors import RequestRefused
from forebay.kvstore.protocol import ChunkRead, NewChunk

if TYPE_CHECKING:
    from forebay.testing.simulate.worker import Copied, Prompt, Worker

AT_ONCE = 2
"""Chunks that are reserved with one message: no more than any seed lets a client have open."""


@dataclass
class Room:
    """What was set aside under `lease`: slots that are `left`, and the bytes of chunks that were stored with it."""

    lease: int
    left: int
    stored: dict[bytes, bytes] = field(default_factory=dict)


async def store_with_room(worker: Worker, prompt: Prompt, chunks: list[NewChunk], rng: random.Random) -> None:
    """Set room aside for the whole chunks of one group, store them with it, read them some time later, and let go."""
    group = rng.randrange(len(prompt.namespace.groups))
    whole = [c for c in chunks if c.group == group and len(c.tokens) == 4 * prompt.namespace.chunk_tokens]
    if not whole:
        return
    count = len(whole) + rng.choice((0, 0, 2))
    try:
        answer = await worker.client.set_aside(
            prompt.namespace.id, prompt.tenant, group, count, extra=len(prompt.extra),
            lease_ms=rng.choice((0, 100, 500)),
        )  # fmt: skip
    except RequestRefused as error:
        worker.world.checks.refused(worker, error)
        return
    worker.world.count("op.set_aside" if answer.lease else "aside.refused")
    if not answer.lease:
        return
    worker.held.append(answer.lease)
    room = Room(answer.lease, count)
    for at in range(0, len(whole), AT_ONCE):
        await _store(worker, prompt, room, whole[at : at + AT_ONCE])
    for pause in (0.0, rng.choice((0.02, 0.1, 0.3))):
        await asyncio.sleep(pause)
        await _read(worker, room)


async def _store(worker: Worker, prompt: Prompt, room: Room, chunks: list[NewChunk]) -> None:
    reserved_at = worker.world.loop.time()
    slots = await worker.reserve(prompt, chunks, room.lease)
    if slots is None:
        return
    copies = []
    for chunk, slot in zip(chunks, slots, strict=True):
        worker.world.count(f"reserve_aside.{slot.status}")
        if slot.status == "full" and room.left and await _kept(worker, room) is not None:
            worker.world.fail(f"a store was refused though room for {room.left} chunks was set aside")
        if slot.status == "reserved" or slot.kept:
            room.left -= room.left > 0
        if slot.status == "reserved":
            copies.append(worker.begin_copy(prompt, chunk, slot))
    await _commit(worker, room, copies, reserved_at)


async def _commit(worker: Worker, room: Room, copies: list[Copied], reserved_at: float) -> None:
    for copy in copies:
        await copy.task
    if await worker.commit(copies, reserved_at):
        room.stored.update({copy.chunk.key: copy.data for copy in copies})


async def _read(worker: Worker, room: Room) -> None:
    """Copy out what was stored. Only if the lease is found to be alive after that does it have to be right."""
    kept = await _kept(worker, room)
    if kept is None:
        return
    found = {chunk.key: bytes(worker.client.payload(chunk)) for chunk in kept}
    if await _kept(worker, room) is None:
        return
    for key, data in room.stored.items():
        if key not in found:
            worker.world.fail("a chunk that was stored with room set aside isn't kept")
        elif found[key] != data and not worker.world.rotted:
            worker.world.fail("a chunk that was stored with room set aside has other bytes now")
    worker.world.count("aside.read", len(found))


async def _kept(worker: Worker, room: Room) -> list[ChunkRead] | None:
    """What the lease keeps; None if it has ended."""
    joined = await worker.client.join([room.lease])
    return next((shared.chunks for shared in joined.leases if shared.lease == room.lease), None)
