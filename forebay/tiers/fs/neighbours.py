"""The other stores of one directory: what they have, who of them is alive, and which part of the quota is ours.

One thread looks at them four times a second, or, as long as there are none, whether there are any, every two seconds
(by the keeper). Nothing here is in the way of a store or of a hit in our own manifest.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
import msgspec

from forebay.tiers.base import ChunkId, ClearScope, TierChange
from forebay.tiers.fs.claims import Claim, Table
from forebay.tiers.fs.complaints import complain
from forebay.tiers.fs.estate import Estate
from forebay.tiers.fs.finder import HeaderCache
from forebay.tiers.fs.journal import CAME, LEFT, USED, Journal
from forebay.tiers.fs.manifest import Record
from forebay.tiers.fs.mirror import Mirror
from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.fs.paths import Paths, seat_id, seat_paths
from forebay.tiers.fs.presence import Onlooker, Pulse
from forebay.tiers.fs.requests import Mailbox
from forebay.tiers.fs.seating import Seat, headroom
from forebay.tiers.fs.shelf import Shelf

log = logging.getLogger("forebay.tier.fs")

POLL_S = 0.25
WORK_S = 0.05
"""Of each round at most so long for comparing names and moving files: a fifth of one core while there is much of it."""
PAPERS_BYTES = 128 << 10
"""What lock, beat, journal, requests and our part of the table take at most."""
ABSENT_S = 1.0
ABSENT_MAX = 4096
ASK_MAX = 256


@dataclass(frozen=True, slots=True)
class Place:
    """A chunk at another seat."""

    mirror: Mirror
    record: Record


class Neighbours:
    """See the module's text. `own` tells whether our own manifest has a chunk, `kick` makes the keeper trim,
    `settings` are the tier's options as far as they are needed here."""

    def __init__(
        self, seat: Seat, shelf: Shelf, outbox: Outbox, cache: HeaderCache, state: Path, *, directory: Path,
        quota: int, map_bytes: int, dead_after_s: float, takeover_s: float, kick: Callable[[], None],
    ) -> None:  # fmt: skip
        self.seat = seat
        self._shelf, self._outbox, self._cache, self._kick = shelf, outbox, cache, kick
        self._directory, self._state = directory, state / "others"
        self._quota, self._map_bytes = quota, map_bytes
        self._dead_after_s, self._takeover_s = dead_after_s, takeover_s
        self.mirrors: tuple[Mirror, ...] = ()
        self._all: dict[str, Mirror] = {}
        self._retiring: list[Iterator[int]] = []
        self._onlooker = Onlooker(seat.signs, dead_after_s)
        self._pulse = Pulse(seat.paths, seat.claims.token)
        self._journal = Journal(seat.paths.journal)
        self._requests = Mailbox(seat.paths.requests, seat.claims.token)
        self._applied: set[str] = set()
        self._estate: Estate | None = None
        self._moving: Iterator[int] | None = None
        self._given_up: set[str] = set()
        # Until when, and whether the disk has said so.
        self._absent: OrderedDict[ChunkId, tuple[float, bool]] = OrderedDict()
        self._absent_lock = threading.Lock()
        self._looking = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._well_at = time.monotonic()
        self._papers = False
        self.living = 1
        self.counts: Counter[str] = Counter()
        shelf.tell = self.tell
        shelf.well = self.well

    # --- asking: from any thread -----------------------------------------------------------------------

    def place(self, chunk: ChunkId) -> Place | None:
        """Where else the chunk is, as far as is known."""
        for mirror in self.mirrors:
            record = mirror.record(chunk)
            if record is not None:
                return Place(mirror, record)
        return None

    def children(self, group: int, parent: bytes, unit: bytes, limit: int) -> list[ChunkId]:
        """At most `limit` children of `parent` at all other seats."""
        found = [child for mirror in self.mirrors for child in mirror.children(group, parent, unit, limit)]
        return list(dict.fromkeys(found))[:limit]

    def found(self, chunk: ChunkId) -> Place | None:
        """Where else the chunk is; asks the disk if nobody has told."""
        place = self.place(chunk)
        return self.place(chunk) if place is None and self.on_disk(chunk) else place

    def on_disk(self, chunk: ChunkId) -> bool:
        """Has another seat a file of this name? Asks the disk."""
        return any(mirror.adopt(chunk) and mirror.record(chunk) is not None for mirror in self.mirrors)

    def unknown(self, chunk: ChunkId) -> bool:
        """Could a chunk that nothing is known of be there all the same?"""
        if not self.mirrors:
            return False
        with self._absent_lock:
            return self._absent.get(chunk, (0.0, False))[0] < time.monotonic()

    def passed_over(self, chunk: ChunkId) -> bool:
        """Is it taken to be absent for no better reason than that one before it is?"""
        with self._absent_lock:
            return not self._absent.get(chunk, (0.0, True))[1]

    def ask(self, chunks: Sequence[ChunkId]) -> None:
        """Look for files by name, in order, of each group up to the first that isn't there: without it, the later ones
        are of no use. What isn't found is taken to be absent for a second; by then the journals have told."""
        ended: set[int] = set()
        absent: dict[ChunkId, bool] = {}
        for chunk in chunks:
            if chunk.group not in ended and self.on_disk(chunk):
                self.counts["neighbour_asked"] += 1
                continue
            absent[chunk] = chunk.group not in ended
            ended.add(chunk.group)
        until = time.monotonic() + ABSENT_S
        with self._absent_lock:
            for chunk, looked in absent.items():
                self._absent[chunk] = until, looked
                self._absent.move_to_end(chunk)
            while len(self._absent) > ABSENT_MAX:
                self._absent.popitem(last=False)

    def well(self) -> bool:
        """May we publish? Not if we stood still so long that the others may think that we are dead."""
        return not self.seat.signs.beat or time.monotonic() - self._well_at < self._dead_after_s / 2

    # --- telling ---------------------------------------------------------------------------------------

    def tell(self, change: TierChange) -> None:
        """Something came to our seat or left it. The daemon hears of it unless another seat has the chunk as well."""
        self._journal.note(change.chunk, CAME if change.stored else LEFT)
        if self.place(change.chunk) is None:
            self._outbox.change(change)

    def loaded(self, chunk: ChunkId) -> None:
        """We have loaded a chunk of another seat: its owner shall know that it is in use."""
        self._journal.note(chunk, USED)

    def _used_elsewhere(self, chunk: ChunkId) -> None:
        if self._shelf.manifest.get(chunk) is not None:
            self.counts["used_elsewhere"] += 1
            self._shelf.touch([chunk], loaded=True)

    def _tell_of_mirror(self, mirror: Mirror, change: TierChange) -> None:
        if self._shelf.manifest.get(change.chunk) is not None:
            return
        if not any(other is not mirror and other.record(change.chunk) for other in self.mirrors):
            self._outbox.change(change)

    # --- clearing: from the loop's thread --------------------------------------------------------------

    def clear_scope(self, scope: ClearScope) -> Iterator[int]:
        """Clear at all other seats, whoever sits there, in steps: true after the last, files go a little later."""
        self.look()
        for mirror in self.mirrors:
            yield from mirror.leave_scope(scope)

    def forget(self, chunks: Sequence[ChunkId], reason: str) -> None:
        """Remove chunks at all other seats."""
        for mirror in self.mirrors:
            mirror.leave(chunks, reason)

    # --- the thread ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Find out whether there are others; from then on a thread follows them. Blocks on one small folder."""
        with self._looking:
            if self._thread is not None or not (self.seat.shared or self.seat.claims.exists()):
                return
            self._begin()

    def _begin(self) -> None:
        if not self.seat.shared:
            self.seat.share(self._quota)
            log.info("%s: another store uses this directory too", self._directory)
        ledger = self._shelf.ledger
        if not self._papers:
            self._papers, ledger.headroom = True, 0
            ledger.move(other=PAPERS_BYTES)
        self._shelf.device.fenced = self.seat.signs.beat
        self._journal.open()
        self.turn()
        self._thread = threading.Thread(target=self._work, name="fs-neighbours", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closing.wait(POLL_S) and self._outbox.failure is None:
            try:
                if self._outbox.has_room:
                    self.turn()
                else:  # the daemon takes no changes just now; the others shall see all the same that we live
                    self._present()
            except lmdb.Error as error:
                self._outbox.manifest_error(error)
            except OSError as error:
                complain("neighbours", "looking at the other stores failed, and goes on: %s", error)

    def turn(self) -> None:
        """One look at everything. OSError and lmdb.Error pass through; the next turn tries again."""
        table = self._present()
        if table is None:
            return
        self._journal.flush()
        self._answer()
        self._meet(table)
        for mirror in self.mirrors:
            mirror.follow()
        self._settle(table, table.seats[self.seat.number])
        self._work_on(table)

    def _present(self) -> Table | None:
        """Show that we live, if the seat is still ours: the table, or None if it isn't."""
        claims = self.seat.claims
        table = claims.read()
        mine = table.seats.get(self.seat.number)
        if mine is None and self.seat.paths.chunks.is_dir():
            self.seat.share(self._quota)  # the table was damaged: an heir would have taken the folder
            table = claims.read()
            mine = table.seats.get(self.seat.number)
        if mine is None or mine.token != claims.token or mine.heir:
            self._outbox.failure = OSError(
                f"another store has taken over {self.seat.paths.root}: this one had stood still for too long"
            )
            self._outbox.wake()
            return None
        if self.seat.signs.beat:
            self._pulse.beat()
        self._well_at = time.monotonic()
        return table

    def _answer(self) -> None:
        """Do what others have asked for; a request lies there until its files are gone."""
        names = set()
        for received in self._requests.waiting():
            names.add(received.name)
            request = received.request
            if received.name not in self._applied:
                if request.scope is not None:
                    for _ in self._shelf.remove_scope(request.scope):
                        self._kick()
                for chunk in request.gone:
                    self._shelf.vanished(chunk)
                self.counts["requests"] += 1
                self._kick()
                if self._shelf.ledger.open:  # else the manifest doesn't name all files yet: again when it does
                    self._applied.add(received.name)
            through = received.name in self._applied and not self._shelf.ledger.leaving
            if request.scope is None or through:
                self._requests.done(received.name)
        self._applied &= names

    def _meet(self, table: Table) -> None:
        """Have a mirror of each other seat, and none of those that are no more."""
        living, mirrors = 1, []
        for number, claim in table.seats.items():
            if number == self.seat.number:
                continue
            paths = seat_paths(self._directory, number)
            living += not claim.heir and self._onlooker.alive(number, paths)
            mirror = self._mirror(number, paths)
            if mirror is not None and not claim.heir:
                mirrors.append(mirror)
        self.living = living
        before, self.mirrors = self.mirrors, tuple(mirrors)
        for mirror in before:
            if mirror not in mirrors:
                self._onlooker.forget(mirror.number)
                self._retiring.append(mirror.retire())
                mirror.retired = True

    def _mirror(self, number: int, paths: Paths) -> Mirror | None:
        found = seat_id(paths)
        if len(found) < 32 or not paths.chunks.is_dir():
            return None  # it is only being made, or being taken over
        mirror = self._all.get(found)
        if mirror is not None and mirror.retired:
            if self._retiring:
                return None  # its end is still being told
            mirror.revive()
        if mirror is None:
            folder = self._state / found
            mirror = self._all[found] = Mirror(
                number, paths, folder, self._map_bytes, device=self._shelf.device, cache=self._cache,
                token=self.seat.claims.token, tell=self._tell_of_mirror, used=self._used_elsewhere,
            )  # fmt: skip
        return mirror

    # --- the quota -------------------------------------------------------------------------------------

    def _settle(self, table: Table, mine: Claim) -> None:
        """Equal parts for the living. Ours shrinks as soon as our files fit, and grows into what nobody claims."""
        if self._moving is not None:
            return  # our part grows file by file
        ledger, number = self._shelf.ledger, self.seat.number
        room = table.quota - headroom(table.quota)
        target = room // self.living
        if mine.bytes is None or mine.held > target:
            ledger.quota = target
            if ledger.used > target:
                self._kick()
                return

        def edit(seats: dict[int, Claim]) -> dict[int, Claim] | None:
            now = seats[number]
            free = room - Table(seats).claimed
            held = target if now.held >= target else min(target, now.held + max(0, free))
            return None if now.bytes == held else {**seats, number: msgspec.structs.replace(now, bytes=held)}

        if mine.bytes is None or mine.held != target:
            mine = self.seat.claims.change(edit).seats[number]
        ledger.quota = mine.held
        self._shelf.quarantine.limit_bytes(mine.held // 16)

    # --- the slow work ---------------------------------------------------------------------------------

    def _work_on(self, table: Table) -> None:
        until = time.monotonic() + WORK_S
        for mirror in self.mirrors:
            while time.monotonic() < until and (mirror.reap() or mirror.step()):
                pass
        while self._retiring and time.monotonic() < until:
            if next(self._retiring[0], None) is None:
                self._retiring.pop(0)
        if self._moving is None:
            self._look_for_estates(table)
        while self._moving is not None and time.monotonic() < until:
            if next(self._moving, None) is None:
                self._end_of_estate()

    def _look_for_estates(self, table: Table) -> None:
        for number, claim in table.seats.items():
            paths = seat_paths(self._directory, number)
            if number == self.seat.number or claim.token in self._given_up or self._onlooker.alive(number, paths):
                continue
            if self._onlooker.dead_for_s(number) < self._takeover_s:
                continue
            estate = Estate(number, claim.token, paths, self._shelf, self.seat.claims, self._lives)
            if estate.take():
                log.info("%s: its store is gone, its chunks come to %s", paths.root, self.seat.paths.root)
                self._estate, self._moving = estate, estate.move()
                return

    def _lives(self, token: str) -> bool:
        for number, claim in self.seat.claims.read().seats.items():
            if claim.token == token:
                return self._onlooker.alive(number, seat_paths(self._directory, number))
        return False

    def _end_of_estate(self) -> None:
        assert self._estate is not None
        if self._estate.left:
            self._given_up.add(self.seat.claims.read().seats[self._estate.number].token)
            complain("estate", "%d files in %s can't be read here and stay", self._estate.left, self._estate.paths.root)
        self.counts["estates"] += 1
        self._estate = self._moving = None

    # --- figures and end -------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Gauges and counters by name."""
        counts: Counter[str] = Counter(self.counts)
        for mirror in list(self._all.values()):
            counts.update(mirror.counts)
        return {
            **counts, "stores": self.living, "seat": self.seat.number, "neighbour_absent": len(self._absent),
            "neighbour_chunks": sum(mirror.manifest.count() for mirror in self.mirrors),
            "neighbours_complete": float(all(mirror.complete for mirror in self.mirrors)),
            "journal_waiting": self._journal.waiting,
        }  # fmt: skip

    def stop(self) -> None:
        """Look no more; tell what is still to be told."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def close(self) -> None:
        """Let go of the mirrors and say that we are gone. After `stop`, and when no other thread asks any more."""
        for mirror in self._all.values():
            mirror.close()
        if self._thread is None or self._outbox.failure is not None:
            return
        try:
            self._journal.flush()
            self.seat.leave()
        except OSError as error:
            complain("neighbours", "leaving the directory's table failed: %s", error)

    def forget_old(self) -> None:
        """At the start: what is known of seats that may have ended since is looked at anew, or removed."""
        ids = {seat_id(seat_paths(self._directory, number)) for number in self.seat.claims.read().seats}
        if self._state.is_dir():
            for folder in self._state.iterdir():
                if folder.name not in ids:
                    shutil.rmtree(folder, ignore_errors=True)
