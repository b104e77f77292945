"""Another rank's copies: on a thread of its own, an order at a time, each answered when nothing is touched any more.

It keeps a connection to the store as one of its worker's group. For reads it would need none but to map the pool: rank
0 holds the lease, and waits for every rank. What it writes the store must know of, lest a slot be given to somebody
else while it still does: so it reserves its part of each chunk itself, and says when that is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace
from torch import Tensor

from forebay.errors import ForebayError, StoreUnavailable
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.layout import Shard, View
from forebay.kvstore.protocol import Slot, Written
from forebay.models.parallel import Parallel
from forebay.workers.hot.following import Mapped
from forebay.workers.pushing import ANSWER_S
from forebay.workers.ranks.channel import Channel
from forebay.workers.ranks.messages import Attach, Detach, Done, Fill, Finish, Load, Order, Place, See, Share
from forebay.workers.ranks.progress import Progress
from forebay.workers.ranks.slices import Slices

R = TypeVar("R")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of a chunk of one group: where rank 0 has said that the chunk goes, and what the store said."""

    group: int
    slot: Slot
    place: Place

    @property
    def ours(self) -> bool:
        """Is it the very slot that rank 0 was given? Else somebody else computes that chunk, too."""
        slot, place = self.slot, self.place
        return slot.status == "reserved" and (slot.extent, slot.payload_offset, slot.generation) == (
            place.extent, place.offset, place.generation,
        )  # fmt: skip


def slices_of(namespace: Namespace, pools: Mapping[str, Tensor], shard: Shard) -> list[Slices]:
    """Of every group, in order."""
    return [
        Slices(View(namespace, index, group_shard(group, shard)), pools[group.name])
        for index, group in enumerate(namespace.groups)
    ]


class Follower:
    """Carries out rank 0's orders. `run` is its thread's body; it ends when rank 0 closes the channel (RankLost). The
    step that an order waits for may take `patience_s`. `mapped` is what of the store's pool can be read in place; any
    thread may ask."""

    def __init__(
        self, namespace: Namespace, label: str, shard: Shard, pools: Mapping[str, Tensor], progress: Progress,
        patience_s: float,
    ) -> None:  # fmt: skip
        self._namespace, self._label, self._shard = namespace, label, shard
        self._slices = slices_of(namespace, pools, shard)
        self.progress, self._patience_s = progress, patience_s
        self._loop = asyncio.new_event_loop()
        self._client: AsyncStoreClient | None = None
        self._parts: list[_Part] = []
        self.mapped = Mapped()

    def run(self, channel: Channel[Done, Order]) -> None:
        """Serve orders. Raises RankLost."""
        while True:
            channel.send(self.carry_out(channel.receive()))

    def carry_out(self, order: Order) -> Done:
        """Do it, and say how it went: what a store may do is no error of ours."""
        try:
            return self._obey(order)
        except (ForebayError, OSError, TimeoutError) as error:
            log.debug("an order failed: %s", error)
            return Done(failed=str(error) or type(error).__name__)

    def _obey(self, order: Order) -> Done:
        match order:
            case Attach():
                self._attach(order)
            case Detach():
                self._detach()
            case See():
                self._see()
            case Load():
                self.progress.wait(order.after, self._patience_s)
                self._slices[order.group].load(self._memory(order.place), order.blocks)
            case Share():
                return Done(given=self._share(order))
            case Fill():
                self.progress.wait(order.after, self._patience_s)
                part = self._parts[order.index]
                self._slices[part.group].store(order.blocks, self._memory(part.place))
            case Finish():
                self._finish(order)
        return Done()

    # --- the store ---------------------------------------------------------------------------------------

    def _attach(self, order: Attach) -> None:
        self._detach()
        # The same one again, so that the store knows that what it wrote before is no longer being written.
        client = self._client = self._client or AsyncStoreClient(order.address, group=order.group)
        self._run(client.connect())
        if client.boot != order.boot:
            raise StoreUnavailable("the store has been started again meanwhile")
        self._run(client.register(self._namespace, self._label, shard=self._shard))

        self._publish(client)

    def _see(self) -> None:
        client = self._attached()
        self._in_time(client.map_extents())
        self._publish(client)

    def _publish(self, client: AsyncStoreClient) -> None:
        """For the thread that computes: one object, so that it sees all of it or nothing."""
        self.mapped = Mapped(client.boot, {extent: client.extent(extent) for extent in client.extents})

    def _detach(self) -> None:
        self._parts, self.mapped = [], Mapped()
        if self._client is not None:
            self._run(self._client.close())

    def _attached(self) -> AsyncStoreClient:
        if self._client is None or not self._client.connected:
            raise StoreUnavailable("this rank has no store")
        return self._client

    def _memory(self, place: Place) -> memoryview:
        client = self._attached()
        if place.extent not in client.extents:
            self._see()
        return client.room(Slot("reserved", 0, place.extent, 0, place.offset, place.generation), place.length)

    # --- chunks that ranks write together ----------------------------------------------------------------

    def _share(self, order: Share) -> list[int]:
        reserving = self._attached().reserve(
            order.namespace, order.tenant, order.chunks, retain_s=order.retain_s, writers=order.writers
        )
        slots = self._in_time(reserving).slots
        self._parts = [
            _Part(chunk.group, slot, place)
            for chunk, slot, place in zip(order.chunks, slots, order.places, strict=True)
        ]
        return [index for index, part in enumerate(self._parts) if part.ours]

    def _finish(self, order: Finish) -> None:
        client, wanted = self._attached(), set(order.indices)
        parts, self._parts = self._parts, []
        mine = [(index, part.slot) for index, part in enumerate(parts) if part.slot.status == "reserved"]
        unwritten = [slot.reservation for index, slot in mine if index not in wanted]
        written = [Written(slot.reservation, b"") for index, slot in mine if index in wanted]
        if unwritten:
            client.abort(unwritten)
        if written:
            self._in_time(client.commit(written))

    def _in_time(self, answer: Awaitable[R]) -> R:
        async def wait() -> R:
            return await asyncio.wait_for(answer, ANSWER_S)

        return self._run(wait())

    def _run(self, call: Coroutine[Any, Any, R]) -> R:
        return self._loop.run_until_complete(call)


def shard_of(rank: int, size: int) -> Shard:
    """What a rank tells the store of itself: its blocks are granules, of its heads."""
    return Shard(tp_rank=rank, tp_size=size)


def rank_shard(namespace: Namespace, rank: int, parallel: Parallel) -> Shard:
    """The same of one that may share positions or prompts with others."""
    shard = replace(
        shard_of(parallel.tensor_rank(rank), parallel.tp),
        pcp_rank=parallel.prefill_rank(rank), pcp_size=parallel.pcp,
    )  # fmt: skip
    if parallel.dcp == 1:
        return shard
    dealing = parallel.dealing(rank)
    windows = tuple(group.name for group in namespace.groups if group.window is not None)
    return replace(
        shard, dcp_rank=dealing.rank, dcp_size=dealing.size, dcp_ranks="tp", interleave=dealing.interleave,
        undivided=windows, block_tokens=dealing.block_tokens,
    )  # fmt: skip


def group_shard(group: GroupGeometry, shard: Shard) -> Shard:
    """What holds of one group: the blocks of one whose positions aren't dealt out have all of them."""
    if shard.divides(group):
        return shard
    whole = Shard()
    return replace(
        shard, dcp_rank=0, dcp_size=1, dcp_ranks=whole.dcp_ranks, interleave=1, undivided=(),
        block_tokens=whole.block_tokens,
    )  # fmt: skip


def writers_of(namespace: Namespace, parallel: Parallel) -> list[Sequence[int]]:
    """By group, the ranks that write: of those that hold the same bytes only one does."""

    def writes(index: int, rank: int) -> bool:
        shard = group_shard(namespace.groups[index], rank_shard(namespace, rank, parallel))
        return View(namespace, index, shard).writes

    return [[rank for rank in range(parallel.size) if writes(index, rank)] for index in range(len(namespace.groups))]
