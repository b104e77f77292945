"""Clears that are passed on to peers: to each until it has answered, in order; meanwhile it is asked for nothing.

A peer that is away is told when it is back. What is made here is passed on, what a peer has passed on isn't: the host
where somebody clears tells its own peers, and nobody else does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from forebay.tiers.base import ClearScope
from forebay.tiers.p2p.errors import PeerError, PeerRefused

log = logging.getLogger("forebay.tier.p2p")

WAITING_MAX = 64
"""Clears that wait for one peer. With one more, all of them become one of everything."""
QUIET_S = 2.0
"""So long after a clear that came from a peer no peer is asked: others may be told a moment later, and what they still
have would come back from them."""
BUSY_WAIT_S = 0.5
EVERYTHING = ClearScope()


@dataclass(slots=True)
class _Peer:
    waiting: list[ClearScope] = field(default_factory=list)
    telling: bool = False


class PeerClears:
    """Runs on the engine's loop. `tell` clears at a peer that is up, and returns how many chunks its memory lost;
    `spawn` runs a coroutine function with arguments; `clock` is monotonic, in seconds."""

    def __init__(
        self,
        names: Iterable[str],
        tell: Callable[[str, ClearScope], Awaitable[int]],
        spawn: Callable[..., None],
        clock: Callable[[], float],
    ) -> None:
        self._peers = {name: _Peer() for name in names}
        self._tell, self._spawn, self._clock = tell, spawn, clock
        self._obeying: Counter[ClearScope] = Counter()
        self._quiet_until = 0.0
        self.counts: Counter[str] = Counter()

    # --- what is made here -----------------------------------------------------------------------------

    def pass_on(self, scope: ClearScope, up: Iterable[str]) -> None:
        """Tell every peer, those that are `up` at once."""
        self.counts["clears_passed_on"] += 1
        for peer in self._peers.values():
            if scope in peer.waiting[1:]:
                continue  # it waits for its turn; the first may be under way
            peer.waiting.append(scope)
            if len(peer.waiting) > WAITING_MAX:
                self.counts["clears_widened"] += 1
                peer.waiting[:] = [EVERYTHING]
        for name in up:
            self.came_up(name)

    def came_up(self, name: str) -> None:
        """This peer can be told."""
        peer = self._peers[name]
        if peer.waiting and not peer.telling:
            peer.telling = True
            self._spawn(self._tell_all, name, peer)

    async def _tell_all(self, name: str, peer: _Peer) -> None:
        try:
            while peer.waiting:
                scope = peer.waiting[0]
                try:
                    chunks = await self._tell(name, scope)
                except PeerRefused as error:
                    if str(error) == "busy":
                        await asyncio.sleep(BUSY_WAIT_S)
                        continue
                    self.counts["clears_refused"] += 1
                    log.warning("p2p: peer %s doesn't clear: %s", name, error)
                except PeerError as error:
                    self.counts["clears_failed"] += 1
                    log.warning("p2p: peer %s hasn't cleared, and is told again: %s", name, error)
                    return
                else:
                    self.counts["clears_told"] += 1
                    self.counts["chunks_cleared_there"] += chunks
                    log.info("p2p: peer %s has cleared %d chunks of its memory", name, chunks)
                if scope in peer.waiting:
                    peer.waiting.remove(scope)
        finally:
            peer.telling = False

    def due(self, name: str) -> bool:
        """Does this peer still have to clear? What it has isn't to be believed in until then."""
        return bool(self._peers[name].waiting)

    # --- what comes from peers -------------------------------------------------------------------------

    async def obey(self, scope: ClearScope, clear: Callable[[ClearScope], Awaitable[int]]) -> int:
        """Clear our own store by `clear`, without passing that on."""
        self._obeying[scope] += 1
        try:
            return await clear(scope)
        finally:
            self._obeying[scope] -= 1
            if not self._obeying[scope]:
                del self._obeying[scope]
            self.counts["clears_obeyed"] += 1
            self._quiet_until = self._clock() + QUIET_S

    def obeying(self, scope: ClearScope) -> bool:
        """Is our store being cleared of this because a peer said so? From any thread."""
        return scope in self._obeying

    @property
    def quiet(self) -> bool:
        """Is it too soon to ask anybody?"""
        return bool(self._obeying) or self._clock() < self._quiet_until

    def figures(self) -> dict[str, float]:
        """Gauges and counters."""
        waiting = max((len(peer.waiting) for peer in self._peers.values()), default=0)
        return {"clears_waiting": float(waiting)} | {name: float(count) for name, count in self.counts.items()}
