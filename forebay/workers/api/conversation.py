"""Messages as a chat template takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.workers.api.bodies import MAX_MESSAGES, CalledTool, ChatMessage, Tool
from forebay.workers.api.errors import bad


def messages_of(messages: list[ChatMessage] | None) -> list[dict[str, Any]]:
    """Messages in the form that templates of published models expect: texts, tool calls with their arguments as
    objects, and tools' answers. Raises ApiError 400."""
    if not messages or len(messages) > MAX_MESSAGES:
        raise bad(f"messages has {len(messages or ())} entries; it takes 1 to {MAX_MESSAGES}", "messages")
    told = []
    for number, message in enumerate(messages):
        entry: dict[str, Any] = {"role": message.role, "content": _text_of(message.content, number)}
        if message.tool_calls:
            entry["tool_calls"] = [_call(call, number) for call in message.tool_calls]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            entry["name"] = message.name
        told.append(entry)
    return told


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates show them to a model."""
    found: list[dict[str, Any]] = []
    for tool in tools:
        function = {"name": tool.function.name, "description": tool.function.description or ""}
        found.append(
            {"type": "function", "function": function | {"parameters": tool.function.parameters or {"type": "object"}}}
        )
    return found


def _call(call: CalledTool, number: int) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        told = f"messages[{number}]: the arguments of {call.function.name!r} are no JSON object"
        raise bad(told, "messages") from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _text_of(content: str | list[dict[str, Any]] | None, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad(f"messages[{number}]: content takes text, or parts of type text", "messages")
        parts.append(part["text"])
    return "".join(parts)
