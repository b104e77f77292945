"""A rank's side: what was ordered is loaded and stored, and reported when it is done.

    before the forward   room is asked for, for what the step will fill; loads and tails begin
    after it             what has room is copied out, at once: the engine may give its blocks away in the next step
    meanwhile            copies are hashed and committed, loads copied and verified, on other threads

The engine never waits for the store, but for the moments that `Settings` allows: chunks that have no place by then are
copied aside, and into their place when it is known. What waits is bounded in bytes; what finds the queue full is
dropped, and counted. A load that can't be right is reported as failed, and the engine computes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from forebay.connectors.blocks import covered, held_from
from forebay.connectors.copying import Finish, GroupCopier, checksums
from forebay.connectors.link import StoreLink
from forebay.connectors.orders import Load, Orders, Span
from forebay.connectors.teams import without_team
from forebay.errors import CorruptChunk, StoreError, StoreUnavailable
from forebay.kvstore.geometry import MATCH_UNIT, GroupGeometry
from forebay.kvstore.identity import decode_namespace
from forebay.kvstore.layout import needed_from, payload_bytes, round_down
from forebay.kvstore.protocol import ChunkRead, NewChunk, Slot, Written

NAMESPACE_S = 1.0
"""How long a connection may take to come up or learn of a new namespace, before what the engine waits for is given
up."""

BATCH_CHUNKS = 256
"""Chunks in one message."""

HOST = "host"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Room:
    """One chunk of one of our groups on its way out. If it is `copied` there may be a `finish`, which brings what is
    still aside: on the accelerator, or since the store had not said in time where it goes."""

    span: Span
    group: int
    bytes: int
    slot: Slot | None = None
    session: int = 0
    copied: bool = False
    finish: Finish | None = None

    @property
    def reserved(self) -> bool:
        return self.slot is not None and self.slot.status == "reserved"

    @property
    def reservation(self) -> int:
        assert self.slot is not None
        return self.slot.reservation


@dataclass(slots=True)
class Batch:
    """What one step stores; `ready` when the store has said where."""

    rooms: list[Room]
    ready: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Done:
    """Requests whose tails are stored or given up, and whose loads have ended; `failed` are among the latter."""

    sent: set[str]
    received: set[str]
    failed: set[str]


class Mover:
    """Serves one rank. Its public methods are the engine's thread's. `copiers` are of our groups, in order.

    `writers` ranks write each chunk together; `writes` says of each group whether this one is among them, for a rank
    may hold the same bytes as another.
    """

    def __init__(
        self,
        link: StoreLink,
        geometries: Sequence[GroupGeometry],
        copiers: Sequence[GroupCopier],
        *,
        writers: Sequence[int],
        writes: Sequence[bool],
        queue_bytes: int,
        store_wait_s: float,
    ) -> None:
        self._link = link
        self._geometries, self._copiers = tuple(geometries), tuple(copiers)
        self._writers, self._writes = tuple(writers), tuple(writes)
        self._queue_bytes, self._store_wait_s = queue_bytes, store_wait_s
        self._threads = ThreadPoolExecutor(2, "forebay-copy", initializer=without_team)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._done = Done(set(), set(), set())
        self._batch: Batch | None = None
        self._namespace = b""
        self._chunk_tokens = 0
        self.counters: Counter[str] = Counter()
        self.queued_bytes = 0
        self.loading = 0
        self.sending = 0

    # --- the engine's thread -----------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Before the forward. If it raises nothing has begun, and `refuse` answers instead."""
        self._batch = None
        for copier in self._copiers:
            copier.follow_engine()
        if not (orders.loads or orders.spans or orders.tails):
            return
        if orders.namespace != self._namespace:
            namespace = decode_namespace(orders.namespace)
            self._namespace, self._chunk_tokens = orders.namespace, namespace.chunk_tokens
            self._link.use(namespace)
        # What the engine waits for must be answered once, so all that could fail comes first.
        tails = self._tails(orders.tails)
        rooms = self._rooms(orders.spans)
        for load in orders.loads:
            self._count(loading=1)
            self._link.run(lambda load=load: self._load(load))  # type: ignore[misc]
        for request, tail in tails.items():
            self._count(sending=1)
            self._link.run(lambda request=request, tail=tail: self._send(request, tail))  # type: ignore[misc]
        if rooms:
            self._batch = batch = Batch(rooms)
            self._link.run(lambda: self._reserve(batch, self._link.hung_s))

    def refuse(self, orders: Orders) -> None:
        """Answer all of it with: not done."""
        with self._changed:
            self._done.received.update(load.request for load in orders.loads)
            self._done.failed.update(load.request for load in orders.loads)
            self._done.sent.update(span.request for span in orders.tails)

    def end(self, *, idle: bool) -> None:
        """After the forward: copy out what has room. Blocks for the copies."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._copy_out(batch)
        if idle:
            self._wait_a_moment()

    def take_done(self) -> Done:
        """What has ended since the last call."""
        with self._lock:
            done, self._done = self._done, Done(set(), set(), set())
            return done

    def close(self) -> None:
        """Wait for what is under way; nothing may be ordered any more."""
        self._link.stop()
        self._threads.shutdown()

    def _wait_a_moment(self) -> None:
        """Nothing is computed: rather than going round for nothing the engine waits for the first that is done."""
        until = time.monotonic() + self._store_wait_s
        with self._changed:
            while (self.loading or self.sending) and not (self._done.received or self._done.sent):
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def _rooms(self, spans: Sequence[Span]) -> list[Room]:
        rooms = [
            Room(span, group, payload_bytes(self._geometries[group], span.end - span.start))
            for span in spans
            for group in span.groups
            if self._writes[group]
        ]
        kept = []
        with self._lock:
            for room in rooms:
                if self.queued_bytes + room.bytes > self._queue_bytes:
                    self.counters["stores.dropped"] += 1
                    continue
                self.queued_bytes += room.bytes
                kept.append(room)
        return kept

    def _copy_out(self, batch: Batch) -> None:
        try:
            if batch.ready.wait(self._store_wait_s) and self._link.room_lock.acquire(blocking=False):
                try:
                    self._fill_all(batch)
                finally:
                    self._link.room_lock.release()
            else:
                self.counters["stores.late"] += len(batch.rooms)
                for room in batch.rooms:
                    self._fill(room, None)
        finally:
            self._link.run(lambda: self._settle(batch))  # also what was not filled leaves the queue

    def _fill_all(self, batch: Batch) -> None:
        """Copy out what has a place that is still ours. The room lock is held."""
        for room in batch.rooms:
            if room.slot is not None and room.reserved and room.session == self._link.session:
                self._fill(room, self._link.client.room(room.slot, room.bytes))

    def _fill(self, room: Room, target: memoryview | None) -> None:
        try:
            copier = self._copiers[room.group]
            room.finish = copier.store(target, room.span.start, room.span.end, room.span.tables)
            room.copied = True
            self.counters["stores.bytes"] += room.bytes
        except LookupError as error:
            log.warning("a chunk could not be copied out: %s", error)

    def _tails(self, tails: Sequence[Span]) -> dict[str, Batch]:
        by_request: dict[str, list[Span]] = {}
        for span in tails:
            by_request.setdefault(span.request, []).append(span)
        return {request: Batch(self._rooms(spans)) for request, spans in by_request.items()}

    # --- the connection's loop: stores -------------------------------------------------------------------

    async def _reserve(self, batch: Batch, patience_s: float) -> None:
        try:
            await self._link.connected(patience_s)
            if not self._link.boot():
                self.counters["stores.lost"] += len(batch.rooms)
                return
            session = self._link.session
            for rooms in self._alike(batch.rooms):
                span = rooms[0].span
                chunks = [
                    NewChunk(room.group, room.span.key, room.span.parent, room.span.start, room.span.tokens, span.extra)
                    for room in rooms
                ]
                reserving = self._link.client.reserve(
                    self._link.namespace_id, span.tenant, chunks, writers=self._writers[rooms[0].group]
                )
                reserved = await asyncio.wait_for(reserving, self._link.hung_s)
                for room, slot in zip(rooms, reserved.slots, strict=True):
                    room.slot, room.session = slot, session
                    self.counters[f"stores.{slot.status}"] += 1
        except TimeoutError:
            await self._link.give_up("the store doesn't answer reservations")
        except StoreError as error:
            self.counters["stores.lost"] += sum(room.slot is None for room in batch.rooms)
            log.debug("reserving failed: %s", error)
        finally:
            batch.ready.set()

    def _alike(self, rooms: Sequence[Room]) -> list[list[Room]]:
        """What one message can ask for: the same extra and number of writers."""
        found: dict[tuple[bytes, int], list[list[Room]]] = {}
        for room in rooms:
            lists = found.setdefault((room.span.extra, self._writers[room.group]), [[]])
            if len(lists[-1]) == BATCH_CHUNKS:
                lists.append([])
            lists[-1].append(room)
        return [some for lists in found.values() for some in lists if some]

    async def _settle(self, batch: Batch) -> None:
        """Hash and commit what was copied; give the rest back."""
        try:
            while not batch.ready.is_set():
                await asyncio.sleep(0.001)
            mine = [room for room in batch.rooms if room.reserved and room.session == self._link.session]
            unwritten = [room.reservation for room in mine if not room.copied]
            if unwritten and self._link.boot():
                self._link.client.abort(unwritten)
            await self._commit([room for room in mine if room.copied])
        except TimeoutError:
            await self._link.give_up("the store doesn't answer commits")
        except (StoreError, LookupError) as error:  # a connection that is lost takes its mappings along
            self.counters["stores.lost"] += 1
            log.debug("storing failed: %s", error)
        finally:
            with self._lock:
                self.queued_bytes -= sum(room.bytes for room in batch.rooms)

    async def _commit(self, rooms: Sequence[Room]) -> None:
        loop = asyncio.get_running_loop()
        shared = [room for room in rooms if self._writers[room.group] > 1]
        alone = [room for room in rooms if self._writers[room.group] == 1]
        written = await loop.run_in_executor(self._threads, self._finish, alone, True)
        written += await loop.run_in_executor(self._threads, self._finish, shared, False)
        for at in range(0, len(written), BATCH_CHUNKS):
            if any(room.session != self._link.session for room in rooms):
                raise StoreUnavailable("the connection that reserved these chunks is gone")
            committing = self._link.client.commit(written[at : at + BATCH_CHUNKS])
            committed = await asyncio.wait_for(committing, self._link.hung_s)
            self.counters["stores.committed"] += committed.committed
            last = [room for room in shared if room.reservation in committed.to_hash]
            if last:
                whole = await loop.run_in_executor(self._threads, self._hash, last)
                committed = await asyncio.wait_for(self._link.client.commit(whole), self._link.hung_s)
                self.counters["stores.committed"] += committed.committed

    def _finish(self, rooms: Sequence[Room], whole: bool) -> list[Written]:
        """Bring what is still elsewhere; hash what is then `whole`."""
        there = []
        for room in rooms:
            assert room.slot is not None
            if room.finish is not None:
                put = room.finish()
                with self._link.room_lock:
                    if room.session != self._link.session:
                        continue
                    put(self._link.client.room(room.slot, room.bytes))
                room.finish = None
            there.append(room)
        return self._hash(there) if whole else [Written(room.reservation, b"") for room in there]

    def _hash(self, rooms: Sequence[Room]) -> list[Written]:
        written = []
        for room in rooms:
            assert room.slot is not None
            payload = self._link.client.room(room.slot, room.bytes)
            sums = checksums(payload, self._geometries[room.group].granule_bytes)
            written.append(Written(room.reservation, sums))
        return written

    async def _send(self, request: str, batch: Batch) -> None:
        """Store the tail of a request that has ended."""
        try:
            await self._reserve(batch, NAMESPACE_S)
            if any(room.reserved for room in batch.rooms):
                await asyncio.get_running_loop().run_in_executor(self._threads, self._fill_tails, batch)
        finally:
            # Its blocks aren't read any more: the engine need not wait for the hash.
            with self._changed:
                self._done.sent.add(request)
                self.sending -= 1
                self._changed.notify_all()
        await self._settle(batch)

    def _fill_tails(self, batch: Batch) -> None:
        with self._link.room_lock:
            self._fill_all(batch)

    # --- the connection's loop: loads --------------------------------------------------------------------

    async def _load(self, load: Load) -> None:
        failed = True
        try:
            await self._bring(load)
            failed = False
        except CorruptChunk as error:
            self.counters["loads.corrupt"] += 1
            log.warning("a chunk is damaged, its request is computed: %s", error)
        except (StoreError, LookupError) as error:
            log.warning("a load failed, its request is computed: %s", error)
        finally:
            with self._changed:
                self._done.received.add(load.request)
                if failed:
                    self._done.failed.add(load.request)
                self.loading -= 1
                self._changed.notify_all()

    async def _bring(self, load: Load) -> None:
        if self._link.boot() != load.boot:
            # This rank's connection may be a moment behind the scheduler's.
            await self._link.connected(NAMESPACE_S)
        if self._link.boot() != load.boot:
            raise StoreUnavailable("the store has restarted since it promised")
        if any(chunk.extent not in self._link.client.extents for chunk in load.chunks):
            await asyncio.wait_for(self._link.client.map_extents(), self._link.hung_s)
        loop = asyncio.get_running_loop()
        starts = [self._start(load, group) for group in range(len(self._copiers))]
        wanted = [(chunk, *span) for chunk in load.chunks if (span := _wanted(load, chunk, starts)) is not None]
        _check_whole(load, starts, wanted)
        halves = [wanted[0::2], wanted[1::2]] if len(wanted) > 1 else [wanted]
        copies = [loop.run_in_executor(self._threads, self._copy_in, load, half) for half in halves]
        results = await asyncio.gather(*copies, return_exceptions=True)  # none may still write when it is reported
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise errors[0]

    def _start(self, load: Load, group: int) -> int:
        """From which token on the engine has blocks for a group's load, all of which have to be filled: it takes each
        for whole afterwards. Raises LookupError if it lacks one that the hit needs."""
        parts = [stack.part for stack in self._copiers[group].stacks]
        starts = {
            held_from(load.first, load.hit, part.block_tokens, load.tables[part.engine_group]) for part in parts
        }
        needed = max(load.first, needed_from(self._geometries[group], load.hit))
        if max(starts) > needed:
            raise LookupError(f"no block holds token {needed}")
        return min(starts)

    def _copy_in(self, load: Load, wanted: Sequence[tuple[ChunkRead, int, int]]) -> None:
        """Copy, then verify: what is found wrong is never used, since the request is computed then."""
        for chunk, first, last in wanted:
            size = self._geometries[chunk.group].granule_bytes
            payload = self._link.client.payload(chunk)
            self._copiers[chunk.group].load(payload, chunk.start, first, last, load.tables)
            front = (round_down(first, MATCH_UNIT) - chunk.start) // MATCH_UNIT
            back = -(-(last - chunk.start) // MATCH_UNIT)
            try:
                expected = self._link.client.checksums(chunk)
                right = checksums(payload[front * size : back * size], size) == expected[8 * front : 8 * back]
            except CorruptChunk:
                right = False
            if not self._link.client.intact(chunk):
                raise StoreUnavailable("a pinned slot was given away: the store has restarted")
            if not right:
                self._link.damaged(chunk.group, chunk.key)
                raise CorruptChunk(f"tokens {first} to {last} of {load.request}")
            self.counters[f"loaded.{chunk.promoted or HOST}.bytes"] += (back - front) * size
            self.counters[f"loaded.{chunk.promoted or HOST}.chunks"] += 1

    # --- figures -----------------------------------------------------------------------------------------

    def _count(self, *, loading: int = 0, sending: int = 0) -> None:
        with self._lock:
            self.loading += loading
            self.sending += sending

    def gauges(self) -> dict[str, int]:
        """Present figures."""
        return {"queue.bytes": self.queued_bytes, "loads.running": self.loading, "tails.running": self.sending}


def _wanted(load: Load, chunk: ChunkRead, starts: Sequence[int]) -> tuple[int, int] | None:
    """Which tokens of a chunk are loaded; None: none. `starts` are by group."""
    first = max(starts[chunk.group], chunk.start)
    last = min(load.hit, chunk.start + chunk.tokens)
    return (first, last) if first < last else None


def _check_whole(load: Load, starts: Sequence[int], wanted: Sequence[tuple[ChunkRead, int, int]]) -> None:
    """Raises LookupError unless all tokens of each group come: a block that stays half empty would be served."""
    for group, start in enumerate(starts):
        filled = covered(start, ((first, last) for chunk, first, last in wanted if chunk.group == group))
        if filled < load.hit:
            raise LookupError(f"nothing was promised for token {filled} of group {group}")
