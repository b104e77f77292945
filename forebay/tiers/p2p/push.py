"""Store jobs: a chunk of ours is offered to one peer, which makes room for it, verifies it and commits it.

Which one: of those that are named and up, the one that ranks highest for the chunk's key (rendezvous hashing), so that
a chunk that is pushed again goes where it is already.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from forebay.tiers.base import JobResult, StoreJob
from forebay.tiers.chunks import Slot
from forebay.tiers.p2p.errors import PeerError, PeerLost, PeerRefused
from forebay.tiers.p2p.fetch import Ways
from forebay.tiers.p2p.link import Inbox, Link
from forebay.tiers.p2p.peer import Peer
from forebay.tiers.p2p.streams import Offered, Streams
from forebay.tiers.p2p.wire import PIECE_BYTES, WINDOW, Accepted, Bytes, Declined, Offer, Stored, Taken, Withdraw

log = logging.getLogger("forebay.tier.p2p")

PUSHES_AT_ONCE = 4
PUSH_S = 30.0
"""A push may take so long by stream; and one step of it by frames, while others on the same link get on."""
REASONS = {"full": "full", "busy": "dropped", "namespace": "dropped", "corrupt": "corrupt"}


def ranked(key: bytes, names: Sequence[str]) -> list[str]:
    """Names by their rank for this key, the same for everybody."""
    return sorted(names, key=lambda name: hashlib.sha256(key + name.encode()).digest())


@dataclass
class Pushes:
    """Runs on the engine's loop. `namespaces` are encodings by id, for peers that don't know them yet."""

    peers: Mapping[str, Peer]
    push_to: Sequence[str]
    namespaces: Mapping[bytes, bytes]
    finish: Callable[[JobResult], None]
    stall_s: float
    ways: Callable[[Peer], Ways | None]
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._turns = asyncio.Semaphore(PUSHES_AT_ONCE)
        self._threads = ThreadPoolExecutor(PUSHES_AT_ONCE, "p2p-push")
        self.running = 0

    async def run(self, job: StoreJob, slot: Slot) -> None:
        """One job, to its result. The slot's memory is read until then, and not afterwards."""
        self.running += 1
        result = JobResult(job.id, False, "io")
        try:
            async with self._turns:
                result = await self._push(job, slot)
        except Exception:
            self.counts["push_failures"] += 1
            log.exception("p2p: pushing %s failed", job.chunk.key.hex())
        finally:
            self.running -= 1
            self.counts[f"pushes_{result.reason}" if result.reason else "pushes_ok"] += 1
            self.finish(result)

    async def _push(self, job: StoreJob, slot: Slot) -> JobResult:
        names = ranked(job.chunk.key, [name for name in self.push_to if self.peers[name].up])
        if not names:
            return JobResult(job.id, False, "dropped")
        peer = self.peers[names[0]]
        ways = self.ways(peer)
        if ways is None:
            return JobResult(job.id, False, "dropped")
        try:
            if ways.streams is not None:
                reason = await self._by_stream(ways.streams, job, slot)
            else:
                reason = await self._by_frames(ways.link, job, slot)
        except PeerRefused:
            return JobResult(job.id, False, "dropped")
        except PeerLost as error:
            peer.leave(str(error))
            return JobResult(job.id, False, "io")
        except PeerError:
            return JobResult(job.id, False, "io")
        if reason in ("", "have"):
            peer.served()
            return JobResult(job.id, True, length=job.length)
        return JobResult(job.id, False, REASONS.get(reason, "io"))

    async def _by_stream(self, streams: Streams, job: StoreJob, slot: Slot) -> str:
        """As `_by_frames`, on a thread. Its end is waited for, whatever happens: until then the slot is read."""
        namespace = self.namespaces.get(slot.header.namespace, b"")
        offered = Offered(job.chunk, slot.block, slot.payload, namespace)
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(self._threads, streams.push, offered, time.monotonic() + PUSH_S, self.stall_s)
        try:
            reason = await asyncio.shield(asked)
        except asyncio.CancelledError:
            streams.close()
            await asyncio.wait([asked])
            raise
        if reason:
            self.counts[f"declined_{reason}"] += 1
        else:
            self.counts[f"pushes_by_{streams.way}"] += 1
            self.counts["pushed_bytes"] += len(slot.payload)
        return reason

    def close(self) -> None:
        """No more pushes."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _by_frames(self, link: Link, job: StoreJob, slot: Slot) -> str:
        """Push to one peer; empty if it has stored the chunk, else why not. Raises PeerError."""
        namespace = self.namespaces.get(slot.header.namespace, b"")
        with link.request() as (rid, inbox):
            if not link.send(Offer(rid, slot.block, len(slot.payload), namespace)):
                raise PeerLost("the peer takes nothing")
            message, _ = await link.next(inbox, PUSH_S, self.stall_s)
            if isinstance(message, Declined):
                self.counts[f"declined_{message.reason}"] += 1
                return message.reason
            if not isinstance(message, Accepted):
                raise PeerLost(f"{type(message).__name__} came instead of Accepted")
            ended = False
            try:
                stored = await self._send(link, rid, inbox, slot.payload)
                ended = True
            finally:
                if not ended:
                    link.send(Withdraw(rid))
        if not stored.ok:
            return stored.reason or "io"
        self.counts["pushes_by_frames"] += 1
        self.counts["pushed_bytes"] += len(slot.payload)
        return ""

    async def _send(self, link: Link, rid: int, inbox: Inbox, payload: memoryview) -> Stored:
        sent = taken = 0
        while True:
            while sent < len(payload) and sent - taken < WINDOW * PIECE_BYTES:
                # A copy: the job may be over, and the slot another's, while ZMQ still holds what a hung peer left.
                piece = memoryview(bytes(payload[sent : sent + PIECE_BYTES]))
                if not link.send(Bytes(rid, sent), piece):
                    break
                sent += len(piece)
            message, _ = await link.next(inbox, PUSH_S, self.stall_s)
            if isinstance(message, Stored):
                return message
            if not isinstance(message, Taken) or not taken < message.received <= sent:
                raise PeerLost(f"{type(message).__name__} came in the middle of a push")
            taken = message.received
