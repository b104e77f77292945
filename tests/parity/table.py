"""`python -m tests.parity.table` runs the parity tests and prints the table of families, made from their outcomes.

A cell says how many tests passed for that family. `--form long` also serves every family (minutes); otherwise those
that were not served say so. What a family keeps in its cache is read from its tiny checkpoint. Exits with 1 if a test
failed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forebay.models.base import KVGroup
from forebay.models.gguf_config import MODEL_TYPES
from forebay.models.loading import read_info
from tests.parity.families import FAMILIES

COLUMNS = {
    "prefill": ("test_prefill", "test_variant"),
    "chunks, decode": ("test_chunked_prefill",),
    "mixed batch": ("test_batch_of_mixed_lengths",),
    "hit at every boundary": ("test_hit_at_every_boundary",),
    "served, with hits": ("test_served_through_the_store", "test_served_from_files"),
}
GGUF_TEST = "test_an_unquantised_file_gives_the_same_logits"
TESTS = (
    "parity/test_every_family.py", "parity/test_quantised.py", "parity/test_serving.py",
    f"models/test_gguf.py::{GGUF_TEST}",
)  # fmt: skip


@dataclass(eq=False)
class Outcomes:
    """A pytest plugin (so it must be hashable): what became of each test, by (family, test)."""

    passed: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    forms: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of one test."""
        match = re.search(r"::(\w+)\[([^\]]+)\]$", report.nodeid)
        family = _family(match[2]) if match else None
        if match is None or family is None:
            return
        if report.failed:
            self.failed[family, match[1]] += 1
        elif report.when == "call" and report.passed:
            self.passed[family, match[1]] += 1
            if match[1] == GGUF_TEST:
                self.forms[family].add("GGUF")
            elif match[1] == "test_quantised":
                self.forms[family].add(match[2].rpartition("-")[2].upper())


def _family(parameters: str) -> str | None:
    """The longest name of a family with which a test's parameters begin."""
    parameters = MODEL_TYPES.get(parameters, parameters)  # GGUF has names of its own
    found = [name for name in FAMILIES if parameters == name or parameters.startswith(f"{name}-")]
    return max(found, key=len, default=None)


def cell(outcomes: Outcomes, family: str, tests: tuple[str, ...]) -> str:
    """What to say of a family and the tests of one column."""
    failed = sum(outcomes.failed[family, test] for test in tests)
    passed = sum(outcomes.passed[family, test] for test in tests)
    if failed:
        return f"**{failed} failed**"
    return f"yes ({passed})" if passed else "not run"


def describe(group: KVGroup) -> str:
    """A cache group in a word or two."""
    kinds = {"full": "K, V", "window": "K, V of a window", "latent": "latents", "indexer": "index keys"}
    return kinds[group.kind]


def table(outcomes: Outcomes) -> str:
    """The table, in Markdown."""
    heads = ["family", "has", "cache groups", "stored as", *COLUMNS]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    with tempfile.TemporaryDirectory() as folder:
        for name, family in FAMILIES.items():
            info = read_info(family.make(Path(folder) / name))
            stored = ["safetensors", *sorted(outcomes.forms[name])]
            cells = [cell(outcomes, name, tests) for tests in COLUMNS.values()]
            groups = "; ".join(map(describe, info.kv_groups))
            lines.append(f"| {' | '.join((f'`{name}`', family.needs, groups, ', '.join(stored), *cells))} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=("short", "long"), default="short")
    if parser.parse_args(argv).form == "long":
        os.environ["FOREBAY_ALL_FAMILIES"] = "1"
    outcomes = Outcomes()
    here = Path(__file__).parent.parent
    code = pytest.main(["-q", "-p", "no:cacheprovider", *(str(here / name) for name in TESTS)], plugins=[outcomes])
    print(f"\n{table(outcomes)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
