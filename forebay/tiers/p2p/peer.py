"""A peer as this host sees it: connected, or left alone for a while. This is its circuit breaker.

    down --(backoff is over, Hello is answered)--> up --(silent, lies, too many slips)--> down, for longer each time

What a peer has proved with a verified chunk sets the backoff back. An answer to Hello doesn't: who lies greets too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from forebay.errors import ForebayError
from forebay.tiers.p2p.link import Link
from forebay.tiers.p2p.sockets import Socket, gone
from forebay.tiers.p2p.wire import Nixl, Welcome

log = logging.getLogger("forebay.tier.p2p")

HELLO_S = 2.0
SLIPS_MAX = 3
"""Answers in a row that are late, or hits in a row that weren't there: then the peer is left alone."""


@dataclass
class Backoff:
    """How long a peer is left alone, in seconds."""

    first_s: float = 0.2
    max_s: float = 10.0
    now_s: float = 0.0

    def next(self) -> float:
        """The next time to wait; each longer than the one before."""
        self.now_s = min(max(self.now_s * 2, self.first_s), self.max_s)
        return self.now_s

    def reset(self) -> None:
        """Begin again with the shortest."""
        self.now_s = 0.0


@dataclass(frozen=True, slots=True)
class Self:
    """How this host introduces itself."""

    name: str
    boot: bytes
    nixl: bool


class Peer:
    """Keeps a link to one peer. `dial` makes a socket; `changed` is called when it comes up or goes down; `greeted`
    with the Welcome of each link for bulk, `nixl_changed` with new metadata, on the loop. While it is up there are
    `link`, for questions, and `bulk`, a second connection: else questions would wait behind the bytes of chunks."""

    def __init__(
        self,
        name: str,
        me: Self,
        dial: Callable[[], Socket],
        changed: Callable[[], None],
        greeted: Callable[[Peer, Welcome], None] = lambda peer, welcome: None,
        nixl_changed: Callable[[Peer, Nixl], None] = lambda peer, nixl: None,
        backoff: Backoff | None = None,
    ) -> None:
        self.name = name
        self._me, self._dial, self._changed, self._greeted = me, dial, changed, greeted
        self._nixl_changed = nixl_changed
        self._backoff = backoff or Backoff()
        self._late = self._broken = 0
        self._last_why = ""
        self._keeper = secrets.token_bytes(16)
        self.link: Link | None = None
        self.bulk: Link | None = None
        self.counts: Counter[str] = Counter()

    @property
    def up(self) -> bool:
        return self.link is not None and self.link.open

    @property
    def state(self) -> str:
        """For people."""
        return "up" if self.up else f"down: {self._last_why or 'not reached yet'}"

    async def run(self) -> None:
        """Keep connected until cancelled."""
        while True:
            why = await self._one_link()
            self.counts["downs"] += 1
            if why != self._last_why:
                log.warning("p2p: peer %s is left alone: %s", self.name, why)
            self._last_why = why
            self._changed()
            await asyncio.sleep(self._backoff.next())

    async def _one_link(self) -> str:
        """From Hello to the end of one pair of links; returns why it ended."""
        links: list[Link] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            for _ in range(2):
                links.append(self._dialled())
                tasks.append(asyncio.create_task(links[-1].receive()))
            link, bulk = links
            await link.greet(self._me.name, self._me.boot, self._keeper, HELLO_S, nixl=False)
            welcome = await bulk.greet(self._me.name, self._me.boot, self._keeper, HELLO_S, nixl=self._me.nixl)
            self._greeted(self, welcome)
            self.link, self.bulk, self._late, self._broken = link, bulk, 0, 0
            self.counts["ups"] += 1
            log.info("p2p: peer %s is up", self.name)
            self._changed()
            tasks += [asyncio.create_task(one.ping()) for one in links]
            await asyncio.wait([link.failed, bulk.failed], return_when=asyncio.FIRST_COMPLETED)
            return next(one.failed.result() for one in links if one.failed.done())
        except ForebayError as error:
            return str(error)
        finally:
            self.link = self.bulk = None
            for one in links:
                one.close()
            for task in tasks:
                await gone(task)

    def _dialled(self) -> Link:
        return Link(self._dial(), asyncio.get_running_loop().time, lambda nixl: self._nixl_changed(self, nixl))

    # --- what it did -----------------------------------------------------------------------------------

    @property
    def troubled(self) -> bool:
        """Is anything held against it that a chunk from it would clear?"""
        return bool(self._late or self._broken or self._backoff.now_s)

    def served(self) -> None:
        """It brought a chunk whose bytes were right, or took one."""
        self._late = self._broken = 0
        self._backoff.reset()

    def answered(self) -> None:
        """It answered in time."""
        self._late = 0

    def late(self) -> None:
        """It didn't answer in time. Not bad once."""
        self.counts["late"] += 1
        self._late += 1
        if self._late >= SLIPS_MAX:
            self.leave(f"{self._late} answers in a row were late")

    def broke_promise(self) -> None:
        """It hadn't got what it had said that it has. Not bad once."""
        self.counts["broken_promises"] += 1
        self._broken += 1
        if self._broken >= SLIPS_MAX:
            self.leave(f"{self._broken} chunks in a row weren't there that it said it has")

    def sent_damage(self, why: str) -> None:
        """A payload wasn't what its header says. That may be a bit that has flipped over there; not bad once."""
        self.counts["damaged"] += 1
        self._broken += 1
        log.warning("p2p: peer %s sent a damaged chunk: %s", self.name, why)
        if self._broken >= SLIPS_MAX:
            self.leave(f"{self._broken} chunks in a row were damaged or missing")

    def lied(self, why: str) -> None:
        """What it sent wasn't what it should be: it is left alone at once."""
        self.counts["lies"] += 1
        log.warning("p2p: peer %s sent what can't be true: %s", self.name, why)
        self.leave(why)

    def leave(self, why: str) -> None:
        """Leave it alone for a while."""
        if self.link is not None:
            self.link.fail(why)

    def figures(self) -> dict[str, float]:
        """Gauges and counters."""
        return {"up": float(self.up), **{name: float(count) for name, count in self.counts.items()}}
