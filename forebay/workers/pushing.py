"""Pushes: a queue bounded in bytes, and the loop that empties it: reserve, copy, checksum, commit.

The engine offers and goes on; what finds the queue full is dropped and counted. First in, first out, so
parents are stored before their children.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from forebay.errors import RequestRefused, StoreUnavailable
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.protocol import Slot, Written
from forebay.workers.copying import Copier
from forebay.workers.counters import Counters
from forebay.workers.hot.keeping import Stored, hold_kept, hold_stored
from forebay.workers.hot.mirror import HostChunk
from forebay.workers.moves import Push, Pushed
from forebay.workers.tracing import NO_TRACE, Trace

BATCH_CHUNKS_MAX = 32
BATCH_BYTES_MAX = 64 << 20
ANSWER_S = 5.0
"""A store that takes longer than this to answer a reserve or commit is treated as gone."""

R = TypeVar("R")

log = logging.getLogger(__name__)


class PushQueue:
    """Pushes that wait. The engine's thread offers and sheds, the transfer thread takes."""

    def __init__(self, bytes_max: int, counters: Counters) -> None:
        self._bytes_max = bytes_max
        self._counters = counters
        self._lock = threading.Lock()
        self._waiting: deque[Push] = deque()
        self._bytes = 0

    def offer(self, push: Push) -> bool:
        """Queue a push, or count it as dropped."""
        with self._lock:
            if self._bytes + push.bytes > self._bytes_max:
                self._counters.add("push.dropped")
                return False
            self._waiting.append(push)
            self._bytes += push.bytes
            return True

    def take(self) -> list[Push]:
        """The next batch: of one tenant and retention, within the caps; empty if nothing waits."""
        with self._lock:
            batch: list[Push] = []
            size = 0
            while self._waiting and len(batch) < BATCH_CHUNKS_MAX:
                push = self._waiting[0]
                if batch and (not _alike(push, batch[0]) or size + push.bytes > BATCH_BYTES_MAX):
                    break
                batch.append(self._waiting.popleft())
                size += push.bytes
            self._bytes -= size
            return batch

    def empty_out(self) -> list[Push]:
        """Take all that waits, to drop it; the caller counts."""
        with self._lock:
            pushes, self._bytes = list(self._waiting), 0
            self._waiting.clear()
            return pushes

    @property
    def bytes(self) -> int:
        """Bytes that wait."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._waiting)


def _alike(push: Push, other: Push) -> bool:
    """May one message reserve room for both?"""
    return (push.tenant, push.retain_s, push.aside) == (other.tenant, other.retain_s, other.aside)


class Pusher:
    """Empties a queue into the store, on the transfer thread's loop."""

    def __init__(
        self,
        client: AsyncStoreClient,
        queue: PushQueue,
        copiers: Sequence[Copier],
        counters: Counters,
        done: Callable[[Pushed], None],
        trace: Trace = NO_TRACE,
    ) -> None:
        self._trace = trace
        self._client = client
        self._queue = queue
        self._copiers = tuple(copiers)
        self._counters = counters
        self._done = done
        self.running = 0

    async def push_some(self, namespace_id: bytes) -> bool:
        """Store one batch; False if nothing waited. Raises StoreUnavailable, the batch being lost then.

        Every push that was taken is answered, whatever happens, and only when its blocks are no longer
        read.
        """
        self.running = 1  # before the queue looks empty: nobody may think that all is stored
        batch = self._queue.take()
        if not batch:
            self.running = 0
            return False
        lost = True
        hosted: dict[int, HostChunk] = {}
        self.running = len(batch)
        began = self._trace.now()
        try:
            hosted = await self._store(namespace_id, batch)
            lost = False
        except RequestRefused as error:
            lost = False
            self._counters.add("push.refused", len(batch))
            log.warning("the store refused to take %d chunks: %s", len(batch), error)
        finally:
            self.running = 0
            self._trace.moved("push", began, chunks=len(batch), bytes=sum(push.bytes for push in batch), lost=lost)
            for push in batch:
                there = hosted.get(id(push))
                refused = not lost and there is None and push.admission > 0
                self._done(Pushed(push, lost, there, refused))
        return True

    async def _store(self, namespace_id: bytes, batch: Sequence[Push]) -> dict[int, HostChunk]:
        """Reserve, copy, commit. Ends only when none of it is read or written any more. Returns those that were to stay
        in host memory, by the identity of their push."""
        slots = await self._reserve(namespace_id, batch)
        written = await self._write(batch, slots)
        good = not written or await self._commit(written)
        return await self._hold(batch, slots, good)

    async def _hold(self, batch: Sequence[Push], slots: Sequence[Slot], good: bool) -> dict[int, HostChunk]:
        """Pin what is to stay. It is there under its key, whoever has written it; and pinned already where room had
        been set aside, if all of the batch was `good`."""
        wanted = [(p, s) for p, s in zip(batch, slots, strict=True) if p.admission]
        kept = [(p, s) for p, s in wanted if s.kept and good]
        held = {id(push): await hold_kept(self._client, self._stored(push, slot), slot) for push, slot in kept}
        others = [(p, s) for p, s in wanted if s.status in ("reserved", "exists") and id(p) not in held]
        if others:
            found = await self._in_time(hold_stored(self._client, [self._stored(*pair) for pair in others]))
            held |= {id(push): chunk for (push, _), chunk in zip(others, found, strict=True)}
        return {push: chunk for push, chunk in held.items() if chunk is not None}

    def _stored(self, push: Push, slot: Slot) -> Stored:
        granule_bytes = self._copiers[push.chunk.group].granule_bytes
        return Stored(push.chunk, granule_bytes, own=slot.status == "reserved")

    async def _reserve(self, namespace_id: bytes, batch: Sequence[Push], writers: int = 1) -> Sequence[Slot]:
        chunks = [push.chunk for push in batch]
        first = batch[0]
        reserving = self._client.reserve(
            namespace_id, first.tenant, chunks, retain_s=first.retain_s, writers=writers, aside=first.aside
        )  # fmt: skip
        return (await self._in_time(reserving)).slots

    async def _write(self, batch: Sequence[Push], slots: Sequence[Slot]) -> list[Written]:
        written: list[Written] = []
        for push, slot in zip(batch, slots, strict=True):
            self._counters.add(f"push.{slot.status}")
            if slot.status == "reserved":
                room = self._client.room(slot, push.bytes)
                checksums = self._copiers[push.chunk.group].store(push.blocks, room)
                written.append(Written(slot.reservation, checksums))
                self._counters.add("push.bytes", push.bytes)
                # Others get their turn between chunks: a pull must not wait for a batch of pushes.
                await asyncio.sleep(0)
                if not self._client.connected:
                    raise StoreUnavailable("the store went away during a copy")
        return written

    async def _commit(self, written: Sequence[Written]) -> bool:
        """Whether all of them are visible now."""
        committed = await self._in_time(self._client.commit(written))
        self._counters.add("push.committed", committed.committed)
        return committed.committed == len(written)

    async def _in_time(self, answer: Awaitable[R]) -> R:
        try:
            return await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError as error:
            raise StoreUnavailable(f"the store took more than {ANSWER_S:g} s to answer") from error
