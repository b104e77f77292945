"""What an answer must look like, as a grammar that the worker follows: JSON schemas, regular expressions, choices.

Grammars are in the form of the llguidance library, which also checks them here, so that a client hears at once what
is wrong with its schema.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from forebay.errors import ConfigError
from forebay.workers.api.bodies import Common, StructuredOutputs
from forebay.workers.api.errors import ApiError, bad
from forebay.workers.guiding import GRAMMAR_CHARACTERS_MAX, load_library

SPACE = r"[ \n]{0,8}"
"""Between the parts of a JSON text. Bounded: a weak model would fill its answer with nothing else."""
CHOICES_MAX = 256


async def grammar_of(body: Common, *, guided: bool, tool_schema: dict[str, Any] | None = None) -> str:
    """The grammar that a request asks for, "" for none. Raises ApiError 400 for one that can't be used."""
    wanted = _asked(body)
    field = "response_format" if body.structured_outputs is None else "structured_outputs"
    if tool_schema is not None:
        wanted, field = StructuredOutputs(json=tool_schema), "tool_choice"
    if wanted is None:
        return ""
    if not guided:
        raise bad(
            "this server takes no schemas or grammars; start it with --structured-outputs (and install "
            "'forebay[guided]')", field,
        )  # fmt: skip
    try:
        library = load_library()
        return await asyncio.to_thread(_compiled, library.LLMatcher, wanted, field)
    except ConfigError as error:
        raise ApiError(500, str(error), kind="server_error") from error


def _asked(body: Common) -> StructuredOutputs | None:
    asked = body.structured_outputs
    form = body.response_format or {"type": "text"}
    if asked is not None and form != {"type": "text"}:
        raise bad("give response_format or structured_outputs, not both", "structured_outputs")
    if asked is not None:
        ways = [name for name in asked.__struct_fields__ if getattr(asked, name) not in (None, False)]
        if len(ways) != 1:
            raise bad("structured_outputs takes one of json, json_object, regex, choice, grammar", "structured_outputs")
        return asked
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "json_schema" and isinstance(form.get("json_schema"), dict):
        schema = form["json_schema"].get("schema")
        if isinstance(schema, dict | bool):
            return StructuredOutputs(json=schema)
    raise bad(
        'response_format takes {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": '
        '{"name": ..., "schema": {...}}}', "response_format",
    )  # fmt: skip


def _compiled(matcher: Any, wanted: StructuredOutputs, field: str) -> str:
    try:
        grammar = _written(matcher, wanted)
    except (ValueError, TypeError, RecursionError) as error:
        raise bad(f"{field}: the schema can't be used: {error}", field) from error
    if len(grammar) > GRAMMAR_CHARACTERS_MAX:
        raise bad(f"{field} has {len(grammar)} characters as a grammar; send up to {GRAMMAR_CHARACTERS_MAX}", field)
    wrong = matcher.validate_grammar(grammar)
    if wrong and not wrong.startswith("WARNING"):
        raise bad(f"{field}: the schema or grammar can't be used: {wrong[:500]}", field)
    return grammar


def _written(matcher: Any, wanted: StructuredOutputs) -> str:
    if wanted.regex is not None:
        return str(matcher.grammar_from_regex(wanted.regex))
    if wanted.grammar is not None:
        return str(matcher.grammar_from_lark(wanted.grammar))
    if wanted.choice is not None:
        return str(matcher.grammar_from_lark(f"start: {_alternatives(wanted.choice)}"))
    schema = {"type": "object"} if wanted.json_object else wanted.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, dict | bool):
        raise TypeError("a JSON schema is an object")
    as_object = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    return str(matcher.grammar_from_json_schema(as_object, overrides={"whitespace_pattern": SPACE}))


def _alternatives(choices: Sequence[str]) -> str:
    if not 0 < len(choices) <= CHOICES_MAX or not all(choices):
        raise ValueError(f"choice takes 1 to {CHOICES_MAX} texts that aren't empty")
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
