"""From a call's tokens to text as clients see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from forebay.workers.api.calls import Call, Ended
from forebay.workers.api.errors import ApiError, bad, busy, unavailable
from forebay.workers.api.fleet import RETRY_AFTER_S, Fleet
from forebay.workers.api.stops import StopFinder
from forebay.workers.api.text import Codec, Decoder
from forebay.workers.api.tool_formats import ToolCall
from forebay.workers.api.tools import ForcedFinder, Found, ToolFinder
from forebay.workers.protocol import BUSY, NO_NUMBER, TokenOut

ClientFinish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one or several tokens add. `finish` is set on the last one. A `silent` one was said elsewhere already.
    `calls` are whole calls of tools."""

    text: str
    tokens: tuple[TokenOut, ...] = ()
    finish: ClientFinish | None = None
    silent: bool = False
    calls: tuple[ToolCall, ...] = ()


@dataclass
class Choice:
    """One choice of one prompt: its call, and how its tokens become text. `leader` is the first choice of the
    same prompt: with its first token the others begin, and find the prompt computed. `resumed` are tokens that the
    client has: they make text as ever, for what follows them, but aren't said again. `ends` are the tokens that end
    it, `tools` looks for calls, and `marks` are special tokens that are seen as text."""

    index: int
    call: Call
    fleet: Fleet
    codec: Codec
    stops: list[str]
    ends: frozenset[int]
    leader: Call
    produced: int = 0
    resumed: tuple[int, ...] = ()
    tools: ToolFinder | ForcedFinder | None = None
    marks: Mapping[int, str] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        return self.call is self.leader

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Every token as it comes. Raises ApiError if the generation fails; cancels it if left early."""
        decoder, finder = self.codec.decoder(), StopFinder(self.stops)
        try:
            for token in self.resumed:
                self.produced += 1
                found = self._find(finder.feed(self._text(decoder, token), may_stop=self._may_stop))
                finish = self._resumed_finish(token in self.ends or finder.stopped)
                out = TokenOut(self.call.id, 0, self.produced - 1, token)
                yield Delta(found.text, (out,), silent=True, calls=found.calls)
                if finish is not None:
                    # Its worker died between the last token and the end.
                    yield self._last("" if finder.stopped else finder.feed(decoder.flush()) + finder.flush(), finish)
                    return
            await self._begin()
            async with aclosing(self.call.outputs()) as outputs:
                async for event in outputs:
                    if isinstance(event, Ended):
                        finish = _finish(event, finder.stopped)
                        yield self._last(finder.feed(decoder.flush()) + finder.flush(), finish)
                        return
                    self.produced += 1
                    text = finder.feed(self._text(decoder, event.token), may_stop=self._may_stop)
                    if finder.stopped:
                        yield self._last(text, "stop", (event,))
                        return
                    found = self._find(text)
                    yield Delta(found.text, (event,), calls=found.calls)
        finally:
            self.fleet.stop(self.call)

    @property
    def _may_stop(self) -> bool:
        return self.produced >= self.call.sampling.min_tokens

    def _text(self, decoder: Decoder, token: int) -> str:
        if token in self.ends:
            return ""
        if token in self.marks:
            return decoder.flush() + self.marks[token]
        return decoder.feed([token])

    def _find(self, text: str) -> Found:
        return Found(text) if self.tools is None else self.tools.feed(text)

    def _last(self, text: str, finish: ClientFinish, tokens: tuple[TokenOut, ...] = ()) -> Delta:
        """The end of the answer, with all that was held back."""
        if self.tools is None:
            return Delta(text, tokens, finish)
        found, rest = self.tools.feed(text), self.tools.flush()
        if finish == "stop" and self.tools.calls:
            finish = "tool_calls"
        return Delta(found.text + rest.text, tokens, finish, calls=found.calls + rest.calls)

    def _resumed_finish(self, stopped: bool) -> ClientFinish | None:
        if stopped:
            return "stop"
        return "length" if self.produced >= self.call.sampling.max_tokens else None

    async def _begin(self) -> None:
        if not self.leads:
            await self.leader.begun.wait()
            self.fleet.release(self.call)


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
    if ended.error.startswith(NO_NUMBER):
        return ApiError(500, ended.error, kind="server_error")
    return bad(ended.error or "the worker can't answer this request")
