"""A worker's dealings with a store: look up, read, compute the rest, push. The client library is the real one.

It keeps the library's contract to the letter (a copy ends before the client says hello again) and no more: it is slow,
it is killed or stopped inside of a copy, it abandons requests, it holds leases for long.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.errors import CorruptChunk, RequestRefused, StoreUnavailable
from forebay.kvstore.client.aio import AsyncStoreClient
from forebay.kvstore.header import granule_checksums
from forebay.kvstore.identity import MATCH_UNIT, Chain, Namespace, pack_tokens, root_key, tenant_salt
from forebay.kvstore.protocol import ChunkRead, Found, NewChunk, Slot, Written
from forebay.testing.simulate.aside import store_with_room
from forebay.testing.simulate.loop import Process
from forebay.testing.simulate.oracle import UnitIds, Write, unit_ids, written_units

if TYPE_CHECKING:
    from forebay.testing.simulate.node import Node
    from forebay.testing.simulate.world import World


@dataclass(frozen=True)
class Prompt:
    """One prompt with everything that decides its bytes."""

    namespace: Namespace
    tenant: str
    salt: bytes
    extra: bytes
    token_ids: tuple[int, ...]
    units: UnitIds

    @property
    def chain(self) -> Chain:
        """The store's keys of it."""
        root = root_key(self.namespace.id, self.salt)
        return Chain(root, self.token_ids, self.extra, chunk_tokens=self.namespace.chunk_tokens)

    def units_of(self, start: int, end: int) -> UnitIds:
        """Identities of the units in tokens [start, end)."""
        return self.units[start // MATCH_UNIT : end // MATCH_UNIT]


def draw_prompt(world: World, rng: random.Random) -> Prompt:
    """A walk down a small tree of segments, so that prompts share beginnings, branch, and end anywhere."""
    plan = world.plan
    index = rng.randrange(len(plan.namespaces))
    tenant = rng.randrange(plan.tenants)
    salt = tenant_salt(b"secret%d" % tenant, "") if tenant else b""
    extra = b"adapter%d" % which if (which := rng.randrange(plan.extras)) else b""
    tokens = [rng.randrange(plan.topics)] * 16
    for level in range(rng.randint(0, plan.depth)):
        branch = rng.choice((0, 0, 0, 1, 2))
        tokens += [1000 * (level + 1) + branch] * rng.choice((16, 16, 32))
    tokens += [7] * rng.choice((0, 0, 5))
    units = unit_ids(index, salt, extra, tokens)
    return Prompt(plan.namespaces[index], f"tenant{tenant}", salt, extra, tuple(tokens), units)


class SimClient(AsyncStoreClient):
    """The real client over the simulated network."""

    def __init__(self, world: World, node: Node, process: Process, rng: random.Random) -> None:
        super().__init__(f"unix://{node.address}", timeout_s=2.0, group=node.name.encode())
        self._world, self._node, self._process = world, node, process
        self._session.client = rng.randbytes(16)

    def _dial(self) -> object:  # type: ignore[override]
        try:
            return self._world.net.connect(self._node.address, self._process)
        except ConnectionRefusedError as error:
            raise StoreUnavailable(f"nobody answers on {self._node.address}") from error

    def end(self) -> None:
        """What the kernel does when the process ends."""
        self._session.forget_pool()
        while self._descriptors:
            os.close(self._descriptors.popleft())


@dataclass
class Copied:
    """A chunk that is being written into its slot, and the write that it will be."""

    chunk: NewChunk
    slot: Slot
    write: Write
    version: int
    task: asyncio.Task[None]
    data: bytes


@dataclass
class Worker:
    """One worker process after another on one node."""

    world: World
    node: Node
    index: int
    copies: list[asyncio.Task[None]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    turns: int = 0
    reading: bool = False
    asked_at: float = 0.0
    parked: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.world.plan.seed}/worker{self.index}")
        self.room_rng = random.Random(f"{self.world.plan.seed}/room{self.index}")
        self.start()

    def start(self) -> None:
        """A new process."""
        self.process = Process(f"worker{self.index}", self.world.loop)
        self.client = SimClient(self.world, self.node, self.process, self.rng)
        self.process.at_exit.append(self.client.end)
        self.held, self.copies, self.parked, self.reading = [], [], False, False
        self.process.spawn(self.run())

    async def run(self) -> None:
        """Serve turns until the world has had enough."""
        while not self.world.closing:
            try:
                await self._session()
            except StoreUnavailable:
                self.world.count("worker.lost_store")
                await self._let_copies_end()
                await asyncio.sleep(self.rng.choice((0.001, 0.02, 0.1)))
        await self._let_copies_end()
        await self.client.close()
        self.parked = True

    async def _session(self) -> None:
        self.held.clear()
        await self.client.connect()
        for namespace in self.world.plan.namespaces:
            await self.client.register(namespace)
        while not self.world.closing:
            await self._turn()
            self.turns += 1
            # Once all is well, what is still to be seen is that it goes on.
            pause = self.world.plan.pause * (4 if self.world.healthy else 1)
            await asyncio.sleep(self.rng.choice((0.0, 0.005, 0.05, 0.1)) * pause)

    async def _let_copies_end(self) -> None:
        for copy in self.copies:
            with suppress(asyncio.CancelledError):
                await copy
        self.copies.clear()

    async def _turn(self) -> None:
        rng, plan = self.rng, self.world.plan
        settling = self.world.healthy
        if plan.has("clears") and not settling and rng.random() < 0.1 * plan.rate:
            await self._clear()
            return
        if not settling and rng.random() < 0.03:
            await self._watch()
            return
        prompt = draw_prompt(self.world, rng)
        found = await self._look_up(prompt)
        if found is None:
            return
        if self.world.healthy or rng.random() < 0.8:
            await self._read(prompt, found)
        hit = found.hit
        if found.lease:
            self.held.append(found.lease)
        if found.chunks and rng.random() < 0.15:
            await self._promise(prompt, found)
        if rng.random() < 0.7 or len(self.held) > 3:
            self._release()
        if rng.random() < 0.9:
            await self._push(prompt, hit)

    def _release(self) -> None:
        self.client.release(self.held)
        self.held.clear()

    # --- reading ---------------------------------------------------------------------------------------

    async def _look_up(self, prompt: Prompt) -> Found | None:
        world, chain = self.world, prompt.chain
        whole = len(prompt.units)
        deadline = self.rng.choice(world.plan.deadline_ms)
        limit = self.rng.choice((len(prompt.token_ids), len(prompt.token_ids), len(prompt.token_ids) - 1, 40))
        self.asked_at = asked_at = world.loop.time()
        call = self.client.lookup(
            prompt.namespace.id, chain.root, pack_tokens(prompt.token_ids), chain.chunk_keys(whole),
            limit=limit, deadline_ms=deadline, extra=prompt.extra,
        )  # fmt: skip
        world.count("op.lookup")
        if world.plan.has("request_abandoned") and self.rng.random() < 0.08 * world.plan.rate:
            with suppress(TimeoutError):
                found = await asyncio.wait_for(call, self.rng.choice((0.0001, 0.0005, 0.01)))
                self.held.append(found.lease)
                return None
            world.fault("request_abandoned")
            return None
        try:
            found = await call
        except RequestRefused as error:
            world.checks.refused(self, error)
            return None
        world.checks.found(prompt, limit, found)
        world.checks.time_taken(asked_at, deadline)
        return found

    async def _read(self, prompt: Prompt, found: Found) -> None:
        for chunk in found.chunks:
            self.reading = True
            try:
                data = await self._copy_out(chunk)
            finally:
                self.reading = False
            if data is None:
                self.world.count("reads.stale")
                continue
            if self.world.plan.readers_verify and not self._verified(prompt, chunk, data):
                self.world.checks.checksum_differs(self, chunk)
                self.client.damaged([(chunk.group, chunk.key)])
                continue
            self.world.count("op.read")
            self.world.checks.read(self, prompt, found, chunk, data)

    def _verified(self, prompt: Prompt, chunk: ChunkRead, data: bytes) -> bool:
        """Do the copied bytes match what the slot's header says?"""
        try:
            sums = self.client.checksums(chunk)
        except CorruptChunk:
            return False
        return sums == granule_checksums(memoryview(data), prompt.namespace.groups[chunk.group].granule_bytes)

    async def _copy_out(self, chunk: ChunkRead) -> bytes | None:
        """The chunk's bytes, copied in pieces; None if the slot was another's by the end."""
        view = self.client.payload(chunk)
        pieces = []
        slow = self.world.strikes("worker_slow_reader", 0.2, self.rng)
        step = len(view) if not slow and self.rng.random() < 0.6 else max(1, len(view) // 3)
        for at in range(0, len(view), step):
            pieces.append(bytes(view[at : at + step]))
            if at + step < len(view):
                await asyncio.sleep(self.rng.choice((0.05, 0.3)) if slow else self.rng.choice((0.0, 0.001)))
        if not self.client._session.pool.views or not self.client.intact(chunk):
            return None
        return b"".join(pieces)

    # --- writing ---------------------------------------------------------------------------------------

    async def _push(self, prompt: Prompt, hit: int) -> None:
        chunks = self._missing(prompt, hit)
        if not chunks:
            return
        if self.world.plan.sets_aside and self.room_rng.random() < 0.4:
            await store_with_room(self, prompt, chunks, self.room_rng)
        reserved_at = self.world.loop.time()
        slots = await self.reserve(prompt, chunks, retain_s=self.rng.choice((0.0, 0.0, 0.0, 0.5)))
        if slots is None:
            return
        copies = []
        for chunk, slot in zip(chunks, slots, strict=True):
            self.world.count(f"reserve.{slot.status}")
            if slot.status == "reserved":
                copies.append(self.begin_copy(prompt, chunk, slot))
        for copy in copies:
            await copy.task
        await self.commit(copies, reserved_at)

    async def reserve(
        self, prompt: Prompt, chunks: list[NewChunk], aside: int = 0, retain_s: float = 0.0
    ) -> list[Slot] | None:
        """Ask for room; None if that was refused."""
        try:
            reserved = await self.client.reserve(
                prompt.namespace.id, prompt.tenant, chunks, retain_s=retain_s, aside=aside
            )
        except RequestRefused as error:
            self.world.checks.refused(self, error)
            return None
        return reserved.slots

    def _missing(self, prompt: Prompt, hit: int) -> list[NewChunk]:
        size, chain = prompt.namespace.chunk_tokens, prompt.chain
        whole = len(prompt.units) * MATCH_UNIT
        tokens = pack_tokens(prompt.token_ids)
        chunks = []
        for start in range(hit // size * size, whole, size):
            end = min(start + size, whole)
            if end <= hit:
                continue
            for group in range(len(prompt.namespace.groups)):
                key, parent = chain.key_at(end), chain.key_at(start)
                chunks.append(NewChunk(group, key, parent, start, tokens[4 * start : 4 * end], prompt.extra))
        return chunks

    def begin_copy(self, prompt: Prompt, chunk: NewChunk, slot: Slot) -> Copied:
        """Start copying bytes of its own into a reserved slot."""
        world = self.world
        group = prompt.namespace.groups[chunk.group]
        units = written_units(group, prompt.units_of(chunk.start, chunk.start + len(chunk.tokens) // 4))
        granule = group.granule_bytes
        version = world.oracle.new_version()
        data = world.oracle.payload(chunk.group, units, version, granule)
        room = self.client.room(slot, len(data))
        task = self.process.spawn(self._copy_in(room, data))
        self.copies = [copy for copy in self.copies if not copy.done()]
        self.copies.append(task)
        return Copied(chunk, slot, Write(units, granule, prompt.namespace.id), version, task, data)

    async def _copy_in(self, room: memoryview, data: bytes) -> None:
        """As a slow thread would: it goes on whatever happens to the connection."""
        slow = self.world.strikes("worker_slow_writer", 0.2, self.rng)
        step = len(data) if not slow and self.rng.random() < 0.6 else max(1, len(data) // 3)
        for at in range(0, len(data), step):
            room[at : at + step] = data[at : at + step]
            if at + step < len(data):
                await asyncio.sleep(self.rng.choice((0.05, 0.3)) if slow else self.rng.choice((0.0, 0.001)))

    async def commit(self, copies: list[Copied], reserved_at: float) -> bool:
        """Commit, or now and then abort, what was copied; whether all of it is visible now."""
        world = self.world
        written, given_up, sent = [], [], []
        for copy in copies:
            if world.plan.has("writer_aborts") and self.rng.random() < 0.15:
                given_up.append(copy.slot.reservation)
                continue
            world.oracle.commits(copy.chunk.group, copy.chunk.key, copy.version, copy.write)
            sums = granule_checksums(memoryview(copy.data), copy.write.size)
            written.append(Written(copy.slot.reservation, sums))
            sent.append(copy.write)
        if given_up:
            world.fault("writer_aborts")
            self.client.abort(given_up)
        if not written:
            return False
        answer = await self.client.commit(written)
        world.count("op.commit", answer.committed)
        for write in sent:
            write.acknowledged_at = world.loop.time()
        world.checks.committed(answer.committed, len(written), reserved_at)
        return answer.committed == len(copies)

    # --- promises --------------------------------------------------------------------------------------

    async def _promise(self, prompt: Prompt, found: Found) -> None:
        """Keep, touch, share and give back parts of what was found."""
        rng, client = self.rng, self.client
        named = [(chunk.group, chunk.key) for chunk in found.chunks]
        some = rng.sample(named, rng.randint(1, len(named)))
        what = rng.choice(("soft", "hard", "unpin", "touch", "parts", "join", "join"))
        self.world.count(f"op.{what}")
        try:
            if what in ("soft", "hard"):
                await client.pin(some, kind=what, by=f"w{self.index}", ttl_s=rng.choice((0.1, 0.4)))  # type: ignore[arg-type]
            elif what == "unpin":
                await client.unpin(some, by=f"w{self.index}")
            elif what == "touch":
                await client.touch(some, tenant=prompt.tenant, retain_s=rng.choice((0.0, 0.3)))
            elif what == "parts":
                client.release_chunks(found.lease, rng.sample(range(len(named)), rng.randint(1, len(named))))
            else:
                await self._join(prompt, found)
        except RequestRefused as error:
            self.world.checks.refused(self, error)

    async def _join(self, prompt: Prompt, found: Found) -> None:
        """Renew the lease, and hold some that others of the group hold."""
        others = [lease for w in self.world.workers if w.node is self.node and w is not self for lease in w.held]
        joined = await self.client.join([found.lease, *others], lease_ms=self.rng.choice((0, 200)))
        self.world.count("leases.joined", len(joined.leases))
        self.held += [shared.lease for shared in joined.leases if shared.lease != found.lease]

    # --- the rest --------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        self.world.count("op.watch")
        what = self.rng.randrange(4)
        if what == 0:
            await self.client.stats()
        elif what == 1:
            await self.client.list_chunks(limit=self.rng.choice((1, 3, 500)))
        elif what == 2:
            prompt = draw_prompt(self.world, self.rng)
            tokens = pack_tokens(prompt.token_ids)
            with suppress(RequestRefused):
                await self.client.explain(prompt.namespace.id, prompt.chain.root, tokens, prompt.extra)
        else:
            await self.client.check(repair=self.world.plan.has("memory_rot"))

    async def _clear(self) -> None:
        namespace = self.rng.choice((b"", *(n.id for n in self.world.plan.namespaces)))
        began = self.world.loop.time()
        self.world.fault("clears")
        answer = await self.client.clear(namespace)
        if all(count >= 0 for count in answer.tiers.values()):
            self.world.checks.cleared(namespace, began)
