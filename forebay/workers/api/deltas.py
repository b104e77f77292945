"""From a call's tokens to text as clients see it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from forebay.models.tokenizer import Tokenizer
from forebay.workers.api.calls import Call, Ended
from forebay.workers.api.errors import ApiError, bad, busy, unavailable
from forebay.workers.api.link import RETRY_AFTER_S, WorkerLink
from forebay.workers.api.stops import StopFinder
from forebay.workers.protocol import TokenOut

ClientFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one or several tokens add. `finish` is set on the last one."""

    text: str
    tokens: tuple[TokenOut, ...] = ()
    finish: ClientFinish | None = None


@dataclass
class Choice:
    """One choice: its call, its text so far, and where its stop strings are."""

    index: int
    call: Call
    link: WorkerLink
    tokenizer: Tokenizer
    stops: list[str]
    eos_ids: frozenset[int]
    produced: int = field(default=0)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every token as it comes. Raises ApiError if the generation fails; cancels it if left early."""
        decoder, finder = self.tokenizer.decoder(), StopFinder(self.stops)
        try:
            while True:
                event = await self.call.events.get()
                if isinstance(event, Ended):
                    text = finder.feed(decoder.flush()) + finder.flush()
                    yield Delta(text, finish=_finish(event, finder.stopped))
                    return
                self.produced += 1
                ends = event.token in self.eos_ids and not self.call.sampling.ignore_eos
                text = finder.feed("" if ends else decoder.feed([event.token]))
                if finder.stopped:
                    self.link.stop(self.call)
                    yield Delta(text, (event,), "stop")
                    return
                yield Delta(text, (event,))
        finally:
            self.link.stop(self.call)


def _finish(ended: Ended, stopped: bool) -> ClientFinish:
    if stopped or ended.reason == "stop":
        return "stop"
    if ended.reason == "length":
        return "length"
    raise failure(ended.error or ended.reason)


def failure(error: str) -> ApiError:
    """What a worker's refusal or failure is in HTTP's terms."""
    if error == "busy":
        return busy("the worker's queue is full; try again later", RETRY_AFTER_S)
    if error.startswith("no worker"):
        return unavailable(error)
    return bad(error)
