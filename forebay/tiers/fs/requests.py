"""What other stores of the directory ask of a seat: small files in its `requests/`, gone once they are done.

A clear has to reach chunks that somebody else has stored, also those that were stored a moment ago and aren't known
here yet. So it is left at every other seat, whether somebody is there or not. As long as it lies there nobody takes up
a chunk of that seat which it covers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.kvstore.header import ChunkHeader
from forebay.tiers.base import ChunkId, ClearScope

REQUESTS_MAX = 8
"""At one seat. More become a single one that clears the seat: more than was asked for, never less."""
GONE_MAX = 64


class Request(msgspec.Struct, frozen=True):
    """Clear `scope`, or look at the `gone` chunks, whose files were taken away for `reason`."""

    scope: ClearScope | None = None
    gone: list[ChunkId] = []
    reason: str = ""

    def covers(self, header: ChunkHeader) -> bool:
        """May a chunk with this header be meant? What follows a prefix can't be told from a header alone."""
        if self.scope is None:
            return ChunkId(header.group, header.key) in self.gone
        return self.scope.namespace in (b"", header.namespace) and self.scope.tenant in (None, header.tenant)


_EVERYTHING = Request(scope=ClearScope())


@dataclass(frozen=True, slots=True)
class Received:
    """A request and its file's name."""

    name: str
    request: Request


class Mailbox:
    """The folder of one seat. Methods block on small files; OSError passes through."""

    _serial = itertools.count()

    def __init__(self, folder: Path, token: str) -> None:
        self._folder = folder
        self._token = token
        self._read: dict[str, Request] = {}

    def leave(self, request: Request) -> None:
        """Put a request there, complete from the first moment."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        waiting = self._names()
        if len(waiting) >= REQUESTS_MAX:
            request = _EVERYTHING
        name = f"{next(self._serial):09d}-{self._token}"
        fresh = self._folder / f".{name}"
        fresh.write_bytes(msgspec.msgpack.encode(request))
        os.rename(fresh, self._folder / name)
        if request is _EVERYTHING:
            for old in waiting:
                self.done(old)

    def leave_gone(self, chunks: Sequence[ChunkId], reason: str) -> None:
        """Say that these chunks' files have been taken away. Only a hint, so a full box does without."""
        for at in range(0, len(chunks), GONE_MAX):
            if len(self._names()) >= REQUESTS_MAX // 2:
                return
            self.leave(Request(gone=list(chunks[at : at + GONE_MAX]), reason=reason))

    def _names(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._folder) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def waiting(self) -> Iterator[Received]:
        """All requests that lie there. One that can't be read clears everything: better too much than too little."""
        names = self._names()
        self._read = {name: request for name, request in self._read.items() if name in names}
        for name in names:
            if name not in self._read:
                try:
                    data = (self._folder / name).read_bytes()
                except FileNotFoundError:
                    continue
                try:
                    self._read[name] = msgspec.msgpack.decode(data, type=Request)
                except msgspec.DecodeError:
                    self._read[name] = _EVERYTHING
            yield Received(name, self._read[name])

    def covers(self, header: ChunkHeader) -> bool:
        """Is a chunk with this header asked to be cleared?"""
        return any(received.request.covers(header) for received in self.waiting())

    def done(self, name: str) -> None:
        """A request has been acted on."""
        (self._folder / name).unlink(missing_ok=True)
