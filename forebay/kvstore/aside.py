"""Room that is set aside: slots for chunks that aren't there yet, under a lease. Pure.

    set aside --> reserve --> commit      the chunk is pinned under the same lease, from that moment on
        |             `--> abort, given up   that slot is used up
        |
        | lend --> a tier brings a chunk, which is pinned for as long as the room lives
        |<-- take back    nobody else reads it, and the room is wanted for another; or it didn't come
        |
        `--> free                         the lease is released, runs out of time, or its connection ends

Whoever will need the room for sure asks for all of it before it begins, and is then never refused. The slots are real:
taken, paid for by the tenant, and nobody else's. A chunk that turns out to be stored already is pinned under the lease
as well, and a slot given back for it.

Tiers get up to `for_tiers` slots at a time. Beyond that they take ordinary room, and only where there is none the rest
of what is set aside, until one of what they have brought isn't read any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from forebay.kvstore.chores import REMOVAL
from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.header import SlotState
from forebay.kvstore.leases import Client, Hold
from forebay.kvstore.protocol import NewChunk

if TYPE_CHECKING:
    from forebay.kvstore.core import StoreCore


LOOKS_MAX = 256
"""So many chunks are looked at for one that nobody reads."""


@dataclass(slots=True, eq=False)
class Aside:
    """What one lease has: `slots` that are left of `slot_bytes` each, for whole chunks of a group of a namespace at
    `tenant`'s expense, and the chunks that it `keeps` by now. `lent` are chunks that tiers have brought or are bringing
    into such slots, those first that were looked at longest ago: no more than `for_tiers`, if it can be avoided."""

    namespace: bytes
    tenant: str
    group: int
    slot_bytes: int
    for_tiers: int = 0
    slots: list[SlotRef] = field(default_factory=list)
    keeps: set[Entry] = field(default_factory=set)
    lent: dict[Entry, None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Slots that nothing which was stored has used up."""
        return len(self.slots) + len(self.lent)


class Asides:
    """All room of a store that is set aside. `slots` are those that nobody writes yet, `bytes` their size; `moves`
    grows with each that comes or goes. `lent` says of what tiers brought whose room it is in, `lent_bytes` are those of
    its slots: the budget is for them as well, since they may come back at any time."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self.slots: dict[SlotRef, int] = {}
        self.lent: dict[Entry, Hold] = {}
        self.bytes = self.lent_bytes = 0
        self.moves = 0

    @property
    def budget(self) -> int:
        """Bytes that may be set aside at a time."""
        return int(self._core.limits.aside_share * self._core.place.slots.total_bytes)

    def ever(self, tenant: str, slot_bytes: int, count: int) -> bool:
        """Could so many slots be set aside in a store that has nothing else to do?"""
        extents = self._core.place.slots.extents.values()
        most = self._core.limits.aside_share * sum(extent.slots_of(slot_bytes) for extent in extents)
        quota = self._core.place.accounts.of(tenant).rule.quota
        return count <= most and (quota is None or count * slot_bytes <= quota)

    def now(self, slot_bytes: int, count: int) -> bool:
        """May so many be tried for now? Not every yes is kept; but what can't be had isn't evicted for."""
        place, wanted = self._core.place, count * slot_bytes
        evictable = sum(account.evictable for account in place.accounts)
        return self.bytes + self.lent_bytes + wanted <= self.budget and wanted <= place.slots.free_bytes + evictable

    def open(
        self, client: Client, namespace: bytes, tenant: str, group: int, slot_bytes: int, lease_s: float,
        for_tiers: int = 0,
    ) -> Hold | None:  # fmt: skip
        """A lease without slots so far; None if the client may hold no more of them."""
        hold = self._core.open_lease(client, lease_s)
        if hold is not None:
            hold.aside = Aside(namespace, tenant, group, slot_bytes, for_tiers)
        return hold

    def add(self, hold: Hold, count: int) -> bool:
        """Set `count` slots aside under this lease, evicting if need be; False as soon as one can't be had, or if the
        lease has ended meanwhile. What was set aside until then stays."""
        aside = hold.aside
        assert aside is not None
        for _ in range(count):
            may = hold.lives and self.bytes + self.lent_bytes + aside.slot_bytes <= self.budget
            slot = self._core.place.set_aside(aside.slot_bytes, aside.tenant) if may else None
            if slot is None:
                return False
            aside.slots.append(slot)
            self.slots[slot] = aside.slot_bytes
            self.bytes += aside.slot_bytes
            self.moves += 1
        return True

    # --- use -------------------------------------------------------------------------------------------

    def of(self, client: Client, lease: int, namespace: bytes, tenant: str, chunk: NewChunk) -> Hold | None:
        """The lease of this client's engine that this chunk may have room of."""
        hold = self._core.leases.find(client, lease) if lease else None
        aside = None if hold is None else hold.aside
        if aside is None or (aside.namespace, aside.tenant, aside.group) != (namespace, tenant, chunk.group):
            return None
        return hold if len(chunk.tokens) == 4 * self._core.namespaces[namespace].chunk_tokens else None

    def spend(self, hold: Hold | None, slot_bytes: int) -> SlotRef | None:
        """A slot that was set aside is to be written; None if there is none of this size."""
        return self._unused(hold, slot_bytes) or self._take_back(hold, slot_bytes)

    def _unused(self, hold: Hold | None, slot_bytes: int) -> SlotRef | None:
        aside = None if hold is None else hold.aside
        if aside is None or not aside.slots or aside.slot_bytes != slot_bytes:
            return None
        slot = aside.slots.pop()
        self._forget(slot)
        self._core.place.take_aside(slot)
        return slot

    # --- what tiers bring ------------------------------------------------------------------------------

    def for_tier(self, hold: Hold | None, slot_bytes: int) -> SlotRef | None:
        """A slot for a tier to fill, of those that are for that; None if there is none."""
        aside = None if hold is None else hold.aside
        if aside is None or len(aside.lent) >= aside.for_tiers:
            return self._take_back(hold, slot_bytes)
        # What came to nothing has used slots up: then there may be fewer than were to be for tiers.
        return self.spend(hold, slot_bytes)

    def last_for_tier(self, hold: Hold | None, slot_bytes: int) -> SlotRef | None:
        """The same where there is no ordinary room either: one that was to be for what will be stored."""
        return self._unused(hold, slot_bytes)

    def lend(self, hold: Hold, entry: Entry) -> None:
        """A tier is to bring this chunk into a slot of that room."""
        assert hold.aside is not None and entry not in self.lent
        self._core.pin(entry)
        hold.aside.lent[entry] = None
        self.lent[entry] = hold
        self.lent_bytes += entry.slot_bytes

    def lost(self, entry: Entry) -> Hold | None:
        """A chunk that tiers brought, or were to bring, is going: whose room its slot was of, if anybody's. That pins
        it no more, and so the caller has a pin to let go of."""
        hold = self.lent.pop(entry, None)
        if hold is not None:
            assert hold.aside is not None
            del hold.aside.lent[entry]
            self.lent_bytes -= entry.slot_bytes
        return hold

    def regain(self, hold: Hold) -> None:
        """Have a slot again for one that went with what was in it."""
        assert hold.aside is not None
        if hold.lives and not self.add(hold, 1):
            self._core.counters.add("store.aside_lost")

    def _take_back(self, hold: Hold | None, slot_bytes: int) -> SlotRef | None:
        """The slot of a chunk that a tier has brought, and nobody reads; of those that nobody wants kept, if there
        are any."""
        aside = None if hold is None else hold.aside
        if aside is None or aside.slot_bytes != slot_bytes:
            return None
        idle = self._idle(aside)
        if idle is None:
            return None
        self.lost(idle)
        self._core.unpin(idle)
        return self._core.place.evict_own(idle)

    def _idle(self, aside: Aside) -> Entry | None:
        kept: Entry | None = None
        for entry in list(islice(aside.lent, LOOKS_MAX)):
            if entry.state is SlotState.COMMITTED and entry.pins == 1:
                if entry not in self._core.place.kept:
                    return entry
                kept = kept or entry
            del aside.lent[entry]  # others are looked at first the next time
            aside.lent[entry] = None
        return kept

    # --- what is stored --------------------------------------------------------------------------------

    def keep(self, hold: Hold | None, entry: Entry) -> bool:
        """A chunk is there: it is pinned under the lease, if that still lives. Whether it is."""
        aside = None if hold is None else hold.aside
        if hold is None or aside is None or not hold.lives:
            return False
        if entry not in aside.keeps:
            aside.keeps.add(entry)
            self._core.pin(entry)
            hold.entries.append(entry)
            hold.left += 1
        return True

    def found(self, hold: Hold | None, entry: Entry) -> bool:
        """A chunk that was to be written is there already: kept, and what was set aside for it given back."""
        aside = None if hold is None else hold.aside
        if aside is None or not entry.verified:
            return False
        new = entry not in aside.keeps
        if not self.keep(hold, entry):
            return False
        if entry in aside.lent:  # a slot of the room is used up already
            self.lost(entry)
            self._core.unpin(entry)
        elif new and aside.slots and entry.slot_bytes == aside.slot_bytes:
            self._free(aside.slots.pop())
        return True

    def free(self, aside: Aside) -> Iterator[int]:
        """The lease has ended: give its slots back, in steps. What tiers brought is like any other chunk."""
        while aside.slots:
            self._free(aside.slots.pop())
            yield REMOVAL
        while aside.lent:
            entry = next(reversed(aside.lent))
            self.lost(entry)
            self._core.unpin(entry)
            yield 1

    def _free(self, slot: SlotRef) -> None:
        self._forget(slot)
        self._core.free_slot(slot)

    def _forget(self, slot: SlotRef) -> None:
        self.bytes -= self.slots.pop(slot)
        self.moves += 1
