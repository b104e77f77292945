"""Chunks that ranks write together, against a real store: committed once and whole, or not at all.

Ranks are threads with connections of their own here, so that each can be made to fail at its worst moment.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from forebay.errors import StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import Chain, GroupGeometry, Namespace, pack_tokens, root_key
from forebay.kvstore.protocol import ChunkRead, NewChunk
from forebay.models.parallel import Parallel
from forebay.testing.cluster import wait_for
from forebay.workers.counters import Counters
from forebay.workers.moves import Push, Pushed
from forebay.workers.pushing import PushQueue
from forebay.workers.ranks.channel import Channel
from forebay.workers.ranks.client import LeadClient
from forebay.workers.ranks.copying import LeadCopier
from forebay.workers.ranks.crew import Crew, _Other
from forebay.workers.ranks.errors import RankLost
from forebay.workers.ranks.messages import (
    ANSWERS,
    FROM_FOLLOWER,
    ORDERS,
    TO_FOLLOWER,
    Detach,
    Done,
    Fill,
    Finish,
    Load,
    Order,
    Place,
    See,
    Share,
)
from forebay.workers.ranks.moving import Follower, shard_of, slices_of, writers_of
from forebay.workers.ranks.progress import Progress
from forebay.workers.ranks.pushing import SharedPusher
from tests.ranks.test_slices import pool_of, whole_pool
from tests.ranks.test_talk import FakeProcess
from tests.workers.processes import start_store, store_values

CHUNK = 64
SIZE = 2


def namespace(kv_heads: int = 2) -> Namespace:
    group = GroupGeometry("full", "full", (0, 1, 2), kv_heads, 6, "float32", None)
    return Namespace(weights=b"t" * 32, groups=(group,), chunk_tokens=CHUNK, compute="float32", positions=())


SPEC = namespace()
GRANULE = SPEC.groups[0].granule_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("together")
    store = start_store(made)
    yield made
    assert store.end() == 0


class Rank1(Follower):
    """Does what it is told, unless `spoil` makes something else of an order first."""

    spoil: Callable[[Order], Order | Done] = staticmethod(lambda order: order)

    def carry_out(self, order: Order) -> Done:
        spoiled = self.spoil(order)
        return spoiled if isinstance(spoiled, Done) else super().carry_out(spoiled)


@dataclass
class Both:
    """Two ranks of one worker. `pushed` are answers to pushes."""

    crew: Crew
    client: LeadClient
    copier: LeadCopier
    pusher: SharedPusher
    queue: PushQueue
    counters: Counters
    pushed: list[Pushed]
    rank1: Rank1
    pools: list[torch.Tensor]
    salt: bytes

    def push(self, tokens: Sequence[int], blocks: Sequence[int]) -> Push:
        """Queue the chunk at the start of a prompt."""
        root = root_key(SPEC.id, self.salt)
        chain = Chain(root, list(tokens), chunk_tokens=CHUNK)
        chunk = NewChunk(0, chain.key_at(len(tokens)), root, 0, pack_tokens(list(tokens)))
        push = Push("r", "", chunk, tuple(blocks), len(blocks) * GRANULE)
        assert self.queue.offer(push)
        return push


@pytest.fixture
def both(folder: Path, request: pytest.FixtureRequest) -> Iterator[Both]:
    crew = Crew(SIZE, 20.0)
    (steps, _), (mine, theirs) = socket.socketpair(), socket.socketpair()
    told = Channel(steps, TO_FOLLOWER, FROM_FOLLOWER, "rank 1")
    crew._others.append(_Other(1, FakeProcess(), told, Channel(mine, ORDERS, ANSWERS, "rank 1")))  # type: ignore[arg-type]
    whole = whole_pool(SPEC)
    pools = [pool_of(SPEC, whole, rank, SIZE) for rank in range(SIZE)]
    rank1 = Rank1(SPEC, "", shard_of(1, SIZE), {"full": pools[1]}, Progress(), 20.0)
    thread = threading.Thread(target=serve, args=(rank1, Channel(theirs, ANSWERS, ORDERS, "rank 0")))
    thread.start()
    client, counters, pushed = LeadClient(f"{folder}/store.sock", crew), Counters(), []
    queue = PushQueue(1 << 20, counters)
    copier = LeadCopier(crew, client, 0, slices_of(SPEC, {"full": pools[0]}, shard_of(0, SIZE))[0])
    pusher = SharedPusher(client, queue, [copier], counters, pushed.append)
    pusher.share(crew, client, [copier], writers_of(SPEC, Parallel(SIZE)))
    yield Both(crew, client, copier, pusher, queue, counters, pushed, rank1, pools, request.node.name.encode())
    mine.close()
    thread.join(20)
    assert not thread.is_alive()


def serve(rank1: Rank1, channel: Channel[Done, Order]) -> None:
    try:
        rank1.run(channel)
    except RankLost:
        rank1.carry_out(Detach())


def connected(both: Both, work: Callable[[], object]) -> None:
    """Run `work`, a coroutine function, on a connection of both ranks; their promises end with it."""

    async def run() -> None:
        await both.client.connect()
        try:
            await both.client.register(SPEC, shard=shard_of(0, SIZE))
            await work()  # type: ignore[misc]
        finally:
            await both.client.close()

    asyncio.run(run())


def stored(both: Both, folder: Path, tokens: Sequence[int]) -> tuple[int, bytes]:
    """How much of a prompt the store has, and the bytes of its first chunk."""
    root = root_key(SPEC.id, both.salt)
    with StoreClient(f"{folder}/store.sock") as client:
        client.register(SPEC)
        keys = Chain(root, list(tokens), chunk_tokens=CHUNK).chunk_keys(len(tokens) // 16)
        found = client.lookup(SPEC.id, root, pack_tokens(list(tokens)), keys, limit=len(tokens))
        return found.hit, bytes(client.payload(found.chunks[0])) if found.chunks else b""


TOKENS = list(range(100, 148))
BLOCKS = [4, 1, 7]


def nothing_kept(folder: Path) -> None:
    """Wait until the store holds no slot for anybody who might be writing."""

    def kept() -> float:
        values = store_values(folder)
        return values["host.reserved_bytes"] + values["host.quarantined_bytes"]

    wait_for("no slot is held", lambda: kept() == 0, 20)


def written_whole(both: Both) -> bytes:
    return b"".join(whole_pool(SPEC)[block].numpy().tobytes() for block in BLOCKS)


def test_a_chunk_is_committed_once_with_every_ranks_slice(both: Both, folder: Path) -> None:
    async def work() -> None:
        both.push(TOKENS, BLOCKS)
        assert await both.pusher.push_some(SPEC.id)
        assert not await both.pusher.push_some(SPEC.id)

    connected(both, work)
    assert stored(both, folder, TOKENS) == (48, written_whole(both))
    assert (both.counters["push.reserved"], both.counters["push.committed"]) == (1, 1)
    assert [done.lost for done in both.pushed] == [False]
    nothing_kept(folder)


def test_every_rank_loads_its_slice_and_one_verifies_for_all(both: Both) -> None:
    async def work() -> None:
        both.push(TOKENS, BLOCKS)
        await both.pusher.push_some(SPEC.id)
        chunk = await look_up(both)
        payload, sums = both.client.payload(chunk), both.client.checksums(chunk)
        for pool in both.pools:
            pool[[0, 2, 3]] = -1
        assert both.copier.load(payload[GRANULE:], sums[8:], [2, 3]) == 2
        for pool in both.pools:
            assert torch.equal(pool[[2, 3]], pool[[1, 7]]) and (pool[0] == -1).all()
        wrong = sums[:16] + bytes(8)
        assert both.copier.load(payload, wrong, [0, 2, 3]) == 2, "good are those before the first bad one"

    connected(both, work)


# --- what is read in place -----------------------------------------------------------------------------------


def test_what_the_pool_grows_by_is_mapped_by_every_rank_before_rank_0_goes_on(both: Both) -> None:
    async def work() -> None:
        rank1, last = both.rank1, max(both.rank1.mapped.extents)
        assert rank1.mapped.boot == both.client.boot
        del rank1._client._session.pool.views[last]  # type: ignore[union-attr]  # as if it had come since
        rank1._publish(rank1._client)  # type: ignore[arg-type]
        assert last not in rank1.mapped.extents
        await both.client.map_extents()
        assert last in rank1.mapped.extents

    connected(both, work)
    assert not both.rank1.mapped.extents, "nothing of a store that has gone is found"


def test_when_a_rank_can_t_map_it_all_connect_anew(both: Both) -> None:
    async def work() -> None:
        both.rank1.spoil = lambda order: Done(failed="no room") if isinstance(order, See) else order
        with pytest.raises(StoreUnavailable, match="no room"):
            await both.client.map_extents()
        assert not both.client.connected

    connected(both, work)


async def look_up(both: Both) -> ChunkRead:
    root = root_key(SPEC.id, both.salt)
    keys = Chain(root, TOKENS, chunk_tokens=CHUNK).chunk_keys(3)
    found = await both.client.lookup(SPEC.id, root, pack_tokens(TOKENS), keys, limit=48, deadline_ms=0)
    (chunk,) = found.chunks
    return chunk


def test_a_rank_with_another_place_leaves_the_chunk_alone(both: Both, folder: Path) -> None:
    """As if another computation of the same chunk had got its part: slices of two are never mixed."""

    def elsewhere(order: Order) -> Order:
        if isinstance(order, Share):
            return replace(order, places=[replace(place, generation=place.generation + 1) for place in order.places])
        assert not isinstance(order, Fill), "it has no part to fill"
        return order

    both.rank1.spoil = elsewhere  # type: ignore[method-assign]

    async def work() -> None:
        both.push(TOKENS, BLOCKS)
        assert await both.pusher.push_some(SPEC.id)
        await asyncio.to_thread(nothing_kept, folder)  # on the same connection: its end would free all there is

    connected(both, work)
    assert stored(both, folder, TOKENS) == (0, b"")
    assert (both.counters["push.unshared"], both.counters["push.committed"]) == (1, 0)


@pytest.mark.parametrize("when", [Share, Fill, Finish])
def test_a_rank_that_fails_makes_the_chunk_no_chunk(both: Both, folder: Path, when: type) -> None:
    both.rank1.spoil = lambda order: Done(failed="no store") if isinstance(order, when) else order  # type: ignore[method-assign]

    async def work() -> None:
        both.push(TOKENS, BLOCKS)
        with pytest.raises(StoreUnavailable, match="another rank failed: no store"):
            await both.pusher.push_some(SPEC.id)
        assert not both.client.connected, "all connect anew"

    connected(both, work)
    assert stored(both, folder, TOKENS) == (0, b"")
    assert [done.lost for done in both.pushed] == [True], "it is offered again"
    nothing_kept(folder)
    both.rank1.spoil = lambda order: order  # type: ignore[method-assign]

    async def again() -> None:
        both.push(TOKENS, BLOCKS)
        assert await both.pusher.push_some(SPEC.id)

    connected(both, again)
    assert stored(both, folder, TOKENS) == (48, written_whole(both))


def test_a_rank_that_cannot_connect_leaves_its_worker_without_a_store(both: Both) -> None:
    both.rank1.spoil = lambda order: Done(failed="refused")  # type: ignore[method-assign]

    async def work() -> None:
        raise AssertionError("not connected")

    with pytest.raises(StoreUnavailable, match="another rank failed: refused"):
        connected(both, work)
    assert not both.client.connected


def test_the_same_chunk_twice_in_a_batch_is_written_once(both: Both, folder: Path) -> None:
    async def work() -> None:
        both.push(TOKENS, BLOCKS)
        both.push(TOKENS, BLOCKS)
        assert await both.pusher.push_some(SPEC.id)

    connected(both, work)
    assert (both.counters["push.reserved"], both.counters["push.busy"], both.counters["push.committed"]) == (1, 1, 1)
    assert stored(both, folder, TOKENS)[0] == 48


def test_an_order_names_bytes_of_the_pool(both: Both) -> None:
    """A window that this client hasn't given is no place."""

    async def work() -> None:
        with pytest.raises(StoreUnavailable, match="its pool with it"):
            both.client.place_of(memoryview(bytearray(64)))

    connected(both, work)


def test_orders_without_a_store_fail_and_are_answered(both: Both) -> None:
    (answer,) = both.crew.order(Load(0, 0, Place(0, 4096, GRANULE), [1]))
    assert answer.failed == "this rank has no store"
    assert np.isfinite(both.pools[1].numpy()).all()




class LastLayer:
    """The end of a step on rank 1, which rank 0 is through with: it begins when an order of that kind has come."""

    def __init__(self, both: Both, kind: type, blocks: list[int]) -> None:
        self._both, self._kind, self._blocks = both, kind, blocks
        self._come = threading.Event()
        both.crew.progress.advance()
        both.rank1.spoil = self._notice  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _notice(self, order: Order) -> Order:
        if isinstance(order, self._kind):
            self._come.set()
        return order

    def _run(self) -> None:
        assert self._come.wait(20)
        time.sleep(0.05)  # a copy that didn't wait would be done by now
        self._both.pools[1][self._blocks] += 1.0
        self._both.rank1.progress.advance()

    def over(self) -> None:
        self._thread.join(20)
        assert self._both.rank1.progress.steps == 1


def test_what_is_stored_has_what_the_last_layer_wrote(both: Both, folder: Path) -> None:
    step = LastLayer(both, Fill, BLOCKS)

    async def work() -> None:
        both.push(TOKENS, BLOCKS)
        assert await both.pusher.push_some(SPEC.id)

    connected(both, work)
    step.over()
    found = np.frombuffer(stored(both, folder, TOKENS)[1], dtype="<f4").reshape(3, 3, 2, 2, 16, 6)
    assert np.array_equal(found[:, :, :, 1:], both.pools[1][BLOCKS].numpy())


def test_what_is_loaded_stays_when_the_last_layer_is_over(both: Both) -> None:
    async def work() -> None:
        both.push(TOKENS, BLOCKS)
        await both.pusher.push_some(SPEC.id)
        chunk = await look_up(both)
        step = LastLayer(both, Load, [2, 3])
        assert both.copier.load(both.client.payload(chunk), both.client.checksums(chunk), [0, 2, 3]) == 3
        step.over()

    connected(both, work)
    assert torch.equal(both.pools[1][[0, 2, 3]], both.pools[1][BLOCKS])
