"""Rank 0's side of chunks that several ranks write: each reserves a part, all fill one slot, it is committed once.

    rank 0   reserve --> place --.          copy own slice        written: complete --> hash the whole, commit
    rank r                       '-> reserve: same place? copy own slice, written

A rank that wasn't given that very place leaves the chunk alone, and then so do all: slices of two computations never
meet. When one gives up, or dies, the store ends the write for all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.errors import StoreUnavailable
from forebay.kvstore.protocol import Slot, Written
from forebay.workers.hot.mirror import HostChunk
from forebay.workers.moves import Push
from forebay.workers.pushing import Pusher
from forebay.workers.ranks.client import LeadClient
from forebay.workers.ranks.copying import LeadCopier
from forebay.workers.ranks.crew import Crew
from forebay.workers.ranks.messages import Fill, Finish, Place, Share
from forebay.workers.ranks.slices import checksums

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rank 0's part of one chunk."""

    push: Push
    slot: Slot


class SharedPusher(Pusher):
    """A pusher whose chunks are written by those ranks that `share` names, by group; rank 0 is always one of them."""

    def share(
        self, crew: Crew, client: LeadClient, copiers: Sequence[LeadCopier], writers: Sequence[Sequence[int]]
    ) -> None:
        """Say once who writes what."""
        self._crew, self._lead, self._leads = crew, client, tuple(copiers)
        self._writers = [tuple(ranks) for ranks in writers]

    async def _store(self, namespace_id: bytes, batch: Sequence[Push]) -> dict[int, HostChunk]:
        hosted: dict[int, HostChunk] = {}
        for ranks in dict.fromkeys(self._writers[push.chunk.group] for push in batch):
            pushes = [push for push in batch if self._writers[push.chunk.group] == ranks]
            if len(ranks) == 1:
                hosted |= await super()._store(namespace_id, pushes)
            else:
                await self._store_together(namespace_id, pushes, ranks)
        return hosted

    async def _store_together(self, namespace_id: bytes, pushes: Sequence[Push], ranks: tuple[int, ...]) -> None:
        slots = await self._reserve(namespace_id, pushes, writers=len(ranks))
        for slot in slots:
            self._counters.add(f"push.{slot.status}")
        parts = [_Part(p, s) for p, s in zip(pushes, slots, strict=True) if s.status == "reserved"]
        if not parts:
            return
        given = self._share_out(namespace_id, parts, ranks)
        for index in given:
            self._fill(index, parts[index], ranks)
            # Others get their turn between chunks: a pull must not wait for a batch of pushes.
            await asyncio.sleep(0)
            if not self._client.connected:
                raise StoreUnavailable("the store went away during a copy")
        self._lead.agreed(self._crew.order(Finish(given), to=ranks))
        await self._commit_together([parts[index] for index in given])
        unwritten = [part.slot.reservation for index, part in enumerate(parts) if index not in given]
        if unwritten:
            self._counters.add("push.unshared", len(unwritten))
            self._client.abort(unwritten)

    def _share_out(self, namespace_id: bytes, parts: Sequence[_Part], ranks: tuple[int, ...]) -> list[int]:
        """Have the others reserve their parts; of which chunks every one was given its own."""
        first = parts[0].push
        order = Share(
            namespace=namespace_id, tenant=first.tenant, retain_s=first.retain_s, writers=len(ranks),
            chunks=[part.push.chunk for part in parts],
            places=[
                Place(part.slot.extent, part.slot.payload_offset, part.push.bytes, part.slot.generation)
                for part in parts
            ],
        )  # fmt: skip
        answers = self._lead.agreed(self._crew.order(order, to=ranks))
        return sorted(set.intersection(*(set(answer.given) for answer in answers)))

    def _fill(self, index: int, part: _Part, ranks: tuple[int, ...]) -> None:
        blocks, slices = part.push.blocks, self._leads[part.push.chunk.group].slices
        room = self._client.room(part.slot, part.push.bytes)
        order = Fill(self._crew.progress.steps, index, list(blocks))
        answers = self._crew.order(order, to=ranks, meanwhile=lambda: slices.store(blocks, room))
        self._lead.agreed(answers)
        self._counters.add("push.bytes", part.push.bytes)

    async def _commit_together(self, parts: Sequence[_Part]) -> None:
        """Every other rank has written: rank 0 is the last, so it hashes what all of them wrote."""
        if not parts:
            return
        done = await self._in_time(self._client.commit([Written(part.slot.reservation, b"") for part in parts]))
        last, written = set(done.to_hash), []
        for part in parts:
            if part.slot.reservation in last:
                room = self._client.room(part.slot, part.push.bytes)
                sums = checksums(room, self._leads[part.push.chunk.group].granule_bytes)
                written.append(Written(part.slot.reservation, sums))
        if written:
            await self._commit(written)
