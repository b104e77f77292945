"""A store's place in a directory that others may use as well.

The first store has the whole directory and keeps no table. Whoever finds it taken sits down at a seat of its own, with
nothing of the quota until the others have made room. A store that comes back takes the seat that its manifest is of.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.errors import AlreadyRunning, ResourceError
from forebay.tiers.fs.claims import Claim, Claims, Table
from forebay.tiers.fs.opening import explained, make_folders, open_lock
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import Paths, claims_folder, seat_id, seat_paths
from forebay.tiers.fs.presence import Pulse, Signs, boot_id, read_beat, signs_for
from forebay.tiers.fs.state import directory_of

SEATS_MAX = 16
_LOCK_TRIES = 5
_LOCK_PAUSE_S = 0.01


def headroom(quota: int) -> int:
    """What is left free for the lock file, table and probe of a store that comes later."""
    return min(128 << 10, quota // 32)


@dataclass
class Seat:
    """Where this process sits. `lock` is its open lock file; `quota` what it may use until told otherwise.

    `shared`: there is a table of claims, so there are, or were, others.
    """

    number: int
    paths: Paths
    lock: int
    signs: Signs
    claims: Claims
    quota: int
    shared: bool

    def share(self, quota: int) -> None:
        """Enter ourselves in a table that somebody else has begun."""

        def edit(seats: dict[int, Claim]) -> dict[int, Claim] | None:
            mine = seats.get(self.number, Claim(None, quota, ""))
            if mine.token not in ("", self.claims.token):
                return None
            return {**seats, self.number: msgspec.structs.replace(mine, quota=quota, token=self.claims.token)}

        self.claims.change(edit)
        self.shared = True

    def leave(self) -> None:
        """Say that nobody sits here any more: the next one needn't wait for silence."""

        def edit(seats: dict[int, Claim]) -> dict[int, Claim] | None:
            mine = seats.get(self.number)
            if mine is None or mine.token != self.claims.token:
                return None
            return {**seats, self.number: msgspec.structs.replace(mine, token="")}

        if self.shared:
            self.claims.change(edit)
            self.paths.beat.unlink(missing_ok=True)


def take_seat(options: FsOptions) -> Seat:
    """Sit down. Raises NotWritable, NoSpace, and ResourceError if there are too many stores."""
    directory = options.path
    make_folders(Paths(directory))
    with explained(directory):
        signs = signs_for(options.liveness, directory)
        claims = Claims(claims_folder(directory), secrets.token_hex(8))
        if not signs.beat and not claims.exists():
            lock = _lock(Paths(directory), signs)
            if lock is not None:
                with _given_back(lock) as kept:
                    if not claims.exists():
                        kept.pop_all()
                        return Seat(0, Paths(directory), lock, signs, claims, options.quota_bytes, shared=False)
        return _take_shared(options, signs, claims)


def _take_shared(options: FsOptions, signs: Signs, claims: Claims) -> Seat:
    table = claims.read()
    for number in _candidates(options, signs, table):
        paths, before = seat_paths(options.path, number), table.seats[number]
        lock = _lock(paths, signs)
        if lock is None:
            continue

        def retake(seats: dict[int, Claim], number: int = number, before: Claim = before) -> dict[int, Claim] | None:
            if seats.get(number) != before:
                return None
            mine = msgspec.structs.replace(before, token=claims.token, quota=options.quota_bytes)
            return {**seats, number: mine}

        with _given_back(lock) as kept:
            found = claims.change(retake).seats.get(number)
            if found is not None and found.token == claims.token:
                seat = _seated(Seat(number, paths, lock, signs, claims, found.held, shared=True))
                kept.pop_all()
                return seat
    return _join(options, signs, claims)


def _candidates(options: FsOptions, signs: Signs, table: Table) -> Iterator[int]:
    """Seats that may be ours, or that nobody sits at and whose manifest is in the directory."""
    state = Path(options.state_dir) if options.state_dir else None
    known, last = (directory_of(state), holder_of(state)) if state else ("", "")
    for number, claim in sorted(table.seats.items()):
        paths = seat_paths(options.path, number)
        if claim.heir or (state is not None and (not known or known != seat_id(paths))):
            continue
        beat = read_beat(paths) if signs.beat else None
        here = signs.flock and beat is not None and beat.boot == boot_id()  # then its lock says it all
        if not signs.beat or here or claim.token in ("", last):
            yield number


def _join(options: FsOptions, signs: Signs, claims: Claims) -> Seat:
    quota = options.quota_bytes

    def edit(seats: dict[int, Claim]) -> dict[int, Claim]:
        if not seats and not signs.beat:
            seats = {0: Claim(None, quota, "")}  # whoever has locked it hasn't heard of a table
        number = next((n for n in range(SEATS_MAX) if n not in seats), None)
        if number is None:
            raise ResourceError(
                f"{SEATS_MAX} stores use {options.path} already: stop one, or give this one a directory of its own"
            )
        return {**seats, number: Claim(0 if seats else quota - headroom(quota), quota, claims.token)}

    table = claims.change(edit)
    number = next(n for n, claim in table.seats.items() if claim.token == claims.token)
    paths = seat_paths(options.path, number)
    paths.root.parent.mkdir(mode=0o700, exist_ok=True)
    make_folders(paths)
    lock = _lock(paths, signs)
    if lock is None:
        raise AlreadyRunning(f"another store sits at {paths.root}: start this one again")
    with _given_back(lock) as kept:
        seat = _seated(Seat(number, paths, lock, signs, claims, table.seats[number].held, shared=True))
        kept.pop_all()
    return seat


@contextmanager
def _given_back(lock: int) -> Iterator[ExitStack]:
    """Close this lock file at the end, whatever happens, unless it is taken out: an open one makes whoever tries
    again in this process take its own seat for somebody else's."""
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        yield stack


def _seated(seat: Seat) -> Seat:
    make_folders(seat.paths)
    if seat.signs.beat:
        Pulse(seat.paths, seat.claims.token).beat()
    return seat


def _lock(paths: Paths, signs: Signs) -> int | None:
    """The open lock file, locked where locks count; None if somebody else has it."""
    descriptor = open_lock(paths)
    if not signs.flock:
        return descriptor
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if attempt + 1 < _LOCK_TRIES:  # somebody may only be looking whether it is locked
                time.sleep(_LOCK_PAUSE_S)
    os.close(descriptor)
    return None


def holder_of(state_dir: Path) -> str:
    """The token of the process that used this state directory last; empty if none has."""
    try:
        return (state_dir / "holder").read_text()
    except FileNotFoundError:
        return ""


def lock_state(state_dir: Path) -> int:
    """An open descriptor that keeps every other process from using this state directory. Raises AlreadyRunning."""
    with explained(state_dir):
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AlreadyRunning(
            f"another store keeps its manifest in {state_dir} already: stop it, or give this one a state_dir of its own"
        ) from error
    return descriptor
