"""One measurement after the other, as an aligned table or as one JSON object a line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime


@dataclass(frozen=True)
class Measure:
    """One figure. `peer` and `limit` are what was measured beside it in the same run; `ratio` compares it with
    one of them, and `ok` says whether `target` is met (None: there is none)."""

    name: str
    value: float
    unit: str
    peer: float | None = None
    limit: float | None = None
    ratio: float | None = None
    target: str = ""
    ok: bool | None = None


@dataclass
class Report:
    """Collects measures; prints them at the end."""

    title: str
    measures: list[Measure] = field(default_factory=list)

    def add(self, measure: Measure) -> None:
        """Take one figure in."""
        self.measures.append(measure)

    def print(self, as_json: bool) -> int:
        """Print all; returns the exit code: 1 if a target was missed."""
        if as_json:
            for measure in self.measures:
                print(json.dumps(asdict(measure)))
        else:
            print(f"{self.title}  ({datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {machine()})\n")
            print(table(self.measures))
        return int(any(measure.ok is False for measure in self.measures))


def table(measures: Sequence[Measure]) -> str:
    """An aligned table."""
    head = ("name", "value", "unit", "peer", "limit", "ratio", "target", "ok")
    rows = [head] + [
        (
            m.name, _number(m.value), m.unit, _number(m.peer), _number(m.limit), _number(m.ratio), m.target,
            {True: "yes", False: "NO", None: ""}[m.ok],
        )
        for m in measures
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, 2, 6, 7) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def machine() -> str:
    """What this ran on, in words."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
        named = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {named[0] if named else 'unknown CPU'}, Linux {platform.release().split('-')[0]}"


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with `--json`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    return made


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)
