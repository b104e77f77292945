"""The setting of a store's tiers: tables `[tiers.NAME]` of a TOML file, or the same as an inline table.

    [tiers.disk]
    kind = "fs"
    directory = "/var/lib/forebay"
    quota_bytes = "200GiB"

    [tiers.bucket]
    kind = "s3"
    bucket = "kv"
    copy = "second-hit"

Their order is that in which they are asked.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from forebay.config import Kind, Setting, duration, share, size
from forebay.tiers.messages import OptionValue
from forebay.tiers.p2p.transfer_params import read_header
from forebay.tiers.rules import COPY, TierRule

TIERS_MAX = 8
RESERVED = ("host", "device")
EXAMPLE = '{ disk = { kind = "fs", directory = "/var/lib/forebay", quota_bytes = "200GiB" } }'
UNITS: dict[str, Kind] = {"_bytes": size, "_s": duration}
"""How options may be written whose names end so: 200GiB, 500ms."""


def rules_of(table: Mapping[str, Any]) -> dict[str, TierRule]:
    """Rules by name, in order. Raises ValueError that names the tier and the key, and says what it takes."""
    if len(table) > TIERS_MAX:
        raise ValueError(f"has {len(table)} tiers; a store has at most {TIERS_MAX}")
    return {name: _rule(name, given) for name, given in table.items()}


def _rule(name: str, given: object) -> TierRule:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name) or name in RESERVED:
        raise ValueError(f"tier {name!r}: a name has up to 32 of a-z, 0-9 and dashes, and is neither host nor device")
    if not isinstance(given, dict) or not isinstance(given.get("kind"), str):
        raise ValueError(f"tier {name!r}: takes a table with a kind, such as {EXAMPLE}")
    options = dict(given)
    kind, copy = str(options.pop("kind")), options.pop("copy", COPY[0])
    if copy not in COPY:
        raise ValueError(f"tier {name!r}: copy {copy!r}: takes one of {', '.join(COPY)}")
    rule = TierRule(kind, copy=str(copy))
    pinned = _read(name, "pinned_share", options.pop("pinned_share", rule.pinned_share), share)
    store_queue = _read(name, "store_queue", options.pop("store_queue", rule.store_queue), size)
    load_queue = _read(name, "load_queue", options.pop("load_queue", rule.load_queue), size)
    read = {key: _option(name, key, value) for key, value in options.items()}
    return TierRule(kind, read, str(copy), pinned, store_queue, load_queue)


def _option(name: str, key: str, value: object) -> OptionValue:
    if isinstance(value, str):
        for ending, kind in UNITS.items():
            if key.endswith(ending):
                number: OptionValue = _read(name, key, value, kind)
                return number
    if not isinstance(value, str | int | float | bool):
        raise ValueError(f"tier {name!r}: {key}: takes a plain value, not a table or list")
    return value


def _read(name: str, key: str, value: object, kind: Kind) -> Any:
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"takes a {kind.takes}")
        return kind(str(value))
    except ValueError as error:
        raise ValueError(f"tier {name!r}: {key} {value!r}: {error}") from error


def _parse(text: str) -> dict[str, TierRule]:
    try:
        table = tomllib.loads(f"tiers = {text}")["tiers"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"takes an inline table, such as {EXAMPLE}") from error
    if not isinstance(table, dict):
        raise ValueError(f"takes an inline table, such as {EXAMPLE}")
    return rules_of(table)


def inline(rules: Mapping[str, TierRule]) -> str:
    """Rules as the inline table that says the same: for another command's flag."""
    return "{ " + ", ".join(f"{_quoted(name)} = {_table(rule)}" for name, rule in rules.items()) + " }"


def _table(rule: TierRule) -> str:
    own = {
        "kind": rule.kind, "copy": rule.copy, "pinned_share": rule.pinned_share, "store_queue": rule.store_queue,
        "load_queue": rule.load_queue,
    }  # fmt: skip
    values = {key: value for key, value in (own | dict(rule.options)).items() if value is not None}
    return "{ " + ", ".join(f"{_quoted(key)} = {_quoted(value)}" for key, value in values.items()) + " }"


def _quoted(value: object) -> str:
    """A TOML key or value: JSON's strings, numbers and booleans are TOML's too."""
    return json.dumps(value, ensure_ascii=False)


host_port = Kind("HOST:PORT", read_header)

TIERS = Setting(
    "tiers", Kind("TABLE", _parse, rules_of), {},
    "tiers behind memory, in the order in which they are asked; in a file [tiers.NAME] with kind and options",
    shown="none but --fs",
)  # fmt: skip
"""Of commands that start a store."""
