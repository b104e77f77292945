"""Chat templates: from a conversation to a prompt, in a sandbox and within bounds.

A template comes with the model, messages come from clients. The sandbox keeps both from reaching into Python; the
bounds keep them from filling the memory by a large repetition or an endless prompt.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay.models.errors import ChatTemplateError, CheckpointBroken, NoChatTemplate
from forebay.models.json_file import read_json

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_BYTES_MAX = 1 << 20
PROMPT_CHARACTERS_MAX = 16 << 20
REPETITION_MAX = 1 << 20
EXPONENT_MAX = 64
RANGE_MAX = 10_000

_FAILURES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip


class ChatTemplate:
    """One model's template. `special` are its named tokens, which templates refer to (`bos_token`)."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = _Bounded(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now, "range": _range}
        self.source = source
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}; restore it") from error

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """The template of a checkpoint directory.

        Raises NoChatTemplate for a base model, CheckpointBroken, ChatTemplateError.
        """
        config = read_json(directory / CONFIG_FILE) if (directory / CONFIG_FILE).is_file() else {}
        source = _source(directory, config)
        if source is None:
            raise NoChatTemplate(
                f"{directory.name} has no chat template: it is a base model, and none is invented for it; "
                "use /v1/completions, or a model that was tuned for chat"
            )
        named = {name: _text(value) for name, value in config.items() if name.endswith("_token")}
        return cls(source, {name: text for name, text in named.items() if text is not None})

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:  # fmt: skip
        """The prompt of a conversation. Raises ChatTemplateError with a message for the client.

        May be called from any thread. Its text holds the model's special tokens: encode it without a frame.
        """
        pieces: list[str] = []
        size = 0
        values: dict[str, Any] = {
            **self._special, "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt, "tools": tools or None, "documents": None,
        }  # fmt: skip
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                size += len(piece)
                if size > PROMPT_CHARACTERS_MAX:
                    raise ChatTemplateError(f"the prompt is over {PROMPT_CHARACTERS_MAX} characters; send less")
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except _FAILURES as error:
            raise ChatTemplateError(f"the chat template fails on these messages: {error}") from error
        return "".join(pieces)


class _Bounded(ImmutableSandboxedEnvironment):
    """A sandbox in which no single operation makes something huge."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > EXPONENT_MAX:
            raise jinja2.TemplateRuntimeError(f"an exponent of {right}; the limit is {EXPONENT_MAX}")
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and len(repeated) * times > REPETITION_MAX:
                raise jinja2.TemplateRuntimeError(f"a repetition over {REPETITION_MAX} items")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's part for training, means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - the library declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside, as if there were no mark."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / TEMPLATE_FILE
    try:
        if file.is_file():
            if file.stat().st_size > TEMPLATE_BYTES_MAX:
                raise CheckpointBroken(f"{file} is over {TEMPLATE_BYTES_MAX} bytes; that is no chat template")
            return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointBroken(f"{file} can't be read ({error}); restore it from the model's source") from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and found else None


def _text(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > RANGE_MAX:
        raise jinja2.TemplateRuntimeError(f"a range of {len(found)}; the limit is {RANGE_MAX}")
    return found


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)  # templates mean the server's own day
