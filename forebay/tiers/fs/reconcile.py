"""Bringing manifest and files together: files nobody knows are entered, records without a file dropped.

The walk goes folder by folder, slowly beside normal work, or at full speed where the manifest had to be
thrown away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.tiers.base import ChunkId
from forebay.tiers.fs.paths import chunk_of_name, fan_out
from forebay.tiers.fs.shelf import Shelf

_HEX = "0123456789abcdef"
ANNOUNCE_STEP = 256


@dataclass(frozen=True, slots=True)
class Leaf:
    """What one folder needed."""

    files: int
    adopted: int
    foreign: int
    vanished: int


def finish_interrupted(shelf: Shelf) -> int:
    """Settle the chunks that a killed process was writing: enter those whose file got its name."""
    adopted = 0
    for chunk in shelf.manifest.unfinished():
        if shelf.manifest.get(chunk) is None and os.path.lexists(shelf.device.paths.chunk(chunk)):
            adopted += shelf.adopt(chunk)
        shelf.manifest.end_write(chunk)
    return adopted


def remove_leftovers(shelf: Shelf) -> int:
    """Unlink what killed processes left in `tmp/`. Only for the directory's one server, before it writes."""
    removed = 0
    with os.scandir(shelf.device.paths.tmp) as entries:
        for entry in entries:
            os.unlink(entry.path)
            removed += 1
    return removed


def announce(shelf: Shelf) -> Iterator[Leaf]:
    """Tell what an earlier process left, a few hundred chunks a step: after a start nobody else knows it."""
    told = 0
    for folder in range(4096):
        with shelf.manifest.reading() as view:
            known = [chunk for chunk, _ in view.with_prefix(bytes([folder >> 4]), folder & 15)]
        for chunk in known:
            shelf.announce(chunk)
            told += 1
            if told % ANNOUNCE_STEP == 0:
                yield Leaf(ANNOUNCE_STEP, 0, 0, 0)
    shelf.all_announced()


def reconcile(shelf: Shelf) -> Iterator[Leaf]:
    """Compare all folders with the manifest, one a step."""
    for first in range(256):
        for second in range(16):
            yield _leaf(shelf, first, second)


def _leaf(shelf: Shelf, first: int, second: int) -> Leaf:
    folder = f"{first:02x}/{_HEX[second]}"
    # The manifest first: what is stored in between has a file, and what is removed is looked at again.
    with shelf.manifest.reading() as view:
        known = {chunk for chunk, _ in view.with_prefix(bytes([first]), second)}
    names = _names(f"{shelf.device.paths.chunks}/{folder}")
    present: set[ChunkId] = set()
    adopted = foreign = 0
    for name in names:
        chunk = chunk_of_name(name)
        if chunk is None or fan_out(name) != folder:
            foreign += 1
            shelf.foreign(f"{shelf.device.paths.chunks}/{folder}/{name}")
            continue
        present.add(chunk)
        if chunk not in known:
            adopted += shelf.adopt(chunk)
    vanished = 0
    for chunk in known - present:
        vanished += shelf.vanished(chunk)
    return Leaf(len(names), adopted, foreign, vanished)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
