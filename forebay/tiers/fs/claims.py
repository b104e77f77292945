"""Which part of the quota is whose, where several stores use one directory: a table, changed by compare and swap.

    <directory>/claims/<version>    the table of that version, whole from the first moment

A version is made by hard-linking a written file to the next number, which one process alone can do, on a network mount
too: no lock that could be left behind. The sum of all claims is never more than the quota, so nobody has to ask anybody
before a store. While there is no table, seat 0 has everything.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.errors import NotWritable

VERSIONS_KEPT = 8
RECENT_MAX = 64
RETRIES_MAX = 100


class Claim(msgspec.Struct, frozen=True):
    """One seat's part. `bytes` None: as much as `quota`, by a store that hasn't heard of others yet.

    `quota` is what this store was told that the whole directory may take; `token` names the process, and is empty
    once it has left; `heir` is the token of whoever is moving its files to a seat of its own.
    """

    bytes: int | None
    quota: int
    token: str
    heir: str = ""

    @property
    def held(self) -> int:
        """Bytes that its files may take."""
        return self.quota if self.bytes is None else self.bytes


class Table(msgspec.Struct, frozen=True, omit_defaults=True):
    """All seats by number. `recent` names the last changes, so that who made one can see whether it came in."""

    seats: dict[int, Claim]
    version: int = 0
    recent: list[str] = []

    @property
    def quota(self) -> int:
        """Of the directory: the least of what the stores were told."""
        return min((claim.quota for claim in self.seats.values()), default=0)

    @property
    def claimed(self) -> int:
        """The sum of all parts."""
        return sum(claim.held for claim in self.seats.values())


Edit = Callable[[dict[int, Claim]], dict[int, Claim] | None]
"""From the seats as they are to what they shall be; None leaves them."""


@dataclass(frozen=True, slots=True)
class _Versions:
    newest: int
    all: list[int]


class Claims:
    """The table's folder. Methods block on a few small files; OSError passes through."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self.token = token
        self._serial = itertools.count()

    def exists(self) -> bool:
        """Does anybody keep a table here?"""
        return self.folder.is_dir()

    def read(self) -> Table:
        """The newest table; an empty one if there is none. One that can't be read counts as empty: each store enters
        itself again."""
        for _ in range(RETRIES_MAX):
            versions = self._versions()
            if not versions.all:
                return Table({})
            try:
                data = (self.folder / _name(versions.newest)).read_bytes()
            except FileNotFoundError:
                continue  # newer ones have been made since
            try:
                found = msgspec.json.decode(data, type=Table)
            except msgspec.DecodeError:
                found = Table({})
            return Table(found.seats, versions.newest, found.recent)
        raise NotWritable(f"{self.folder} changes faster than it can be read: stop some of the stores that use it")

    def change(self, edit: Edit) -> Table:
        """Make the next table by `edit`, from whatever is the newest at that moment; returns what then holds."""
        for _ in range(RETRIES_MAX):
            table = self.read()
            seats = edit(dict(table.seats))
            if seats is None:
                return table
            name = f"{self.token}-{next(self._serial)}"
            after = Table(seats, table.version + 1, [*table.recent[1 - RECENT_MAX :], name])
            if self._make(after, name):
                return after
        raise NotWritable(f"{self.folder} changes faster than it can be written: stop some of the stores that use it")

    def _make(self, table: Table, name: str) -> bool:
        version = table.version
        self.folder.mkdir(mode=0o700, exist_ok=True)
        fresh = self.folder / f"new-{name}"
        fresh.write_bytes(msgspec.json.encode(table))
        try:
            try:
                os.link(fresh, self.folder / _name(version))
            except FileExistsError:
                # Over a network a link may have been made although its answer got lost.
                if os.stat(fresh).st_nlink < 2:
                    return False
            except PermissionError as error:
                raise NotWritable(
                    f"{self.folder}: this file system has no hard links, so only one store can use it at a time"
                ) from error
        finally:
            os.unlink(fresh)
        versions = self._versions()
        if versions.newest - version >= VERSIONS_KEPT:
            # Others were much faster: since then, or this number had been removed before and never was the newest.
            (self.folder / _name(version)).unlink(missing_ok=True)
            return name in self.read().recent
        for old in versions.all:
            if old <= version - VERSIONS_KEPT:
                (self.folder / _name(old)).unlink(missing_ok=True)
        return True

    def _versions(self) -> _Versions:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            names = []
        found = [int(name) for name in names if name.isdigit()]
        return _Versions(max(found, default=0), found)

    def forget(self, token: str) -> None:
        """Remove what a dead process left half made."""
        for path in self.folder.glob(f"new-{token}-*"):
            path.unlink(missing_ok=True)


def _name(version: int) -> str:
    return f"{version:012d}"
