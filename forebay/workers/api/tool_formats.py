"""How model families write a call of a tool, each read from the text between two marks.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>               Qwen2.5, Qwen3, Hermes
    llama3_json  {"name": ..., "parameters": {...}}, several with ; between             Llama 3.1 and later
    glm45        <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>   GLM-4.5 and later
    minimax_m2   <minimax:tool_call><invoke name="..."><parameter name="...">V</parameter></invoke></minimax:tool_call>
    deepseek_v3  <|tool_call_begin|>[function<|tool_sep|>]NAME ...{...}<|tool_call_end|>, in its own characters
    openai       <|channel|>commentary to=functions.NAME ...<|message|>{...}<|call|>    gpt-oss

What can't be read as a call is text: no format ever drops what a model said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"[\w.\-]{1,256}")

Schemas = Mapping[str, Mapping[str, Any]]
"""Each function's JSON schema of its parameters, by name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: a function's name, and its arguments as a JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's way. A call begins after `opens` and ends before `closes` or with the answer; `around` is left out of
    the text. With no `opens`, the whole answer is a call if it begins as JSON does. `read` gives None for what is no
    call. `marks` are special tokens that have to be seen."""

    name: str
    opens: str
    closes: str
    read: Callable[[str, Schemas], list[ToolCall] | None]
    around: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _named(found: dict[str, Any] | None, key: str) -> ToolCall | None:
    """A call from an object with a name and arguments under `key`."""
    if found is None or not isinstance(found.get("name"), str):
        return None
    arguments = found.get(key, {})
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = _object(arguments)
    return ToolCall(found["name"], written(arguments)) if isinstance(arguments, dict) else None


def written(arguments: Mapping[str, Any]) -> str:
    """Arguments as clients get them."""
    return json.dumps(arguments, ensure_ascii=False)


def _hermes(body: str, schemas: Schemas) -> list[ToolCall] | None:
    call = _named(_object(body), "arguments")
    return None if call is None else [call]


def _llama(body: str, schemas: Schemas) -> list[ToolCall] | None:
    decoder, calls, at = json.JSONDecoder(), list[ToolCall](), 0
    while at < len(body):
        try:
            found, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        call = _named(found, "parameters" if "parameters" in found else "arguments")
        if call is None:
            return None
        calls.append(call)
        between = re.compile(r"\s*;?\s*").match(body, end)
        at = between.end() if between is not None else end
    return calls or None


def _glm(body: str, schemas: Schemas) -> list[ToolCall] | None:
    name, rest = body.partition("<arg_key>")[0].strip(), body
    keys, values = _between(rest, "<arg_key>", "</arg_key>"), _between(rest, "<arg_value>", "</arg_value>")
    if not _NAME.fullmatch(name) or len(keys) != len(values) or ("<arg_key>" in rest and not keys):
        return None
    schema = schemas.get(name, {})
    arguments = {key.strip(): _value(schema, key.strip(), text) for key, text in zip(keys, values, strict=True)}
    return [ToolCall(name, written(arguments))]


def _minimax(body: str, schemas: Schemas) -> list[ToolCall] | None:
    calls = []
    for invoked in _between(body, "<invoke name=", "</invoke>"):
        name, _, inside = invoked.partition(">")
        schema, arguments = schemas.get(name.strip('"'), {}), {}
        for given in _between(inside, "<parameter name=", "</parameter>"):
            key, _, text = given.partition(">")
            arguments[key.strip('"')] = _value(schema, key.strip('"'), text)
        calls.append(ToolCall(name.strip('"'), written(arguments)))
    return calls or None


def _between(text: str, opens: str, closes: str) -> list[str]:
    """What stands between these marks, each time. Takes time in proportion to the text, whatever a model writes."""
    found, at = list[str](), 0
    while (start := text.find(opens, at)) >= 0 and (end := text.find(closes, start)) >= 0:
        found.append(text[start + len(opens) : end])
        at = end + len(closes)
    return found


def _value(schema: Mapping[str, Any], key: str, text: str) -> Any:
    """A parameter that is written without quotes: a text where the schema says so, else JSON if it is that."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(declared, dict) and declared.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip("\n")


def _mark(name: str) -> str:
    """One of DeepSeek's marks, in the characters that its tokenizer has for them."""
    return f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>"


_CALLS_BEGIN, _CALLS_END = _mark("tool_calls_begin"), _mark("tool_calls_end")
_CALL_BEGIN, _CALL_END, _SEPARATOR = _mark("tool_call_begin"), _mark("tool_call_end"), _mark("tool_sep")


def _deepseek(body: str, schemas: Schemas) -> list[ToolCall] | None:
    head, separator, rest = body.partition(_SEPARATOR)
    if not separator:
        return None
    name, _, arguments = rest.partition("\n") if head.strip() == "function" else (head, "", rest)
    found = _object(arguments.strip().removeprefix("```json").removesuffix("```"))
    return None if found is None or not name.strip() else [ToolCall(name.strip(), written(found))]


def _harmony(body: str, schemas: Schemas) -> list[ToolCall] | None:
    head, separator, arguments = body.partition("<|message|>")
    named = re.match(r"\s*([\w.\-]{1,256})", head)
    found = _object(arguments) if separator else None
    return None if named is None or found is None else [ToolCall(named[1], written(found))]


FORMATS: dict[str, ToolFormat] = {
    made.name: made
    for made in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>", _hermes),
        ToolFormat("llama3_json", "", "", _llama, marks=("<|python_tag|>",), around=("<|python_tag|>",)),
        ToolFormat("glm45", "<tool_call>", "</tool_call>", _glm),
        ToolFormat("minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>", _minimax),
        ToolFormat(
            "deepseek_v3", _CALL_BEGIN, _CALL_END, _deepseek, around=(_CALLS_BEGIN, _CALLS_END),
            marks=(_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR),
        ),
        ToolFormat(
            "openai", "<|channel|>commentary to=functions.", "<|call|>", _harmony,
            around=("<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
                    "<|end|>", "<|return|>"),
            marks=("<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>", "<|return|>", "<|constrain|>"),
        ),
    )
}  # fmt: skip

# What a family's chat template says of its format, the most telling first.
_SIGNS = (
    ("<minimax:tool_call>", "minimax_m2"), ("<arg_key>", "glm45"), (_CALL_BEGIN, "deepseek_v3"),
    ("<|channel|>", "openai"), ("<tool_call>", "hermes"), ('"parameters":', "llama3_json"),
)  # fmt: skip


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template asks its model for; None if it knows no tools."""
    if "tools" not in template:
        return None
    return next((FORMATS[name] for sign, name in _SIGNS if sign in template), None)
