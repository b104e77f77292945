"""docs/router.md and docs/events.md name tests that exist, and every promise has one or a command that measures it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.test_guarantees import ROOT, names_in

CITED = re.compile(r"`(?:((?:tests|benchmarks)/[\w/]+\.py))?(?:::(\w+))?`")
PAGES = ("router.md", "events.md")


def cited(line: str) -> list[tuple[str, str]]:
    """(file, test) of a line; `::test` alone is of the file before it, a file alone has no test."""
    found, file = [], ""
    for named, test in CITED.findall(line):
        file = named or file
        if named or test:
            found.append((file, test))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page: str) -> None:
    told = [one for line in (ROOT / "docs" / page).read_text().splitlines() for one in cited(line)]
    assert len(told) > 15
    missing = [
        f"{file}::{test}" for file, test in told
        if not (ROOT / file).is_file() or (test and test not in names_in(file))
    ]  # fmt: skip
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_every_promise_and_every_thread_has_a_test_or_a_measurement(page: str) -> None:
    lines = Path(ROOT / "docs" / page).read_text().splitlines()
    heads = [at for at, line in enumerate(lines) if line.startswith(("| promise", "| thread"))]
    assert heads
    for head in heads:
        rows = lines[head + 2 :]
        rows = rows[: next((at for at, line in enumerate(rows) if not line.startswith("|")), len(rows))]
        assert rows
        assert [row for row in rows if not cited(row) and "`python -m benchmarks." not in row] == []
