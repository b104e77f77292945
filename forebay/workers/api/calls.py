"""One generation as the front end sees it: its tokens, its attempts, and what it still waits for."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.errors import ProtocolError
from forebay.kvstore.identity import pack_tokens
from forebay.workers.protocol import FinishReason, Generate, Sampling, TokenOut, TokenScore

if TYPE_CHECKING:
    from forebay.workers.api.link import WorkerLink

HOME_BYTES = 256
"""What decides which worker is a prompt's own: its first 64 tokens."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A generation is over."""

    reason: FinishReason
    error: str = ""


@dataclass(eq=False)
class Call:
    """A generation under way. `emitted` is its whole state: a successor of its worker is fed these ids.

    `events` is bounded by `max_tokens`: every entry but the last is one token. A `held` call isn't sent yet.
    `begun` is set with the first token, or the end. A `settled` one ends when the store has what it computed; a `split`
    one is prefilled and decoded by two workers; one that is `fresh` was never taken by any.

    Where it is, kept by the fleet: `link` (None: it waits), `last` where it was last, `full` those that turned it away,
    `moving` while it is to leave its worker, `handed` if its worker is only to prefill it, `alone_since` when it last
    had one, `lost_at` when that was found dead, `deaths` how many it has lost in a row without progress: a token, or
    more of it stored than any found (`furthest`).
    """

    id: str
    prompt: bytes
    sampling: Sampling
    salt: bytes
    tenant: str
    held: bool = False
    retain_s: float = 0.0
    settled: bool = False
    priority: int = 0
    beside: Call | None = None
    split: bool = False
    attempt: int = 0
    known: int = 0
    born: float = field(default_factory=time.monotonic)
    emitted: array[int] = field(default_factory=lambda: array("I"))
    events: asyncio.Queue[TokenOut | Ended] = field(default_factory=asyncio.Queue)
    cached: dict[str, int] | None = None
    scores: dict[int, TokenScore] = field(default_factory=dict)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    turned_away_at: float | None = None
    fresh: bool = True
    link: WorkerLink | None = None
    last: WorkerLink | None = None
    full: set[WorkerLink] = field(default_factory=set)
    moving: bool = False
    handed: bool = False
    alone_since: float | None = None
    lost_at: float | None = None
    deaths: int = 0
    furthest: int = 0

    @property
    def home(self) -> bytes:
        """Prompts with the same one are best kept together."""
        return self.salt + self.prompt[:HOME_BYTES]

    def request(self, *, hand_over: bool = False) -> Generate:
        """The message that starts the next attempt."""
        self.attempt += 1
        self.handed = hand_over
        self.known = len(self.prompt) // 4 + len(self.emitted)
        return Generate(
            id=self.id, attempt=self.attempt, prompt=self.prompt, sampling=self.sampling,
            emitted=pack_tokens(self.emitted), salt=self.salt, tenant=self.tenant,
            retain_s=self.retain_s, settled=self.settled, priority=self.priority,
            waited_s=time.monotonic() - self.born if self.attempt > 1 else 0.0, hand_over=hand_over,
        )  # fmt: skip

    def began(self, attempt: int, cached: dict[str, int]) -> None:
        """The worker knows what was cached. Only the first attempt counts: later ones find their own work. Raises
        ProtocolError for what can't be."""
        if not 0 <= sum(cached.values()) < self.known or min(cached.values(), default=0) < 0:
            raise ProtocolError(f"{cached} of {self.known} tokens can't have been cached")
        self.fresh = False
        if sum(cached.values()) > self.furthest:
            self.furthest, self.deaths = sum(cached.values()), 0
        if attempt == self.attempt and self.cached is None:
            self.cached = cached

    def scored(self, attempt: int, start: int, scores: list[TokenScore]) -> None:
        """How likely the prompt's tokens from `start` on were. Of several attempts the last one is right as well.

        Raises ProtocolError for tokens that the prompt doesn't have.
        """
        if start < 1 or start + len(scores) > len(self.prompt) // 4:
            raise ProtocolError(f"scores from {start} on came for a prompt of {len(self.prompt) // 4} tokens")
        if attempt == self.attempt:
            self.scores.update(enumerate(scores, start))

    def token(self, out: TokenOut) -> bool:
        """A token of some attempt; False if it was dropped: output of a dead attempt, and what was emitted already.

        Raises ProtocolError if tokens are missing: another attempt, on another connection, will have them; and for more
        than were asked for.
        """
        if self.ended or out.attempt != self.attempt or out.index < len(self.emitted):
            return False
        if out.index > len(self.emitted):
            raise ProtocolError(f"token {out.index} came where {len(self.emitted)} was due")
        if out.index >= self.sampling.max_tokens:
            raise ProtocolError(f"token {out.index} came, of {self.sampling.max_tokens} that were asked for")
        self.emitted.append(out.token)
        self.turned_away_at, self.deaths = None, 0
        self.events.put_nowait(out)
        self.begun.set()
        return True

    def end(self, attempt: int, reason: FinishReason, error: str = "") -> bool:
        """The worker is done with some attempt; True if it was the present one."""
        if self.ended or attempt != self.attempt:
            return False
        self.ended = True
        self.events.put_nowait(Ended(reason, error))
        self.begun.set()
        return True

    async def outputs(self) -> AsyncGenerator[TokenOut | Ended, None]:
        """Everything that happens, `Ended` last."""
        while True:
            event = await self.events.get()
            yield event
            if isinstance(event, Ended):
                return

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values()) if self.cached else 0
