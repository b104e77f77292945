"""Shipped sizes of launches: a JSON file for each target, made by `python -m forebay.kernels tune` on that device.

    {"made": "by hand, not measured", "executed": {"attend": "NVIDIA H200, 2026-12-01"},
     "attend.decode": [{"upto": {"dim": 128, "context": 4096}, "rows": 16, ...}, ...]}

The first entry whose limits hold is taken; the last one has none. Nothing is tuned while serving.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from forebay.errors import ConfigError

Sizes = TypeVar("Sizes")
FOLDER = Path(__file__).parent
FALLBACK = "generic"


@cache
def table(target: str) -> dict[str, Any]:
    """The table of a target, or the generic one where none is shipped. Raises ConfigError for a broken file."""
    path = FOLDER / f"{target}.json"
    if not path.exists() and target != FALLBACK:
        return table(FALLBACK)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"the tuning table {path.name} isn't JSON: {error}") from error
    return found


def entries(target: str, operation: str) -> list[dict[str, Any]]:
    """All that is shipped for an operation. Raises ConfigError if nothing is."""
    found = table(target).get(operation)
    if not isinstance(found, list) or not found:
        raise ConfigError(f"the tuning table of {target} has nothing for {operation}")
    return found


def sizes_for(target: str, operation: str, kind: type[Sizes], **shape: int) -> Sizes:
    """The sizes for an operation of this shape, as a `kind`. Raises ConfigError if no entry fits."""
    for entry in entries(target, operation):
        if all(shape[name] <= limit for name, limit in entry.get("upto", {}).items()):
            return as_sizes(entry, kind)
    raise ConfigError(f"the tuning table of {target} has no entry for {operation} of {shape}: the last one has limits")


def as_sizes(entry: dict[str, Any], kind: type[Sizes]) -> Sizes:
    """One entry as a `kind`. Raises ConfigError for names that it doesn't have."""
    given = {name: value for name, value in entry.items() if name not in ("upto", "measured")}
    unknown = given.keys() - {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise ConfigError(f"a tuning table's entry has {', '.join(sorted(unknown))}, which {kind.__name__} hasn't")
    return kind(**given)


def executed_on(target: str, operation: str) -> str:
    """On what device, and when, an operation's kernel has been run and found right; empty: compiled only."""
    found = table(target).get("executed", {}) if target != FALLBACK else {}
    return str(found.get(operation, ""))
