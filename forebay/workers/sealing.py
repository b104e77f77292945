"""Hands finished KV to the store: every chunk as soon as it is full, the tail when a request lets go.

Chunks go out in order, so a parent is never behind its children. Blocks are pinned from here until the
transfer thread has copied them, so a window may move on and a request may end meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

from forebay.kvstore.identity import MATCH_UNIT, pack_tokens
from forebay.kvstore.layout import payload_bytes, round_down
from forebay.kvstore.protocol import NewChunk
from forebay.scheduler.memory import Admission, Growth
from forebay.scheduler.request import Request
from forebay.workers.block_pool import NO_BLOCK
from forebay.workers.holdings import Holding, Holdings
from forebay.workers.moves import Push, Pushed


class DeviceMemory:
    """The scheduler's `Memory`: `Holdings`, with everything worth keeping pushed before it is let go.

    `push` queues one chunk for the store and says whether it was taken; it must not block. `unanswered` counts, by
    request, the pushes of which `pushed` has not heard yet.
    """

    def __init__(self, holdings: Holdings, chunk_tokens: int, push: Callable[[Push], bool]) -> None:
        self.holdings = holdings
        self.incomplete = 0
        self.unanswered: Counter[Hashable] = Counter()
        self._chunk_tokens = chunk_tokens
        self._push = push

    def admit(self, request: Request, leave: int) -> Admission | None:
        """See `Memory.admit`."""
        return self.holdings.admit(request, leave)

    def grow(self, request: Request, upto: int) -> Growth:
        """See `Memory.grow`."""
        growth = self.holdings.grow(request, upto)
        if growth is Growth.DRAINING and not self.unanswered[request.key]:
            self.holdings.offer_again(request.key)
            self.store(request)
        return growth

    def claim(self, request: Request, count: int) -> int:
        """See `Memory.claim`."""
        return self.holdings.claim(request, count)

    def release(self, request: Request) -> None:
        """Store the tail, then let go of all blocks."""
        self.store(request, tail=True)
        self.holdings.drop_all(request)

    def advance(self, request: Request) -> None:
        """After a step: new units become findable, full chunks go to the store, the window moves on."""
        self.holdings.register(request)
        self.store(request)
        self.holdings.trim(request)

    def store(self, request: Request, *, tail: bool = False) -> None:
        """Push what is complete and not known to be stored; with `tail`, the open chunk's whole units too."""
        if not self.holdings.ask_store:
            return
        holding = self.holdings.holding(request)
        end = round_down(request.computed, MATCH_UNIT if tail else self._chunk_tokens)
        while holding.stored < end:
            start = round_down(holding.stored, self._chunk_tokens)
            stop = min(start + self._chunk_tokens, end)
            self._push_span(request, holding, start, stop)
            holding.stored = stop

    def pushed(self, done: Pushed) -> None:
        """The transfer thread is done with a push, one way or the other."""
        pool = self.holdings.pools[done.push.chunk.group]
        for block in done.push.blocks:
            pool.unpin(block)
        self.unanswered[done.push.request] -= 1
        if not self.unanswered[done.push.request]:
            del self.unanswered[done.push.request]
        self.holdings.pushed(done)
        if done.lost:
            # What was lost with the store is offered again, parents first, once it is back.
            self.holdings.mark_lost(done.push.request, done.push.chunk.start)

    def _push_span(self, request: Request, holding: Holding, start: int, stop: int) -> None:
        tokens = pack_tokens(request.tokens[start:stop])
        for group, shape in enumerate(self.holdings.shapes):
            blocks = self._blocks(holding, group, start // MATCH_UNIT, stop // MATCH_UNIT)
            if blocks is None:
                self.incomplete += 1
                continue
            chunk = NewChunk(group, holding.chain.key_at(stop), holding.chain.key_at(start), start, tokens)
            size = payload_bytes(shape.geometry, stop - start)
            pool = self.holdings.pools[group]
            for block in blocks:
                pool.pin(block)
            stays = self.holdings.admission(request.key, group) if stop - start == self._chunk_tokens else 0
            aside = self.holdings.aside(request.key)
            push = Push(request.key, holding.tenant, chunk, blocks, size, holding.retain_s, stays, aside)
            self.unanswered[request.key] += 1
            if not self._push(push):
                self.pushed(Pushed(push))

    def _blocks(self, holding: Holding, group: int, first: int, last: int) -> tuple[int, ...] | None:
        """Blocks of units [first, last), from the table or, where the window has passed, from the cache."""
        pool, table = self.holdings.pools[group], holding.tables[group]
        blocks: list[int] = []
        for unit in range(first, last):
            block: int | None = table[unit]
            if block == NO_BLOCK:
                block = pool.find(holding.chain.keys[unit])
            if block is None:
                return None
            blocks.append(block)
        # Promised blocks are not ours to hold up.
        if sum(map(pool.idle, blocks)) > max(0, pool.available):
            return None
        return tuple(blocks)
