"""What a store leaves that doesn't come back: another one of the directory moves its files to its own seat.

The dead one's part of the quota stays reserved until the last file is moved or gone, so at no moment is a byte counted
by nobody. Its folder of chunks is renamed first: should the dead one only have stood still, its next file finds no
folder to go to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.tiers.fs.claims import Claim, Claims
from forebay.tiers.fs.paths import Paths, chunk_of_name
from forebay.tiers.fs.requests import Mailbox
from forebay.tiers.fs.shelf import Shelf

STEP = 64


@dataclass
class Estate:
    """One dead seat, and taking it over. `token` is the dead process's, `living` tells whether a process is alive.

    `moved` is how many bytes have come to the heir's seat so far. One thread.
    """

    number: int
    token: str
    paths: Paths
    shelf: Shelf
    claims: Claims
    living: Callable[[str], bool]
    moved: int = 0
    left: int = 0

    def take(self) -> bool:
        """Become the heir; False if it isn't there any more, or somebody living is already."""

        def edit(seats: dict[int, Claim]) -> dict[int, Claim] | None:
            dead = seats.get(self.number)
            if dead is None or dead.token != self.token:
                return None
            if dead.heir not in ("", self.claims.token) and self.living(dead.heir):
                return None
            return {**seats, self.number: msgspec.structs.replace(dead, heir=self.claims.token)}

        now = self.claims.change(edit).seats.get(self.number)
        return now is not None and now.heir == self.claims.token

    def move(self) -> Iterator[int]:
        """Move all, and give the seat up. Yields after each step how many files it has looked at."""
        for folder in (self.paths.tmp, self.paths.quarantine, self.paths.namespaces):
            yield _empty(folder)
        while self._fence():
            yield from self._files()
            if self.left:
                return  # they can't be read here, and stay with the part that they take
            shutil.rmtree(self.paths.estate)
        self._end()
        yield 0

    def _fence(self) -> bool:
        """Take the chunks' folder away from its name; False if there is nothing more."""
        if self.paths.estate.is_dir():
            return True
        try:
            os.rename(self.paths.chunks, self.paths.estate)
        except FileNotFoundError:
            return False
        return True

    def _files(self) -> Iterator[int]:
        asked = Mailbox(self.paths.requests, self.claims.token)
        seen = 0
        for folder, _, names in os.walk(self.paths.estate):
            for name in names:
                path = f"{folder}/{name}"
                chunk = chunk_of_name(name)
                if chunk is None:
                    os.unlink(path)
                else:
                    taken = self.shelf.inherit(chunk, path, asked.covers)
                    self.moved += taken or 0
                    self.left += taken is None
                seen += 1
                if seen % STEP == 0:
                    yield STEP

    def _end(self) -> None:
        """The seat is empty: its part is free, and what came to ours stays ours."""

        def edit(seats: dict[int, Claim]) -> dict[int, Claim] | None:
            dead = seats.pop(self.number, None)
            if dead is None or dead.heir != self.claims.token:
                return None
            for number, claim in seats.items():
                if claim.token == self.claims.token:
                    more = min(self.moved, dead.held)
                    seats[number] = msgspec.structs.replace(claim, bytes=claim.held + more)
            return seats

        self.claims.forget(self.token)
        if self.number:
            shutil.rmtree(self.paths.root)
        else:
            for folder in (self.paths.journal, self.paths.requests):
                shutil.rmtree(folder, ignore_errors=True)
            self.paths.beat.unlink(missing_ok=True)
            os.truncate(self.paths.lock, 0)  # whoever comes gets a new id: the old one's manifest says nothing any more
        self.claims.change(edit)


def _empty(folder: Path) -> int:
    count = 0
    if folder.is_dir():
        for path in folder.iterdir():
            path.unlink()
            count += 1
    return count
