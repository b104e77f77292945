"""One generation as the front end sees it: its tokens, its attempts, and what it still waits for."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from forebay.errors import ProtocolError
from forebay.kvstore.identity import pack_tokens
from forebay.workers.protocol import FinishReason, Generate, Sampling, TokenOut, TokenScore


@dataclass(frozen=True, slots=True)
class Ended:
    """A generation is over."""

    reason: FinishReason
    error: str = ""


@dataclass(eq=False)
class Call:
    """A generation under way. `emitted` is its whole state: a successor of its worker is fed these ids.

    `events` is bounded by `max_tokens`: every entry but the last is one token. A `held` call isn't sent yet.
    `begun` is set with the first token, or the end. A `settled` one ends when the store has what it computed.
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
    attempt: int = 0
    born: float = field(default_factory=time.monotonic)
    emitted: array[int] = field(default_factory=lambda: array("I"))
    events: asyncio.Queue[TokenOut | Ended] = field(default_factory=asyncio.Queue)
    cached: dict[str, int] | None = None
    scores: dict[int, TokenScore] = field(default_factory=dict)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    turned_away_at: float | None = None

    def request(self) -> Generate:
        """The message that starts the next attempt."""
        self.attempt += 1
        return Generate(
            id=self.id, attempt=self.attempt, prompt=self.prompt, sampling=self.sampling,
            emitted=pack_tokens(self.emitted), salt=self.salt, tenant=self.tenant,
            retain_s=self.retain_s, settled=self.settled, priority=self.priority,
            waited_s=time.monotonic() - self.born if self.attempt > 1 else 0.0,
        )  # fmt: skip

    def began(self, attempt: int, cached: dict[str, int]) -> None:
        """The worker knows what was cached. Only the first attempt counts: later ones find their own work."""
        if attempt == self.attempt and self.cached is None:
            self.cached = cached

    def scored(self, attempt: int, start: int, scores: list[TokenScore]) -> None:
        """How likely the prompt's tokens from `start` on were. Of several attempts the last one is right as well."""
        if attempt == self.attempt:
            self.scores.update(enumerate(scores, start))

    def token(self, out: TokenOut) -> None:
        """A token of some attempt. Output of a dead attempt, and what was emitted already, is dropped.

        Raises ProtocolError if tokens are missing: another attempt, on another connection, will have them.
        """
        if self.ended or out.attempt != self.attempt or out.index < len(self.emitted):
            return
        if out.index > len(self.emitted):
            raise ProtocolError(f"token {out.index} came where {len(self.emitted)} was due")
        self.emitted.append(out.token)
        self.turned_away_at = None
        self.events.put_nowait(out)
        self.begun.set()

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
