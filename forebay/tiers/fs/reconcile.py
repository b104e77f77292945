"""Bringing manifest and files together: files nobody knows are entered, records without a file dropped.

The walk goes folder by folder, slowly beside normal work, or at full speed where the manifest had to be
thrown away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from forebay.tiers.base import ChunkId
from forebay.tiers.fs.paths import FOLDERS, chunk_of_name, folder_name
from forebay.tiers.fs.shelf import Shelf

STEP = 64
"""Files between two pauses of a slow walk."""


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


def announce(shelf: Shelf) -> Iterator[int]:
    """Tell what an earlier process left: after a start nobody else knows it. Yields after each step how many
    files it has looked at."""
    for folder in range(FOLDERS):
        with shelf.manifest.reading() as view:
            known = view.in_folder(folder)
        for at in range(0, len(known), STEP):
            for chunk in known[at : at + STEP]:
                shelf.announce(chunk)
            yield min(STEP, len(known) - at)
    shelf.all_announced()


def reconcile(shelf: Shelf) -> Iterator[int]:
    """Compare all folders with the manifest. Yields after each step how many files it has looked at."""
    for folder in range(FOLDERS):
        yield from _compare(shelf, folder)


def _compare(shelf: Shelf, folder: int) -> Iterator[int]:
    # The manifest first: what is stored in between has a file, and what is removed is looked at again.
    with shelf.manifest.reading() as view:
        known = set(view.in_folder(folder))
    path = f"{shelf.device.paths.chunks}/{folder_name(folder)}"
    names = _names(path)
    present: set[ChunkId] = set()
    for at in range(0, len(names), STEP):
        some = names[at : at + STEP]
        for name in some:
            chunk = chunk_of_name(name)
            if chunk is None or chunk.key[0] != folder:
                shelf.foreign(f"{path}/{name}")
                continue
            present.add(chunk)
            if chunk not in known:
                shelf.adopt(chunk)
        yield len(some)
    for chunk in known - present:
        shelf.vanished(chunk)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
