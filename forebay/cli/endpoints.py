"""The setting of a store's event endpoints beside --events: tables `[endpoints.NAME]` of a TOML file, or inline.

    [endpoints.router]
    endpoint = "tcp://127.0.0.1:5561"
    replay = "tcp://127.0.0.1:5562"
    consumer = "vllm-router"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from forebay.config import Kind, Setting
from forebay.events.endpoints import CONSUMERS, EndpointRule
from forebay.events.errors import EndpointRefused
from forebay.events.sockets import check_endpoint

ENDPOINTS_MAX = 8
EXAMPLE = '{ router = { endpoint = "tcp://127.0.0.1:5561", consumer = "vllm-router" } }'


def rules_of(table: Mapping[str, Any]) -> dict[str, EndpointRule]:
    """Rules by name. Raises ValueError that names the endpoint, and says what it takes."""
    if len(table) > ENDPOINTS_MAX:
        raise ValueError(f"has {len(table)} endpoints; a store has at most {ENDPOINTS_MAX} beside --events")
    return {name: _rule(name, given) for name, given in table.items()}


def _rule(name: str, given: object) -> EndpointRule:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name) or name == "events":
        raise ValueError(f"endpoint {name!r}: a name has up to 32 of a-z, 0-9 and dashes, and isn't events")
    try:
        known = set(EndpointRule.__dataclass_fields__)
        if not isinstance(given, dict) or not set(given) <= known:
            raise ValueError(f"takes a table of {', '.join(sorted(known))}, such as {EXAMPLE}")
        rule = msgspec.convert(given, EndpointRule)
        for place in (rule.endpoint, rule.replay):
            if place is not None:
                check_endpoint(place, curve=rule.keys is not None)
    except msgspec.ValidationError as error:
        raise ValueError(f"endpoint {name!r}: {error}; consumer is one of {', '.join(CONSUMERS)}") from error
    except (ValueError, EndpointRefused) as error:
        raise ValueError(f"endpoint {name!r}: {error}") from error
    return rule


def _parse(text: str) -> dict[str, EndpointRule]:
    try:
        table = tomllib.loads(f"endpoints = {text}")["endpoints"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"takes an inline table, such as {EXAMPLE}") from error
    if not isinstance(table, dict):
        raise ValueError(f"takes an inline table, such as {EXAMPLE}")
    return rules_of(table)


ENDPOINTS = Setting(
    "endpoints", Kind("TABLE", _parse, rules_of), {},
    "more endpoints of KV events, for consumers that want them otherwise; in a file [endpoints.NAME]", shown="none",
)  # fmt: skip


@dataclass(frozen=True)
class OwnStream:
    """A worker's own stream of its device memory; None: it has none."""

    events: str | None = None
    replay: str | None = None


def _workers_of(table: Mapping[str, Any]) -> dict[str, OwnStream]:
    try:
        return {name: msgspec.convert(given, OwnStream) for name, given in table.items()}
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; takes {WORKERS_EXAMPLE}") from error


def _parse_workers(text: str) -> dict[str, OwnStream]:
    try:
        table = tomllib.loads(f"workers = {text}")["workers"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"takes an inline table, such as {WORKERS_EXAMPLE}") from error
    if not isinstance(table, dict):
        raise ValueError(f"takes an inline table, such as {WORKERS_EXAMPLE}")
    return _workers_of(table)


WORKERS_EXAMPLE = '{ w0 = { events = "tcp://127.0.0.1:5601", replay = "tcp://127.0.0.1:5602" }, w1 = {} }'
WORKERS = Setting(
    "workers", Kind("TABLE", _parse_workers, _workers_of), {},
    "relay: the store's workers, and where their own streams are; in a file [workers.NAME]", shown="none",
)  # fmt: skip
