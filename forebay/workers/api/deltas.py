"""From a call's tokens to text as clients see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from forebay.workers.api.calls import Call, Ended
from forebay.workers.api.errors import ApiError, bad, busy, unavailable
from forebay.workers.api.link import BUSY, RETRY_AFTER_S, WorkerLink
from forebay.workers.api.stops import StopFinder
from forebay.workers.api.text import Codec
from forebay.workers.protocol import TokenOut

ClientFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one or several tokens add. `finish` is set on the last one. A `silent` one was said elsewhere already."""

    text: str
    tokens: tuple[TokenOut, ...] = ()
    finish: ClientFinish | None = None
    silent: bool = False


@dataclass
class Choice:
    """One choice of one prompt: its call, and how its tokens become text. `leader` is the first choice of the
    same prompt: with its first token the others begin, and find the prompt computed. `resumed` are tokens that the
    client has: they make text as ever, for what follows them, but aren't said again."""

    index: int
    call: Call
    link: WorkerLink
    codec: Codec
    stops: list[str]
    eos_ids: frozenset[int]
    leader: Call
    produced: int = 0
    resumed: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        return self.call is self.leader

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Every token as it comes. Raises ApiError if the generation fails; cancels it if left early."""
        decoder, finder = self.codec.decoder(), StopFinder(self.stops)
        try:
            for token in self.resumed:
                self.produced += 1
                ends = token in self.eos_ids and not self.call.sampling.ignore_eos
                finder.feed("" if ends else decoder.feed([token]))
                finish = self._resumed_finish(ends or finder.stopped)
                out = TokenOut(self.call.id, 0, self.produced - 1, token)
                yield Delta("", (out,), silent=True)
                if finish is not None:
                    # Its worker died between the last token and the end.
                    yield Delta("" if finder.stopped else finder.feed(decoder.flush()) + finder.flush(), finish=finish)
                    return
            await self._begin()
            async with aclosing(self.call.outputs()) as outputs:
                async for event in outputs:
                    if isinstance(event, Ended):
                        text = finder.feed(decoder.flush())
                        text += finder.flush()
                        yield Delta(text, finish=_finish(event, finder.stopped))
                        return
                    self.produced += 1
                    ends = event.token in self.eos_ids and not self.call.sampling.ignore_eos
                    text = finder.feed("" if ends else decoder.feed([event.token]))
                    if finder.stopped:
                        yield Delta(text, (event,), "stop")
                        return
                    yield Delta(text, (event,))
        finally:
            self.link.stop(self.call)

    def _resumed_finish(self, stopped: bool) -> ClientFinish | None:
        if stopped:
            return "stop"
        return "length" if self.produced >= self.call.sampling.max_tokens else None

    async def _begin(self) -> None:
        if not self.leads:
            await self.leader.begun.wait()
            self.link.release(self.call)


def _finish(ended: Ended, stopped: bool) -> ClientFinish:
    if stopped or ended.reason == "stop":
        return "stop"
    if ended.reason == "length":
        return "length"
    raise failure(ended)


def failure(ended: Ended) -> ApiError:
    """What a worker's refusal or failure is in HTTP's terms."""
    if ended.error == BUSY:
        return busy("the worker's queue is full; try again later", RETRY_AFTER_S)
    if ended.reason == "cancelled" or ended.error.startswith("no worker"):
        return unavailable(ended.error or "the worker gave this request up; try again")
    return bad(ended.error or "the worker can't answer this request")
