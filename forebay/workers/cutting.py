"""The back end of a cut: asks the store for what should be loaded, last piece first, and copies what comes.

Segments of a few pieces are under way at once. How large they are follows from the tiers' rates, and so does how far
ahead is asked; what lies where the front will have been anyway isn't asked for. A piece that doesn't come, for whatever
reason, ends the loading: the front computes it, and what lies behind it stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from forebay.errors import StoreError
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.protocol import BATCH_ITEMS_MAX, ChunkRead, Fetched, Place
from forebay.workers.counters import Counters
from forebay.workers.cut import Cut
from forebay.workers.moves import DEVICE, HOST, Opened, Pull, Pulled
from forebay.workers.pieces import Piece, plan_pieces
from forebay.workers.prefix import GroupShape
from forebay.workers.rates import Rates
from forebay.workers.reading import Copy, Reading

SEGMENT_S = 0.04
"""What one segment should take, so that not much is lost where the ends meet; at least one piece."""

AHEAD_S = 1.0
"""How much is asked for at once; at least two segments, so that the tier never waits for us."""

LOOK_S = 0.005
"""How often it is looked at whether an engine that waits should rather compute."""

LATE_S = 0.05
"""When a segment is so late, what has come of it is used without the rest."""

ABANDONED_MAX = 256
"""Answers that come too late and must be released; with more of them under way no new cut is begun."""

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Segment:
    """Pieces [first, last) that were asked for together."""

    first: int
    last: int
    loads: Mapping[str, int]
    answer: asyncio.Task[Fetched]


@dataclass
class Cutter:
    """Loads the backs of cuts, any number at a time, on the transfer thread's loop. `deliver` reaches the engine."""

    client: AsyncStoreClient
    reading: Reading
    shapes: Sequence[GroupShape]
    rates: Rates
    counters: Counters
    deliver: Callable[[Opened], None]
    deadline_ms: int
    abandoned: set[asyncio.Task[Fetched]] = field(default_factory=set)
    open: int = 0

    @property
    def busy(self) -> bool:
        """Are there too many late answers to begin another cut?"""
        return len(self.abandoned) >= ABANDONED_MAX

    async def load(self, namespace_id: bytes, pull: Pull, part: Pulled, reach: int, places: Sequence[Place]) -> Pulled:
        """Cut [what the device has with `part`, `reach`), and load its back until the ends have met, or nothing more
        comes. The engine is told at once, so that it can begin. Raises StoreError."""
        start = max(part.hit, pull.device_hit)
        pieces = plan_pieces(self.shapes, pull.rooms, start, reach, places)
        cut = Cut(pull.request, pieces, len(self.shapes), self.rates, asyncio.get_running_loop().time)
        back = _Back(self, namespace_id, pull, cut)
        self.counters.add("cut.begun")
        self.open += 1
        try:
            back.ask()
            self.deliver(Opened(pull.request, cut, part))
            await back.run()
        finally:
            self.open -= 1
            cut.finish()
            back.abandon()
        return Pulled(pull.request, 0, tuple({} for _ in self.shapes))

    def late(self, segment: Segment) -> None:
        """Nobody waits for this answer any more: what it pins is released when it comes."""
        self.abandoned.add(segment.answer)
        segment.answer.add_done_callback(lambda answer: self._came_late(segment, answer))

    def _came_late(self, segment: Segment, answer: asyncio.Task[Fetched]) -> None:
        self.abandoned.discard(answer)
        fetched = None if answer.cancelled() or answer.exception() else answer.result()
        self.rates.loads.end(segment.loads, arrived=fetched is not None and not fetched.pending)
        self.counters.add("cut.late_segments")
        if fetched is not None and fetched.lease:
            self.release(fetched.lease)

    def release(self, lease: int) -> None:
        """Let go of a lease; it has ended if its connection has."""
        try:
            self.client.release([lease])
        except StoreError as error:
            log.debug("a lease ended with its connection: %s", error)


class _Back:
    """One cut's segments."""

    def __init__(self, cutter: Cutter, namespace_id: bytes, pull: Pull, cut: Cut) -> None:
        self._cutter, self._namespace_id, self._pull, self._cut = cutter, namespace_id, pull, cut
        self._segments: deque[Segment] = deque()
        self._asked = len(cut.pieces)
        self._look_s = LOOK_S + 2e-5 * len(cut.pieces)
        self._patience_s = LATE_S

    async def run(self) -> None:
        """Until the ends have met, or nothing more can come."""
        cut = self._cut
        while not cut.over and self._segments:
            segment = self._segments[0]
            await asyncio.wait({segment.answer}, timeout=self._look_s * (1 if cut.parked else 4))
            if not segment.answer.done() and cut.opened and cut.late_s() > self._patience_s:
                await self._land_some(segment)
            if cut.wakes():
                self._cutter.deliver(Opened(self._pull.request, cut))
            if segment.answer.done() and cut.opened:
                self._segments.popleft()
                self._patience_s = LATE_S
                if not await self._land(segment):
                    return
                cut.arrived(self._segments[0].last - self._segments[0].first if self._segments else 0)
                self.ask()
            elif segment.answer.done():
                await asyncio.sleep(0.001)  # the engine is in a step of others; there are no blocks before its end

    # --- asking ----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for what should be under way now."""
        cut = self._cut
        seconds = cut.load_seconds()
        while self._asked > 0 and not cut.over:
            enough = not self._known() or sum(seconds[self._asked : cut.next]) >= AHEAD_S
            if len(self._segments) >= 2 and enough:
                return
            first = self._segment_start(seconds)
            if first is None:
                return
            self._ask(first, self._asked)
            self._asked = first
            cut.asked(first)

    def _segment_start(self, seconds: Sequence[float]) -> int | None:
        """Where the next segment begins, which ends where the last one begins. None: it would be of no use."""
        cut = self._cut
        meeting = cut.meeting()
        useful = next((i for i, piece in enumerate(cut.pieces[: self._asked]) if piece.start >= meeting), None)
        if useful is None or useful >= self._asked:
            # A tier that seems too slow is tried all the same, by one piece at a time: it may have become faster.
            probe = self._asked == len(cut.pieces) and all(map(self._cutter.rates.loads.idle, cut.total))
            return self._asked - 1 if probe else None
        first, total = self._asked, 0.0
        while first > useful and (first == self._asked or (self._known() and total < SEGMENT_S)):
            first -= 1
            total += seconds[first]
        # Places go into one message.
        return max(first, self._asked - BATCH_ITEMS_MAX // len(self._cutter.shapes))

    def _known(self) -> bool:
        """Is the bandwidth of every tier known that is needed?"""
        return all(self._cutter.rates.loads.bandwidth(tier) is not None for tier in self._cut.total)

    def _ask(self, first: int, last: int) -> None:
        cut, cutter = self._cut, self._cutter
        # As long as the front would take all by itself: until then it may come in time.
        deadline_ms = max(cutter.deadline_ms, int(1000 * cutter.rates.prefill.seconds(cut.start, cut.end)))
        loads: Counter[str] = Counter()
        for piece in cut.pieces[first:last]:
            loads.update(piece.loads)
        cutter.rates.loads.begin(loads)
        cutter.counters.add("cut.segments")
        fetching = self._fetch(first, last, deadline_ms)
        self._segments.append(Segment(first, last, loads, asyncio.get_running_loop().create_task(fetching)))

    async def _fetch(self, first: int, last: int, deadline_ms: int) -> Fetched:
        pull, cut, cutter = self._pull, self._cut, self._cutter
        wanted = [place for piece in reversed(cut.pieces[first:last]) for place in piece.wanted]
        if not wanted:  # the device has all of it
            return Fetched(rid=0, boot=b"", lease=0, chunks=[])
        begin = cut.pieces[first].position * cutter.shapes[0].chunk_tokens
        return await cutter.client.fetch(
            self._namespace_id, pull.root, pull.tokens[4 * begin :], pull.keys, limit=cut.end, wanted=wanted,
            deadline_ms=deadline_ms, tenant=pull.tenant, tokens_from=begin,
        )  # fmt: skip

    def abandon(self) -> None:
        """Nobody waits any more for what is under way."""
        for segment in self._segments:
            self._cutter.late(segment)
        self._segments.clear()

    # --- landing ---------------------------------------------------------------------------------------

    async def _land(self, segment: Segment) -> bool:
        """Copy what a segment brought, last piece first. False: not all of it came, or the front was there before."""
        cutter = self._cutter
        try:
            fetched = segment.answer.result()
        except StoreError:
            cutter.rates.loads.end(segment.loads, arrived=False)
            raise
        there = {(chunk.group, chunk.start): chunk for chunk in fetched.chunks}
        try:
            self._retain(fetched)
            pieces = range(segment.last - 1, segment.first - 1, -1)
            covered = [self._copies_of(self._cut.pieces[index], there) is not None for index in pieces]
            cutter.rates.loads.end(segment.loads, arrived=all(covered))
            for index in pieces:
                if not await self._land_piece(index, there):
                    return False
            return True
        finally:
            if fetched.lease:
                cutter.release(fetched.lease)

    async def _land_some(self, segment: Segment) -> None:
        """What has come of a segment that is late, as far as it goes from its end. The next look is later."""
        self._patience_s = 2 * self._cut.late_s()
        fetched = await self._fetch(segment.first, segment.last, 0)
        there = {(chunk.group, chunk.start): chunk for chunk in fetched.chunks}
        try:
            for index in range(segment.last - 1, segment.first - 1, -1):
                if self._copies_of(self._cut.pieces[index], there) is None:
                    return
                if not await self._land_piece(index, there):
                    return
                segment.last = index
        finally:
            if fetched.lease:
                self._cutter.release(fetched.lease)

    def _retain(self, fetched: Fetched) -> None:
        if self._pull.retain_s > 0 and fetched.chunks:
            chunks = [(chunk.group, chunk.key) for chunk in fetched.chunks]
            self._cutter.client.touch_soon(chunks, tenant=self._pull.tenant, retain_s=self._pull.retain_s)

    async def _land_piece(self, index: int, there: Mapping[tuple[int, int], ChunkRead]) -> bool:
        cutter, cut = self._cutter, self._cut
        piece = cut.pieces[index]
        wanted = self._copies_of(piece, there)
        if wanted is None:
            cutter.counters.add("cut.holes")
            return False
        blocks = cut.take(index)
        if blocks is None:
            return False
        landed = False
        try:
            landed = not await cutter.reading.copy(_with_blocks(wanted, blocks))
        finally:
            if landed:
                cut.landed(index, blocks, _names(piece, wanted))
            else:
                cut.failed(blocks)
        return landed

    def _copies_of(self, piece: Piece, there: Mapping[tuple[int, int], ChunkRead]) -> list[Copy] | None:
        """What to copy for a piece, still without blocks; None if a chunk is lacking or too short."""
        begin = piece.position * self._cutter.shapes[0].chunk_tokens
        copies = []
        for group, runs in enumerate(piece.missing):
            chunk = there.get((group, begin))
            if runs and (chunk is None or begin + chunk.tokens < piece.end):
                return None
            if chunk is not None:
                copies += [Copy(chunk, run.start - begin // MATCH_UNIT, run, ()) for run in runs]
        return copies


def _with_blocks(copies: Sequence[Copy], blocks: Sequence[Sequence[int]]) -> list[Copy]:
    """The same copies, each with its share of its group's blocks, in their order."""
    left = [list(some) for some in blocks]
    complete = []
    for copy in copies:
        mine, left[copy.chunk.group] = left[copy.chunk.group], []
        mine, left[copy.chunk.group] = mine[: len(copy.units)], mine[len(copy.units) :]
        complete.append(Copy(copy.chunk, copy.first, copy.units, tuple(mine)))
    assert not list(chain.from_iterable(left))
    return complete


def _names(piece: Piece, copies: Sequence[Copy]) -> dict[int, str]:
    """Where each unit of a piece came from: a unit that a tier had to bring in any group is that tier's, also if it had
    been brought when it was looked at."""
    names = dict.fromkeys(range(piece.start // MATCH_UNIT, piece.end // MATCH_UNIT), DEVICE)
    brought = max(piece.loads, key=lambda tier: piece.loads[tier], default=HOST)
    for copy in sorted(copies, key=lambda copy: bool(copy.chunk.promoted)):
        names.update(dict.fromkeys(copy.units, copy.chunk.promoted or brought))
    return names
