"""Chat templates: from a conversation to a prompt, in a sandbox and within bounds."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay.models.config import read_json
from forebay.models.errors import ChatTemplateError, CheckpointBroken, NoChatTemplate

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_BYTES_MAX = 1 << 20
PROMPT_CHARACTERS_MAX = 16 << 20


class ChatTemplate:
    """One model's template. `special` are its named tokens, which templates refer to (`bos_token`)."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, undefined=jinja2.Undefined, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error

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
        special = {name: text for name, value in config.items() if name.endswith("_token") and (text := _text(value))}
        return cls(source, special)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation. Raises ChatTemplateError with a message for the client."""
        pieces: list[str] = []
        size = 0
        values: dict[str, Any] = {
            **self._special, "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None,
        }  # fmt: skip
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                size += len(piece)
                if size > PROMPT_CHARACTERS_MAX:
                    raise ChatTemplateError(f"the prompt is over {PROMPT_CHARACTERS_MAX} characters; send less")
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template fails on these messages: {error}") from error
        return "".join(pieces)


def _source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / TEMPLATE_FILE
    try:
        if file.is_file():
            if file.stat().st_size > TEMPLATE_BYTES_MAX:
                raise CheckpointBroken(f"{file} is over {TEMPLATE_BYTES_MAX} bytes; that is no chat template")
            return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointBroken(f"{file} can't be read: {error}") from error
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


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean the server's own day
