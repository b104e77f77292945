"""The file tier's record of namespaces is capped; who comes last stays, and its bytes are counted."""

from __future__ import annotations

import os
from pathlib import Path

from forebay.tiers.fs.ledger import Ledger
from forebay.tiers.fs.namespaces import NamespaceFiles


def files(folder: Path, limit: int) -> tuple[NamespaceFiles, Ledger]:
    ledger = Ledger(1 << 30)
    ledger.open = True
    made = NamespaceFiles(folder, ledger, limit)
    made.open()
    return made, ledger


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def on_disk(folder: Path) -> int:
    return sum(512 * entry.stat().st_blocks for entry in os.scandir(folder))


def test_a_thousand_namespaces_leave_the_last_few(tmp_path: Path) -> None:
    noted, ledger = files(tmp_path, 8)
    for number in range(1000):
        assert noted.note(name(number), b"encoded" * 100)
        assert len(noted) <= 8
    assert {path.name for path in tmp_path.iterdir()} == {name(n).hex() for n in range(992, 1000)}
    assert ledger.other == on_disk(tmp_path) and ledger.reserved == 0


def test_one_that_is_noted_again_outlives_those_that_are_not(tmp_path: Path) -> None:
    noted, _ = files(tmp_path, 3)
    for number in (1, 2, 3, 1, 4, 5):
        assert noted.note(name(number), b"x")
    assert {path.name for path in tmp_path.iterdir()} == {name(n).hex() for n in (1, 4, 5)}


def test_a_restart_keeps_the_order_and_the_cap(tmp_path: Path) -> None:
    noted, _ = files(tmp_path, 10)
    for number in range(10):
        noted.note(name(number), b"x")
        os.utime(tmp_path / name(number).hex(), (1000 - number, 1000 - number))
    again, ledger = files(tmp_path, 4)
    assert len(again) == 4 and {path.name for path in tmp_path.iterdir()} == {name(n).hex() for n in range(4)}
    assert ledger.other == on_disk(tmp_path)
