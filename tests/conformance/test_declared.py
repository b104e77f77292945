"""What our suites declare that their tier lacks: one table, so that nothing is switched off unseen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.testing.conformance import ABILITIES, TierConformance

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = {"persistent", "stall", "queue", "deadline"}
PEERS = {"quota", "eviction", "forget", "clear", "told", "counts"}
LACKS = {
    "TestMemoryTier": AT_ONCE,
    "TestMemoryTierInItsOwnProcess": AT_ONCE | {"damage"},
    "TestFsTier": set(),
    "TestFsTierInItsOwnProcess": {"stall"},
    "TestSealedFsTier": {"stall"},
    "TestSqliteTier": {"partial"},
    "TestS3TierOnSeaweedFS": set(),
    "TestS3TierOnMoto": set(),
    "TestS3TierOnALessAbleEndpoint": set(),
    "TestS3TierInItsOwnProcess": set(),
    "TestMooncakeTier": {"partial", "clear", "told", "counts"},
    "TestP2pTier": PEERS,
    "TestP2pTierInItsOwnProcess": PEERS,
}
"""By suite. Whoever adds to it says so in a review; the reasons stand in the suites."""


def suites() -> dict[str, set[str]]:
    """Every class below TierConformance in a test file, with what it and its bases declare, read from the source."""
    classes: dict[str, ast.ClassDef] = {}
    for path in [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "examples").rglob("test_*.py")]:
        text = path.read_text(encoding="utf-8")
        if "TierConformance" in text:
            classes |= {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    return {
        name: set().union(*(_declared(classes[one]) for one in _line(name, classes)))
        for name in classes
        if name.startswith("Test") and "TierConformance" in _line(name, classes, with_root=True)
    }


def _line(name: str, classes: dict[str, ast.ClassDef], *, with_root: bool = False) -> list[str]:
    """The class and its bases, as far as they are in the files."""
    found = [name] if name in classes or with_root else []
    for base in classes[name].bases if name in classes else ():
        if isinstance(base, ast.Name):
            found += _line(base.id, classes, with_root=with_root)
    return found


def _declared(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.Assign):
            names, value = {found.id for found in child.targets if isinstance(found, ast.Name)}, child.value
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.value is not None:
            names, value = {child.target.id}, child.value
        else:
            continue
        if "lacks" in names and isinstance(value, ast.Dict):
            yield from (str(key.value) for key in value.keys if isinstance(key, ast.Constant))
        if isinstance(value, ast.Constant) and value.value is False:
            yield from names & {"partial", "persistent"}


def test_every_lack_is_in_the_table() -> None:
    found = suites()
    assert {name: lacks for name, lacks in found.items() if lacks != LACKS.get(name, set())} == {}
    assert LACKS.keys() <= found.keys(), "a suite has gone"


def test_a_lack_needs_a_known_name_and_a_reason() -> None:
    with pytest.raises(TypeError, match="no ability"):
        type("Suite", (TierConformance,), {"lacks": {"speed": "it is slow as such"}})
    with pytest.raises(TypeError, match="say in a sentence"):
        type("Suite", (TierConformance,), {"lacks": {"quota": "no"}})
    assert "quota" in ABILITIES
