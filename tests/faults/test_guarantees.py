"""docs/guarantees.md names tests that exist, and all that were written for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
CITED = re.compile(r"`((?:tests|forebay/testing)/[\w/]+\.py)::(\w+)`")


def names_in(file: str) -> set[str]:
    """Functions and classes of a file, methods too."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_every_test_that_is_named_exists() -> None:
    cited = CITED.findall(PAGE)
    assert len(cited) > 100
    known = {file: names_in(file) for file in {file for file, _ in cited} if (ROOT / file).is_file()}
    assert [f"{file}::{name}" for file, name in cited if name not in known.get(file, ())] == []


def test_every_promise_has_a_test() -> None:
    heads = ("| promise", "| thread")
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(heads)]
    assert len(rows) > 50
    assert [row for row in rows if not CITED.search(row)] == []


def test_what_was_tried_because_it_went_wrong_elsewhere_is_on_the_page() -> None:
    file = "tests/faults/test_what_goes_wrong.py"
    tests = {name for name in names_in(file) if name.startswith("test_")}
    assert tests - {name for cited, name in CITED.findall(PAGE) if cited == file} == set()
