"""Answers in OpenAI's shapes: whole and streamed, completions and chat."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from forebay.workers.api.deltas import Delta
from forebay.workers.api.text import Codec
from forebay.workers.api.tool_formats import ToolCall
from forebay.workers.protocol import TokenOut, TokenScore

DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass(frozen=True)
class Usage:
    """Token counts of one request, over all its choices."""

    prompt: int
    completion: int
    cached: int

    def body(self) -> dict[str, Any]:
        """As `usage` shows it."""
        return {
            "prompt_tokens": self.prompt, "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }  # fmt: skip


@dataclass
class Gathered:
    """A whole choice, for answers that aren't streamed. `prompt` and `scores` are its prompt's ids, and how likely
    those from the second on were, if that was asked for."""

    text: str = ""
    tokens: list[TokenOut] = field(default_factory=list)
    finish: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    prompt: Sequence[int] = ()
    scores: Sequence[TokenScore] = ()

    @property
    def likelihood(self) -> float:
        """Mean logprob of its tokens: which of several answers is the best."""
        logprobs = [out.logprob for out in self.tokens if out.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")

    def add(self, delta: Delta) -> None:
        """Append what came."""
        self.text += delta.text
        self.tokens.extend(delta.tokens)
        self.calls.extend(delta.calls)
        self.finish = delta.finish or self.finish


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """A first chunk of a streamed choice, if this endpoint has one."""

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """One streamed chunk."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, if usage was asked for."""

    def whole(self, choices: Sequence[Gathered], usage: Usage) -> dict[str, Any]:
        """The whole answer."""


@dataclass
class Frame:
    """What all chunks of one answer share."""

    id: str
    model: str
    codec: Codec
    logprobs: int | None
    token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The envelope."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}


def _by_name(codec: Codec, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Alternatives by their text; tokens of the same text are told apart by their ids."""
    named: dict[str, float] = {}
    for token, value in top:
        text = codec.token(token)
        named[text if text not in named else f"{text}#{token}"] = value
    return named


def _prompt_scores(codec: Codec, got: Gathered) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: for each token of the prompt the likeliest and itself, by id; the first has none."""
    told: list[dict[str, Any] | None] = [None]
    for token, scored in zip(got.prompt[1:], got.scores, strict=False):
        entry = {
            str(other): {"logprob": value, "rank": rank, "decoded_token": codec.token(other)}
            for rank, (other, value) in enumerate(scored.top, 1)
        }
        entry[str(token)] = {"logprob": scored.logprob, "rank": scored.rank, "decoded_token": codec.token(token)}
        told.append(entry)
    return told


@dataclass
class CompletionShape(Shape):
    """`/v1/completions`. Keeps each choice's text offset, which its logprobs count from. With `echo` the prompt comes
    before the answer, `prompt_logprobs` tells of it."""

    frame: Frame
    echo: bool = False
    prompt_logprobs: bool = False
    offsets: dict[int, int] = field(default_factory=dict)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        return self.frame.around("text_completion", [self._choice(index, delta.text, delta.tokens, delta.finish)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self.frame.around("text_completion", [], usage=usage.body())

    def whole(self, choices: Sequence[Gathered], usage: Usage) -> dict[str, Any]:
        listed = list(map(self._whole, range(len(choices)), choices))
        return self.frame.around("text_completion", listed, usage=usage.body())

    def _whole(self, index: int, got: Gathered) -> dict[str, Any]:
        codec = self.frame.codec
        text, tokens = got.text, got.tokens
        if self.echo:
            text = codec.decode(got.prompt) + text
            tokens = [*_as_outputs(got), *tokens]
        choice = self._choice(index, text, tokens, got.finish)
        if self.echo and self.frame.logprobs is not None and got.prompt:
            choice["logprobs"]["top_logprobs"][0] = None
        if self.echo and self.frame.token_ids:
            choice["token_ids"] = [out.token for out in got.tokens]
        if self.prompt_logprobs:
            choice["prompt_logprobs"] = _prompt_scores(codec, got)
        return choice

    def _choice(self, index: int, text: str, tokens: Sequence[TokenOut], finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
        if self.frame.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, tokens)
        if self.frame.token_ids:
            choice["token_ids"] = [out.token for out in tokens]
        return choice

    def _logprobs(self, index: int, tokens: Sequence[TokenOut]) -> dict[str, Any]:
        name = self.frame.codec.token
        texts = [name(out.token) for out in tokens]
        offset, offsets = self.offsets.get(index, 0), []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self.offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [out.logprob for out in tokens],
            "top_logprobs": [_by_name(self.frame.codec, out.top) for out in tokens],
            "text_offset": offsets,
        }


def _as_outputs(got: Gathered) -> list[TokenOut]:
    """A prompt's tokens in the form of an answer's."""
    first = [TokenOut("", 0, 0, got.prompt[0])] if got.prompt else []
    rest = zip(got.prompt[1:], got.scores, strict=False)
    return first + [TokenOut("", 0, 0, token, scored.logprob, scored.top) for token, scored in rest]


@dataclass
class ChatShape(Shape):
    """`/v1/chat/completions`. `called` counts each choice's calls of tools so far."""

    frame: Frame
    prompt_logprobs: bool = False
    called: dict[int, int] = field(default_factory=dict)

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return self.frame.around(
            "chat.completion.chunk", [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        )

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text} if delta.text or not (delta.finish or delta.calls) else {}
        if delta.calls:
            first = self.called.get(index, 0)
            self.called[index] = first + len(delta.calls)
            content["tool_calls"] = [{"index": at, **_call(call)} for at, call in enumerate(delta.calls, first)]
        choice = {
            "index": index, "delta": content, "logprobs": self._logprobs(delta.tokens), "finish_reason": delta.finish,
        }  # fmt: skip
        if self.frame.token_ids:
            choice["token_ids"] = [out.token for out in delta.tokens]
        return self.frame.around("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self.frame.around("chat.completion.chunk", [], usage=usage.body())

    def whole(self, choices: Sequence[Gathered], usage: Usage) -> dict[str, Any]:
        listed = []
        for index, got in enumerate(choices):
            message: dict[str, Any] = {"role": "assistant", "content": got.text, "refusal": None}
            if got.calls:
                message |= {"content": got.text or None, "tool_calls": list(map(_call, got.calls))}
            choice = {
                "index": index, "message": message, "logprobs": self._logprobs(got.tokens), "finish_reason": got.finish,
            }  # fmt: skip
            if self.frame.token_ids:
                choice["token_ids"] = [out.token for out in got.tokens]
            listed.append(choice)
        body = self.frame.around("chat.completion", listed, usage=usage.body())
        if self.prompt_logprobs:
            body["prompt_logprobs"] = _prompt_scores(self.frame.codec, choices[0])
        return body

    def _logprobs(self, tokens: Sequence[TokenOut]) -> dict[str, Any] | None:
        if self.frame.logprobs is None:
            return None
        return {"content": [self._entry(out.token, out.logprob, out.top) for out in tokens], "refusal": None}

    def _entry(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]] | None) -> dict[str, Any]:
        text = self.frame.codec.token(token)
        entry: dict[str, Any] = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        if top is not None:
            entry["top_logprobs"] = [self._entry(other, value, None) for other, value in top]
        return entry


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
