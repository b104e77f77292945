"""Tools of one chat: which may be called, whether one must be, and where the calls are in the answer's text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from forebay.workers.api.bodies import MAX_TOOLS, ChatBody
from forebay.workers.api.errors import bad
from forebay.workers.api.stops import overlap
from forebay.workers.api.tool_formats import Schemas, ToolCall, ToolFormat, written


@dataclass(frozen=True)
class Found:
    """What some text comes to: text for the client, and whole calls."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class ToolUse:
    """What a chat says of tools. `forced` is the schema that the whole answer must have, if a call must be made;
    `only` the one function that may be called then."""

    schemas: Schemas
    shown: bool
    forced: dict[str, Any] | None = None
    only: str = ""
    several: bool = True


def tools_of(body: ChatBody, *, known: bool) -> ToolUse | None:
    """The tools of a chat, None if there are none. `known`: the model has a way to call them. Raises ApiError 400."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice asks for a call, but there are no tools", "tool_choice")
        return None
    schemas = _schemas(body)
    several = body.parallel_tool_calls is not False
    if choice == "none":
        return ToolUse(schemas, shown=False)
    if not known:
        raise bad(
            "this model's chat template knows no tools; leave them out, or serve a model that was trained for them "
            "(or name its format with --tool-call-parser)", "tools",
        )  # fmt: skip
    if choice in (None, "auto"):
        return ToolUse(schemas, shown=True, several=several)
    if choice == "required":
        return ToolUse(schemas, shown=True, forced=_any_call(schemas, several), several=several)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = str(function.get("name")) if isinstance(function, dict) else ""
    if name not in schemas:
        raise bad("tool_choice takes none, auto, required, or a function of tools", "tool_choice")
    return ToolUse(schemas, shown=True, forced=dict(schemas[name]), only=name)


def _schemas(body: ChatBody) -> Schemas:
    tools = body.tools or []
    schemas: dict[str, dict[str, Any]] = {}
    for tool in tools:
        if tool.type != "function" or not tool.function.name or tool.function.name in schemas:
            raise bad("tools takes entries of type function, each with a name of its own", "tools")
        schemas[tool.function.name] = tool.function.parameters or {"type": "object"}
    if len(schemas) > MAX_TOOLS:
        raise bad(f"tools has {len(schemas)} entries; it takes up to {MAX_TOOLS}", "tools")
    return schemas


def _any_call(schemas: Schemas, several: bool) -> dict[str, Any]:
    """A list of calls, each of one of the functions."""
    calls = [
        {
            "type": "object", "properties": {"name": {"const": name}, "parameters": schema},
            "required": ["name", "parameters"], "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]  # fmt: skip
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1} | ({} if several else {"maxItems": 1})


@dataclass
class ToolFinder:
    """Takes calls out of an answer's text as it comes. What could be the beginning of a mark is held back; what isn't
    a call of a function that there is stays text."""

    way: ToolFormat
    use: ToolUse
    calls: int = 0
    _held: str = field(default="")
    _inside: bool = False
    _text_began: bool = False

    def feed(self, text: str) -> Found:
        """What can be told now."""
        self._held += text
        if not self.way.opens:
            return self._feed_whole()
        told, calls = "", list[ToolCall]()
        while True:
            if not self._inside:
                told += self._before(self.way.opens)
                if not self._inside:
                    return Found(told, tuple(calls))
            body, closes, rest = self._held.partition(self.way.closes)
            if not closes:
                return Found(told, tuple(calls))
            self._inside, self._held = False, rest
            found = self._read(body)
            calls += found or ()
            told += self.way.opens + body + closes if found is None else ""

    def flush(self) -> Found:
        """The answer has ended."""
        held, self._held = self._held, ""
        whole = not self.way.opens and not self._text_began
        if not self._inside and not whole:
            return Found(self._shown(held))
        self._inside = False
        found = self._read(self._clean(held) if whole else held)
        return Found(self._shown(self.way.opens + held)) if found is None else Found(calls=tuple(found))

    def _feed_whole(self) -> Found:
        """A format without marks: all of the answer is calls if it begins with an object."""
        if self._inside:
            return Found()
        begun = self._clean(self._held).lstrip()
        self._inside = not self._text_began and begun[:1] == "{"
        undecided = begun[:1] in ("", "{") or any(around.startswith(begun) for around in self.way.around)
        if not self._text_began and undecided:
            return Found()
        self._text_began = True
        return Found(self._ready(""))

    def _before(self, mark: str) -> str:
        """Text before `mark`, which is taken out; without it, what can't be the beginning of any mark."""
        before, found, rest = self._held.partition(mark)
        if found:
            self._inside, self._held = True, rest
            return self._shown(before)
        ready = self._ready(mark)
        if not self._text_began and not ready.strip():
            self._held = ready + self._held  # nothing but space before a call is no text
            return ""
        return self._shown(ready)

    def _ready(self, mark: str) -> str:
        """Takes out of what is held all that can't be the beginning of any mark, those around calls left out."""
        self._held = self._clean(self._held)
        keep = max(overlap(self._held, other) for other in (mark, *self.way.around))
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready

    def _shown(self, text: str) -> str:
        text = self._clean(text)
        if not self._text_began and not text.strip():
            return ""
        self._text_began = True
        # Space after a call belongs to the calls.
        return text if text.strip() or not self.calls else ""

    def _clean(self, text: str) -> str:
        for around in self.way.around:
            text = text.replace(around, "")
        return text

    def _read(self, body: str) -> list[ToolCall] | None:
        found = self.way.read(body.strip(), self.use.schemas)
        if not found or not all(call.name in self.use.schemas for call in found):
            return None
        if not self.use.several:
            found = found[: 1 - min(self.calls, 1)]
        self.calls += len(found)
        return found


@dataclass
class ForcedFinder:
    """An answer that must be a call: its whole text is the arguments, or a list of calls."""

    use: ToolUse
    calls: int = 0
    _text: str = ""

    def feed(self, text: str) -> Found:
        """Nothing is a call before its end."""
        self._text += text
        return Found()

    def flush(self) -> Found:
        """The answer has ended. What was cut off in its middle is text."""
        try:
            made = json.loads(self._text)
            calls = [ToolCall(self.use.only, written(made))] if self.use.only else [
                ToolCall(call["name"], written(call["parameters"])) for call in made
            ]  # fmt: skip
        except (ValueError, RecursionError, LookupError, TypeError):
            return Found(self._text)
        self.calls = len(calls)
        return Found(calls=tuple(calls))
