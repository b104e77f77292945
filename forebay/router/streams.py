"""A streamed answer on its way through: what the client has, so that another worker can go on from it.

Every chunk is read. What was asked for on the router's own account (token ids, usage) is taken out again, and all
chunks keep the name of the first one, whoever sends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
EVENT_BYTES_MAX = 16 << 20


class StreamBroken(Exception):
    """The worker said that it can't go on; its error, for the client if nobody else can."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message")))
        self.error = error


@dataclass
class Patience:
    """How long a stream that broke off is tried elsewhere: so many failures, or so many seconds, in which nothing was
    added to it. A refusal of a worker that is full counts by time alone."""

    most: int
    most_s: float
    failures: int = 0
    since: float | None = None
    progress: int = 0

    def lasts(self, progress: int, now: float, *, full: bool) -> bool:
        """It broke off, having come so far. May it be tried again?"""
        if self.since is None or progress > self.progress:
            self.failures, self.since, self.progress = 0, now, progress
        self.failures += not full
        return self.failures <= self.most and now - self.since < self.most_s


class SseParser:
    """Server-sent events out of parts of a body: the data of each."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The events that are complete with this part."""
        *whole, self._rest = (self._rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise StreamBroken({"message": "an event is too long", "type": "server_error", "param": None, "code": None})
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


@dataclass
class Relay:
    """One client's stream, over all workers that produce it. `emitted` are token ids a choice, in the order of the
    choices' numbers; `cached` and `prompt` come with the usage."""

    choices: int
    wants_ids: bool
    wants_usage: bool
    emitted: list[list[int]] = field(init=False)
    finished: set[int] = field(default_factory=set)
    begun: bool = False
    counted: bool = True
    done: bool = False
    cached: int | None = None
    prompt_tokens: int = 0
    opened: set[int] = field(default_factory=set)
    _name: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.emitted = [[] for _ in range(self.choices)]

    @property
    def progress(self) -> int:
        """Grows with all that is added."""
        return sum(map(len, self.emitted)) + len(self.finished)

    @property
    def resumable(self) -> bool:
        """Is all that was said known by its tokens?"""
        return self.counted and not self.done

    def pass_on(self, data: bytes) -> bytes | None:
        """What the client gets for one event; None for nothing. Raises StreamBroken."""
        if data == b"[DONE]":
            self.done = True
            return DONE
        chunk = _read(data)
        if isinstance(chunk.get("error"), dict):
            raise StreamBroken(chunk["error"])
        self._count(chunk.get("usage"))
        choices = chunk.get("choices")
        if not choices:
            return _event(self._named(chunk)) if self.wants_usage and chunk.get("usage") else None
        kept = [choice for choice in choices if self._take(choice)]
        if not kept:
            return None
        chunk["choices"] = kept
        if not self.wants_usage:
            chunk.pop("usage", None)
        self.begun = True
        return _event(self._named(chunk))

    def _take(self, choice: dict[str, Any]) -> bool:
        """Note what a choice adds; False if the client has it already."""
        number = choice.get("index", 0)
        if not 0 <= number < self.choices or number in self.finished:
            return False
        delta = choice.get("delta") or {}
        # Content, but also calls of tools, reasoning, and whatever else engines stream; a role alone is an opening.
        said = bool(choice.get("text") or any(value for name, value in delta.items() if name != "role"))
        ids = choice.get("token_ids")
        if not self.wants_ids:
            choice.pop("token_ids", None)
        if isinstance(ids, list):
            self.emitted[number] += ids
        elif said:
            self.counted = False
        if not said and not ids and not choice.get("finish_reason"):
            first = number not in self.opened
            self.opened.add(number)
            return first  # the opening of a chat, which a second worker repeats
        if choice.get("finish_reason"):
            self.finished.add(number)
        return True

    def _count(self, usage: object) -> None:
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.prompt_tokens = count_of(usage.get("prompt_tokens"))
            if isinstance(details, dict) and self.cached is None:
                self.cached = count_of(details.get("cached_tokens"))

    def _named(self, chunk: dict[str, Any]) -> dict[str, Any]:
        self._name = self._name or {key: chunk[key] for key in ("id", "created", "model") if key in chunk}
        return chunk | self._name


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def count_of(told: object) -> int:
    """A count that a worker tells; 0 for what is none."""
    return told if isinstance(told, int) and told > 0 else 0


def _read(data: bytes) -> dict[str, Any]:
    """An event of the shape that is relied on here. Raises StreamBroken for another one."""
    try:
        chunk = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        chunk = None
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    if not isinstance(chunk, dict) or not isinstance(choices, list | None) or not all(map(_is_choice, choices or ())):
        raise StreamBroken({"message": "an event can't be read", "type": "server_error", "param": None, "code": None})
    return chunk


def _is_choice(choice: object) -> bool:
    if not isinstance(choice, dict) or not isinstance(choice.get("index", 0), int):
        return False
    ids = choice.get("token_ids")
    good_ids = not isinstance(ids, list) or all(isinstance(token, int) for token in ids)
    return good_ids and isinstance(choice.get("delta"), dict | None)
