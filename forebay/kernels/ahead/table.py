"""docs/kernels.md: what every kernel takes on every target, what it may take at most, and where that is exceeded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError
from forebay.kernels.ahead.cases import cases_for
from forebay.kernels.ahead.inspect import Built, inspect
from forebay.kernels.ahead.targets import TARGETS, Target, compile_for

BEGIN, END = "<!-- compiled -->", "<!-- /compiled -->"
HEAD = ("kernel", "at the sizes of", "launch", "registers", "at most", "stack", "at most", "shared", "tensor")
SLACK = 1.08
"""Of registers: another patch release of the compiler may take some more."""


@dataclass(frozen=True, slots=True)
class Row:
    """A compiled kernel of the table. `launch` is its sizes, warps and stages, empty where nothing is chosen."""

    target: str
    kernel: str
    model: str
    launch: str
    built: Built

    @property
    def key(self) -> tuple[str, ...]:
        """What a budget is for."""
        return self.target, self.kernel, self.model, self.launch


@dataclass(frozen=True, slots=True)
class Budget:
    """What a kernel may take, and the tensor instructions that it must have."""

    registers: int
    stack: int
    tensor: str


def build(target: Target, *, first: bool) -> Iterator[Row]:
    """Compile all cases for a target; with `first`, each with the first of its sizes only. Blocks, a second each."""
    for case in cases_for(target):
        for sizes in case.sizes(target)[: 1 if first else None]:
            built = inspect(compile_for(case.launch(target, sizes), target))
            yield Row(target.name, case.kernel, case.model, launch_text(sizes), built)


def launch_text(sizes: Any) -> str:
    """`rows 128, keys 64, ...`: the fields in their order."""
    if sizes is None:
        return ""
    return ", ".join(f"{name.name} {value}" for name, value in zip(fields(sizes), astuple(sizes), strict=True))


def render(rows: Iterable[Row]) -> str:
    """The rows as tables, one for each target, with budgets from what was found."""
    found = list(rows)
    parts = []
    for name in dict.fromkeys(row.target for row in found):
        lines = [f"### {name}: {TARGETS[name].device}", "", _line(HEAD), _line(["---"] * len(HEAD))]
        lines += [_line(_cells(row)) for row in found if row.target == name]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cells(row: Row) -> list[str]:
    built, allowed = row.built, budget_for(row.built)
    return [
        row.kernel, row.model, row.launch, str(built.registers), str(allowed.registers), str(built.stack),
        str(allowed.stack), str(built.shared), built.tensor,
    ]  # fmt: skip


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def budget_for(built: Built) -> Budget:
    """From what was found: some more registers, no more stack, the same tensor instructions."""
    return Budget(-(-int(built.registers * SLACK) // 8) * 8, built.stack, built.tensor)


def write(page: Path, rows: Iterable[Row]) -> None:
    """Replace the page's tables. Raises ConfigError if it has no place for them."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, marked, after = rest.partition(END)
    if not marked:
        raise ConfigError(f"{page} has no {BEGIN} ... {END} to write between")
    page.write_text(f"{before}{BEGIN}\n{render(rows)}\n{END}{after}", encoding="utf-8")


def budgets(page: Path) -> dict[tuple[str, ...], Budget]:
    """The page's budgets, by `Row.key`."""
    found: dict[tuple[str, ...], Budget] = {}
    target = ""
    for line in page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines():
        heading = re.match(r"### (\w+):", line)
        if heading:
            target = heading.group(1)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(HEAD) and cells[4].isdigit():
            found[(target, *cells[:3])] = Budget(int(cells[4]), int(cells[6]), cells[8])
    return found


def complaints(rows: Iterable[Row], allowed: dict[tuple[str, ...], Budget]) -> list[str]:
    """What is worse than its budget, in words; also a kernel that has none."""
    return [f"{', '.join(row.key)}: {why}" for row in rows for why in _against(row.built, allowed.get(row.key))]


def _against(built: Built, budget: Budget | None) -> Iterator[str]:
    if budget is None:
        yield "no budget: write the table again"
        return
    if built.registers > budget.registers:
        yield f"{built.registers} registers, {budget.registers} at most"
    if built.stack > budget.stack:
        yield f"{built.stack} bytes of stack, {budget.stack} at most: it spills"
    if built.tensor != budget.tensor:
        yield f"tensor instructions {built.tensor or 'none'!r}, not {budget.tensor or 'none'!r}"
