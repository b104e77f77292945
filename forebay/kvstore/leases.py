"""Leases: what lookups promised, to which connections, and until when. Pure.

    lease 7    hold of the scheduler's connection   [chunk, chunk, chunk]   until 12:00:05
               hold of rank 0's connection          [chunk,  -   , chunk]   until 12:00:09

Each connection that has taken a lease, or joined it, has a hold of its own, with pins of its own: chunks are pinned
until every hold has let go of them, so a lease ends when the last of its connections closes, releases or runs out
of time. Only connections of one group (an engine's processes) can join each other's leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from forebay.kvstore.chores import STEP_CHUNKS, Chores
from forebay.kvstore.deadlines import Deadlines
from forebay.kvstore.entry import Entry

if TYPE_CHECKING:
    from forebay.kvstore.aside import Aside

AT_ONCE = 256
"""So many chunks are let go of within a call; what is more goes in steps."""


@dataclass(slots=True, eq=False)
class Hold:
    """One connection's share of a lease. A chunk that was let go of early is None in `entries`. Under one with room set
    `aside` there will be more."""

    lease: int
    client: Client
    hit: int
    entries: list[Entry | None]
    left: int
    bucket: int = 0
    aside: Aside | None = None

    @property
    def lives(self) -> bool:
        """Has it not ended?"""
        return self.client.leases.get(self.lease) is self


@dataclass(slots=True, eq=False)
class Reservation:
    """A slot that a client may write. `retain_s` is how long its chunk is to be retained once it is there. With a
    `shared` write it is one part of several, which may be `written` before the others are. `hold` is the lease that
    keeps the chunk from its commit on."""

    id: int
    client: Client
    entry: Entry
    retain_s: float = 0.0
    bucket: int = 0
    shared: SharedWrite | None = None
    written: bool = False
    hold: Hold | None = None


@dataclass(slots=True, eq=False)
class SharedWrite:
    """A chunk that `writers` connections of one group write, each its part (a rank its heads, say) into the same slot.

        rank 0   reserve ---- write ---- written
        rank 1        reserve ------ write ------ written: the last one, so it hashes the whole chunk and commits it

    It becomes visible once, or not at all: when one of them gives up, it ends for all, and its slot is held until
    each of those that had not finished says so or is dead. `parts` are reservations that were given out, by id.
    """

    group: bytes
    writers: int
    parts: dict[int, Reservation] = field(default_factory=dict)

    def may_join(self, client: Client, writers: int) -> bool:
        """Is a part of it still to be given out, and is this the engine, and not a connection that has one?"""
        return (
            writers == self.writers
            and client.group == self.group
            and len(self.parts) < self.writers
            and all(part.client is not client for part in self.parts.values())
        )

    @property
    def complete(self) -> bool:
        """Has everybody written?"""
        return len(self.parts) == self.writers and all(part.written for part in self.parts.values())


@dataclass(slots=True, eq=False)
class Client:
    """What one connection holds. It ends with the connection. `id` names the process, `group` the engine,
    `namespaces` are those that it has registered. With a `tenant` it sees what is that tenant's, and no more."""

    id: bytes
    group: bytes = b""
    tenant: str | None = None
    leases: dict[int, Hold] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    namespaces: dict[bytes, None] = field(default_factory=dict)
    gone: bool = False


class Leases:
    """All leases of a store. Pins and unpins through the core; long work goes to its chores. `free(aside)` gives back
    in steps what was set aside under a lease that has ended."""

    def __init__(
        self,
        pin: Callable[[Sequence[Entry]], None],
        unpin: Callable[[Sequence[Entry]], None],
        chores: Chores,
        holds_max: int,
        free: Callable[[Aside], Iterator[int]] = lambda aside: iter(()),
    ) -> None:
        self._pin, self._unpin, self._chores, self._free = pin, unpin, chores, free
        self._holds_max = holds_max
        self._groups: dict[bytes, dict[Client, None]] = {}
        self.deadlines: Deadlines[Hold] = Deadlines()

    def __len__(self) -> int:
        """How many holds there are."""
        return len(self.deadlines)

    def attach(self, client: Client) -> None:
        """Others of its group may join this connection's leases from now on."""
        self._groups.setdefault(client.group or client.id, {})[client] = None

    def grant(self, client: Client, lease: int, hit: int, entries: Sequence[Entry], until: float) -> Hold | None:
        """Pin entries for a client; None if it may hold no more leases."""
        assert not client.gone, "a connection that has ended is promised nothing"
        if len(client.leases) >= self._holds_max:
            return None
        self._pin(entries)
        hold = client.leases[lease] = Hold(lease, client, hit, list(entries), len(entries))
        hold.bucket = self.deadlines.set(hold, until)
        return hold

    def join(self, client: Client, lease: int, until: float) -> Hold | None:
        """A hold of this client on a lease of its group; what all its holders have let go of is not in it.

        A client that has one already keeps it, with the new deadline. None: there is no such lease (any more).
        """
        mine = client.leases.get(lease)
        if mine is not None:
            self.deadlines.drop(mine, mine.bucket)
            mine.bucket = self.deadlines.set(mine, until)
            return mine
        others = self._held(client, lease)
        if not others:
            return None
        return self.grant(client, lease, others[0].hit, _union(others), until)

    def find(self, client: Client, lease: int) -> Hold | None:
        """The hold of a lease with room set aside, if this client has it, or could join it."""
        mine = client.leases.get(lease)
        held = self._held(client, lease) if mine is None or mine.aside is None else [mine]
        return next((hold for hold in held if hold.aside is not None), None)

    def _held(self, client: Client, lease: int) -> list[Hold]:
        return [c.leases[lease] for c in self._groups.get(client.group or client.id, ()) if lease in c.leases]

    def release(self, client: Client, leases: Iterable[int]) -> None:
        """End a client's holds of leases. Unknown ones are ignored: they ended otherwise."""
        at_once = AT_ONCE
        for lease in leases:
            hold = client.leases.pop(lease, None)
            if hold is not None:
                self.deadlines.drop(hold, hold.bucket)
                at_once -= hold.left + (0 if hold.aside is None else hold.aside.count)
                self._let_go_of(hold, at_once >= 0)

    def release_chunks(self, client: Client, lease: int, indices: Iterable[int]) -> None:
        """Let go of some chunks of a lease, by their places in it. What was let go of already is ignored."""
        hold = client.leases.get(lease)
        if hold is None:
            return
        given: list[Entry | None] = []
        for index in indices:
            entry = hold.entries[index] if 0 <= index < len(hold.entries) else None
            if entry is not None:
                hold.entries[index] = None
                given.append(entry)
        hold.left -= len(given)
        part = Hold(lease, client, 0, given, len(given))
        self._let_go_of(part, len(given) <= AT_ONCE)
        if hold.left == 0 and hold.aside is None:
            self.release(client, [lease])

    def expire_one(self, now: float) -> bool:
        """End a hold whose time is over; False if there is none."""
        hold = self.deadlines.take(now)
        if hold is None:
            return False
        del hold.client.leases[hold.lease]
        self._let_go_of(hold, at_once=False)
        return True

    def _let_go_of(self, hold: Hold, at_once: bool) -> None:
        steps = self._unpin_all(hold)
        if not at_once:
            self._chores.add(steps)
            return
        for _ in steps:
            pass

    def _unpin_all(self, hold: Hold) -> Iterator[int]:
        """Deepest chunks first, so that a chain's head is the last to be evicted."""
        entries = [entry for entry in hold.entries if entry is not None]
        hold.entries, hold.left = [], 0
        entries.sort(key=attrgetter("start"), reverse=True)
        for first in range(0, len(entries), STEP_CHUNKS):
            some = entries[first : first + STEP_CHUNKS]
            self._unpin(some)
            yield len(some)
        if hold.aside is not None:
            yield from self._free(hold.aside)

    def detach(self, client: Client) -> Iterator[int]:
        """The connection is gone: nobody can join what it held any more. The steps let go of it."""
        group = client.group or client.id
        if client in self._groups.get(group, ()):
            del self._groups[group][client]
            if not self._groups[group]:
                del self._groups[group]
        return self._let_go(client)

    def _let_go(self, client: Client) -> Iterator[int]:
        while client.leases:
            _, hold = client.leases.popitem()
            self.deadlines.drop(hold, hold.bucket)
            yield from self._unpin_all(hold)


def _union(holds: Sequence[Hold]) -> list[Entry]:
    """What is still pinned of a lease by any of its holders, in the order of the whole."""
    fullest = max(holds, key=lambda hold: hold.left)
    if fullest.left == len(fullest.entries) or len(holds) == 1:
        return [entry for entry in fullest.entries if entry is not None]
    found = dict.fromkeys(entry for hold in holds for entry in hold.entries if entry is not None)
    return sorted(found, key=lambda entry: (entry.group, entry.start))
