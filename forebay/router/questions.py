"""What is asked of a worker's `/tokenize` for a request: everything in its body that changes its prompt's tokens.

    completions   prompt, add_special_tokens
    chats         messages, tools, and (vLLM alone takes these) the template, its arguments and what opens the answer

Our front ends refuse fields that they don't know, so they are asked with those that they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

_VLLM_CHAT = (
    "chat_template", "add_generation_prompt", "continue_final_message", "add_special_tokens", "mm_processor_kwargs",
    "media_io_kwargs",
)  # fmt: skip
_VLLM_ARGUMENTS = ("documents", "reasoning_effort")
"""vLLM hands these to a chat's template; its /tokenize takes them as arguments of the template alone."""
_END = b"\x1e"
"""Behind each message of a text; no JSON has it."""


class Ends(NamedTuple):
    """Bodies that ask for the end of a known text, and for that end gone on."""

    old: bytes
    new: bytes


@dataclass(frozen=True)
class Question:
    """One prompt to tokenise: `fields`, and what grows from one request to the next, a text or a list of messages."""

    fields: dict[str, Any]
    grows: str | list[Any]

    @property
    def body(self) -> bytes:
        """Asks for the whole."""
        return self._asking(self.grows)

    def text(self, who: str) -> bytes:
        """What it is known by, to `who` alone. One that goes on from another begins with the other's bytes."""
        return self._head(who) + (
            self.grows.encode() if isinstance(self.grows, str) else b"".join(map(_message, self.grows))
        )

    def ends(self, who: str, known: int, least: int) -> Ends | None:
        """To ask what this goes on with behind `known` bytes of its text, with at least `least` before that place.
        None if the text can't be cut there so that it pays."""
        head = len(self._head(who))
        if isinstance(self.grows, str):
            ends = self._text_ends(self.grows.encode(), known - head, least)
        else:
            ends = self._chat_ends([_message(one) for one in self.grows], known - head, least)
        return ends if ends is not None and 2 * (len(ends.old) + len(ends.new)) <= known else None

    def _text_ends(self, data: bytes, known: int, least: int) -> Ends | None:
        start = known - least
        while 0 < start < known and data[start] & 0xC0 == 0x80:
            start += 1  # in the middle of a character
        if start <= 0:
            return None
        alone = {"add_special_tokens": False}
        return Ends(*(self._asking(data[start:end].decode(), alone) for end in (known, len(data))))

    def _chat_ends(self, messages: list[bytes], known: int, least: int) -> Ends | None:
        """Cut before a user's message, where templates can begin. (Never before the first, so a system's stays.)"""
        assert isinstance(self.grows, list)
        at, count = 0, 0
        while at < known:
            at, count = at + len(messages[count]), count + 1
        size = 0
        for start in range(count - 1, 0, -1):
            size += len(messages[start])
            if size >= least and self.grows[start].get("role") == "user":
                return Ends(self._asking(self.grows[start:count]), self._asking(self.grows[start:]))
        return None

    def _head(self, who: str) -> bytes:
        return msgspec.json.encode([who, isinstance(self.grows, str), self.fields]) + _END

    def _asking(self, grows: str | list[Any], more: Mapping[str, Any] | None = None) -> bytes:
        name = "prompt" if isinstance(grows, str) else "messages"
        return msgspec.json.encode({**self.fields, name: grows, **(more or {})})


def chat_question(body: Mapping[str, Any], model: str, *, ours: bool) -> Question | None:
    """For `/v1/chat/completions`; None without messages. `ours`: the worker's front end is Forebay's."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return None
    fields: dict[str, Any] = {"model": model}
    if body.get("tools") and not (ours and body.get("tool_choice") == "none"):
        fields["tools"] = body["tools"]
    if ours:
        return Question(fields, messages)
    fields |= {name: body[name] for name in _VLLM_CHAT if body.get(name) is not None}
    arguments = {name: body[name] for name in _VLLM_ARGUMENTS if body.get(name) is not None}
    if "reasoning_effort" in arguments:
        arguments["enable_thinking"] = arguments["reasoning_effort"] != "none"
    given = body.get("chat_template_kwargs")
    arguments |= given if isinstance(given, dict) else {}
    return Question(fields | ({"chat_template_kwargs": arguments} if arguments else {}), messages)


def completion_question(body: Mapping[str, Any], prompt: str, model: str, *, ours: bool) -> Question:
    """For one text of `/v1/completions`."""
    special = None if ours else body.get("add_special_tokens")
    return Question({"model": model} | ({} if special is None else {"add_special_tokens": special}), prompt)


def _message(one: Any) -> bytes:
    return msgspec.json.encode(one) + _END
