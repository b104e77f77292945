"""Load jobs: from the peers that said that they have the chunk, one after the other, until the deadline."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from forebay.errors import CorruptChunk
from forebay.tiers.base import ChunkId, JobResult
from forebay.tiers.p2p import wire
from forebay.tiers.p2p.answers import Answers
from forebay.tiers.p2p.errors import Damaged, NotThere, PeerError, PeerLost, PeerRefused, TooLate, Unfenced
from forebay.tiers.p2p.fetch import Arrived, Fetcher, Wanted, Ways
from forebay.tiers.p2p.peer import Peer
from forebay.tiers.p2p.streams import Streams

log = logging.getLogger("forebay.tier.p2p")

BUSY_WAIT_S = 0.01


@dataclass
class Loads:
    """Runs on the engine's loop. `ways` says how a peer's bytes may come; `finish` takes results; `fail` is told of a
    transfer that can't be revoked: that job has no result, since its slot may still be written."""

    peers: Mapping[str, Peer]
    answers: Answers
    fetcher: Fetcher
    ways: Callable[[Peer], Ways | None]
    finish: Callable[[JobResult], None]
    fail: Callable[[Exception], None]
    ask_s: float
    at_once: int
    again: Callable[[Wanted], None] = lambda wanted: None
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._turns = asyncio.Semaphore(self.at_once)
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._straight = self._on_loop = 0

    @property
    def running(self) -> int:
        """Loads that have no result yet."""
        return self._straight + self._on_loop

    # --- straight on a thread ---------------------------------------------------------------------------

    def begin(self, wanted: Wanted) -> bool:
        """From the tier's thread: run a load on a thread of its own, if a peer is known to have the chunk and serves
        streams; the loop isn't troubled with it. False where it has to be."""
        names = self.answers.places(wanted.job.chunk)
        ways = self.ways(self.peers[names[0]]) if names else None
        if ways is None or ways.streams is None:
            return False
        self._count_straight(1)
        try:
            self.fetcher.threads.submit(self._run_straight, wanted, self.peers[names[0]], ways, ways.streams)
        except RuntimeError:  # the engine is closing
            self._count_straight(-1)
            return False
        return True

    def _count_straight(self, more: int) -> None:
        with self._lock:
            self._straight += more

    def _run_straight(self, wanted: Wanted, peer: Peer, ways: Ways, streams: Streams) -> None:
        try:
            got = self.fetcher.by_stream(wanted, ways, streams)
        except Unfenced as error:
            self.fail(error)
        except Exception:
            self.again(wanted)  # with all that there is for peers that lie, lose or refuse
        else:
            if peer.troubled:
                self._loop.call_soon_threadsafe(peer.served)
            self._arrived(wanted, got)
        finally:
            self._count_straight(-1)

    def _arrived(self, wanted: Wanted, got: Arrived) -> None:
        with self._lock:
            self.counts["loaded_bytes"] += got.length
            self.counts[f"loads_by_{got.way}"] += 1
            self.counts["loads_ok"] += 1
        self.finish(JobResult(wanted.job.id, True, "", got.block, got.length))

    # --- on the loop -----------------------------------------------------------------------------------

    async def run(self, wanted: Wanted) -> None:
        """One job, to its result."""
        self._on_loop += 1
        result: JobResult | None = JobResult(wanted.job.id, False, "io")
        try:
            result = await self._in_turn(wanted)
        except Unfenced as error:
            result = None
            self.fail(error)
        except asyncio.CancelledError:
            result = None  # a thread may still be writing: the tier tells it when all are at their end
            raise
        except Exception:
            self.counts["load_failures"] += 1
            log.exception("p2p: loading %s failed", wanted.job.chunk.key.hex())
        finally:
            self._on_loop -= 1
            if result is not None and not result.ok:
                with self._lock:
                    self.counts[f"loads_{result.reason}"] += 1
                self.finish(result)
            elif result is not None:
                self.finish(result)

    async def _in_turn(self, wanted: Wanted) -> JobResult:
        try:
            async with asyncio.timeout_at(wanted.due):
                await self._turns.acquire()
        except TimeoutError:
            return JobResult(wanted.job.id, False, "late")
        try:
            return await self._from_anybody(wanted)
        finally:
            self._turns.release()

    async def _from_anybody(self, wanted: Wanted) -> JobResult:
        """Peers that said so first; then whoever else may have it."""
        chunk, tried = wanted.job.chunk, set[str]()
        reason = "missing"
        for asked in (False, True):
            names = await self._ask_all(chunk, tried, wanted.due) if asked else self.answers.places(chunk)
            for name in names:
                if name in tried:
                    continue
                tried.add(name)
                outcome = await self._from(self.peers[name], wanted)
                if outcome.ok or outcome.reason == "late":
                    return outcome
                reason = outcome.reason if outcome.reason != "missing" else reason
        if asyncio.get_running_loop().time() >= wanted.due:
            return JobResult(wanted.job.id, False, "late")
        self.answers.forget([chunk])
        return JobResult(wanted.job.id, False, reason)

    async def _from(self, peer: Peer, wanted: Wanted) -> JobResult:
        job = wanted.job
        ways = self.ways(peer)
        if ways is None:
            return JobResult(job.id, False, "missing")
        try:
            got = await self._patiently(wanted, ways)
        except TooLate:
            peer.late()
            return JobResult(job.id, False, "late")
        except CorruptChunk as error:
            self.answers.not_there(job.chunk, peer.name)
            peer.lied(str(error))
            return JobResult(job.id, False, "corrupt")
        except Damaged as error:
            self.answers.not_there(job.chunk, peer.name)
            ways.link.send(wire.Damaged(job.chunk))
            peer.sent_damage(str(error))
            return JobResult(job.id, False, "corrupt")
        except NotThere:
            self.answers.not_there(job.chunk, peer.name)
            peer.broke_promise()
            return JobResult(job.id, False, "missing")
        except PeerRefused:
            return JobResult(job.id, False, "io")
        except PeerLost as error:
            self.answers.not_there(job.chunk, peer.name)
            peer.leave(str(error))
            return JobResult(job.id, False, "io")
        peer.served()
        with self._lock:
            self.counts["loaded_bytes"] += got.length
            self.counts[f"loads_by_{got.way}"] += 1
            self.counts["loads_ok"] += 1
        return JobResult(job.id, True, "", got.block, got.length)

    async def _patiently(self, wanted: Wanted, ways: Ways) -> Arrived:
        """A peer that has too much to do is asked again, as long as there is time."""
        while True:
            try:
                return await self.fetcher.fetch(wanted, ways)
            except PeerRefused:
                await asyncio.sleep(BUSY_WAIT_S)
                if asyncio.get_running_loop().time() >= wanted.due:
                    raise TooLate("the deadline has passed") from None

    async def _ask_all(self, chunk: ChunkId, but: set[str], due: float) -> list[str]:
        """Peers that have the chunk now, of those that haven't been tried."""
        left = due - asyncio.get_running_loop().time()
        peers = [peer for peer in self.peers.values() if peer.up and peer.name not in but]
        found = await asyncio.gather(*(self._has(peer, chunk, min(left, self.ask_s)) for peer in peers))
        return [peer.name for peer, has in zip(peers, found, strict=True) if has]

    async def _has(self, peer: Peer, chunk: ChunkId, timeout_s: float) -> bool:
        link = peer.link
        if link is None:
            return False
        try:
            (result,) = await link.ask([wire.exact(chunk)], timeout_s)
        except PeerError:
            return False
        return result.outcome == "hit" and result.key == chunk.key
