"""Where things are in a file tier's directory.

    <directory>/
      .lock                    flock of the process that serves it
      .state/                  manifest (or elsewhere: --state-dir)
      chunks/a/b/<name>        one chunk a file; the name is the chunk's id in hex, a and b its first digits
      tmp/                     files being written, where the filesystem can't make nameless ones
      quarantine/              what didn't verify, moved aside
      namespaces/<id>          encoded namespaces, for people and listings

Where several stores use the directory, that is seat 0; the others have the same under `seats/<number>/`, and:

      claims/<version>         which part of the quota is whose (`claims`)
      .beat                    counts up while its process lives, where locks don't tell (`presence`)
      journal/                 what came and went, for the others (`journal`)
      requests/                what the others ask for (`requests`)
      estate/                  chunks of a store that is gone, while another one takes them over (`estate`)

A name is made of hex digits of a digest and nothing else, so nobody's text ever becomes a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from forebay.kvstore.identity import KEY_BYTES
from forebay.tiers.base import ChunkId

GROUPS_MAX = 256
FOLDERS = 256
"""One for each first byte of a key. Few enough that making them is soon over (0.4 ms each on ext4), many
enough that a folder of a million chunks has 4,000 files."""
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{2}")


def chunk_name(chunk: ChunkId) -> str:
    """The file name of a chunk."""
    assert len(chunk.key) == KEY_BYTES and 0 <= chunk.group < GROUPS_MAX, chunk
    return f"{chunk.key.hex()}-{chunk.group:02x}"


def chunk_of_name(name: str) -> ChunkId | None:
    """The chunk that a file name stands for; None if it is no chunk's name."""
    if not _NAME.fullmatch(name):
        return None
    return ChunkId(int(name[65:], 16), bytes.fromhex(name[:64]))


def folder_name(first_byte: int) -> str:
    """Where chunks are whose key begins with this byte, relative to `chunks`."""
    return f"{first_byte >> 4:x}/{first_byte & 15:x}"


@dataclass(frozen=True, slots=True)
class Paths:
    """Paths in one directory."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def chunks(self) -> Path:
        return self.root / "chunks"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def namespaces(self) -> Path:
        return self.root / "namespaces"

    @property
    def beat(self) -> Path:
        return self.root / ".beat"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def requests(self) -> Path:
        return self.root / "requests"

    @property
    def estate(self) -> Path:
        return self.root / "estate"

    def chunk(self, chunk: ChunkId) -> str:
        """The path of a chunk's file, as text because the hot path wants no more."""
        name = chunk_name(chunk)
        return f"{self.root}/chunks/{name[0]}/{name[1]}/{name}"


def seat_paths(directory: Path, number: int) -> Paths:
    """Where the store with this seat has its own."""
    return Paths(directory / "seats" / str(number) if number else directory)


def all_seats(directory: Path) -> list[Paths]:
    """The seats that are there, whether or not anybody sits at them."""
    seats = directory / "seats"
    numbers = sorted(int(path.name) for path in seats.iterdir() if path.name.isdigit()) if seats.is_dir() else []
    return [Paths(directory), *(seat_paths(directory, number) for number in numbers)]


def seat_id(paths: Paths) -> str:
    """The random name of a seat's contents, from its lock file; empty if it has none."""
    try:
        return paths.lock.read_bytes()[:32].decode("ascii", "replace")
    except FileNotFoundError:
        return ""


def claims_folder(directory: Path) -> Path:
    """Where the seats' parts of the quota are noted."""
    return directory / "claims"
