"""What must hold, looked at after every tick, at every answer, at every fact, and at the end.

read, found     the value oracle: bytes of one committed version, or nothing; a hit covers what it promises
fact            what is announced is true at that moment
tick            bytes are conserved, the budget holds, no slot has two owners, what is pinned stays
views           a subscriber that has heard everything believes what is so
quiet           once faults have stopped: everything finishes, nothing is left over
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.errors import CorruptChunk, RequestRefused
from forebay.events.schema import CPU, low64
from forebay.kvstore.core import StoreCore
from forebay.kvstore.entry import Entry
from forebay.kvstore.facts import HostFact
from forebay.kvstore.header import MAGIC, SlotState, slot_state
from forebay.kvstore.identity import MATCH_UNIT, GroupGeometry, Namespace, chain
from forebay.kvstore.protocol import ChunkRead, Found
from forebay.testing.simulate.oracle import Write, written_units
from forebay.testing.simulate.plan import BRING_BACK
from forebay.testing.simulate.state import charged, evictable, fingerprint, leased, quarantined, residents, set_aside
from forebay.testing.simulate.tierbase import split_blob

if TYPE_CHECKING:
    from forebay.testing.simulate.node import SimDaemon
    from forebay.testing.simulate.pubsub import Subscriber
    from forebay.testing.simulate.worker import Prompt, Worker
    from forebay.testing.simulate.world import World

BUSY_REFUSALS = ("busy", "budget")
_MARK = struct.Struct("<8sIIQ")
LATE_S = 5.0
"""A lookup may take its deadline, and what checks and a slow loop add to it."""


@dataclass(frozen=True, slots=True)
class _Clear:
    namespace: bytes
    began: float
    ended: float

    def covers(self, write: Write) -> bool:
        """Was this committed for sure when the clear began?"""
        return write.acknowledged_at < self.began and self.namespace in (b"", write.namespace)


def needed_from(group: GroupGeometry, hit: int) -> int:
    """The first token that a query at `hit` looks at, worked out here and not by the store."""
    if group.kind == "recurrent":
        return max(0, hit - MATCH_UNIT)  # the state at the hit itself
    first = 0 if group.window is None else max(0, hit - (group.window - 1))
    return first - first % MATCH_UNIT


class Checks:
    """All checkers of one world. They report through `world.fail`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._cleared: list[_Clear] = []

    def _fail(self, why: str) -> None:
        self.world.fail(why)

    # --- answers ---------------------------------------------------------------------------------------

    def found(self, prompt: Prompt, limit: int, found: Found) -> None:
        """A lookup's answer promises no more than it brings."""
        self.world.count("hit_tokens", found.hit)
        if found.hit > limit or found.hit % MATCH_UNIT or found.hit > len(prompt.units) * MATCH_UNIT:
            self._fail(f"a hit of {found.hit} tokens, limit {limit}, prompt {len(prompt.token_ids)}")
        for index, group in enumerate(prompt.namespace.groups):
            have: set[int] = set()
            for chunk in found.chunks:
                if chunk.group == index and (group.kind != "recurrent" or chunk.start + chunk.tokens == found.hit):
                    have.update(range(chunk.start, chunk.start + chunk.tokens, MATCH_UNIT))
            missing = [at for at in range(needed_from(group, found.hit), found.hit, MATCH_UNIT) if at not in have]
            if missing:
                self._fail(f"a hit of {found.hit} tokens lacks {missing} of group {group.name}")

    def read(self, worker: Worker, prompt: Prompt, found: Found, chunk: ChunkRead, data: bytes) -> None:
        """Bytes that a reader takes for good."""
        group = prompt.namespace.groups[chunk.group]
        end = min(found.hit, chunk.start + chunk.tokens)
        units = written_units(group, prompt.units_of(chunk.start, end))
        wanted = data[: len(units) * group.granule_bytes]
        version = self.world.oracle.version_of(chunk.group, chunk.key, wanted, units)
        if version is None:
            self._fail(
                f"wrong bytes: tokens [{chunk.start}, {end}) of group {chunk.group}, key {chunk.key.hex()[:12]}, "
                f"promoted from {chunk.promoted or 'nowhere'}"
            )
            return
        write = self.world.oracle.writes[chunk.group, chunk.key][version]
        for clear in self._cleared:
            if clear.covers(write) and clear.ended < worker.asked_at:
                self._fail(f"a chunk that was cleared is back, promoted from {chunk.promoted or 'nowhere'}")

    def checksum_differs(self, worker: Worker, chunk: ChunkRead) -> None:
        """A pinned chunk whose bytes don't match: only a memory that rots may do that."""
        self.world.count("reads.checksum_differs")
        if not self.world.rotted:
            self._fail(f"a pinned chunk of {worker.node.name} has other bytes than its checksums say")

    def time_taken(self, asked_at: float, deadline_ms: int) -> None:
        """A lookup answers by its deadline, give or take what disturbs the daemon."""
        if (
            self.world.healthy
            and self.world.loop.time() - max(asked_at, self.world.healed_at) > deadline_ms / 1e3 + LATE_S
        ):
            self._fail(f"a lookup with a deadline of {deadline_ms} ms took {self.world.loop.time() - asked_at:.1f} s")

    def refused(self, worker: Worker, error: RequestRefused) -> None:
        """No request of a well-behaved client is refused, but for a full house."""
        if error.code not in BUSY_REFUSALS:
            self._fail(f"a request of {worker.process.name} was refused: {error.code}, {error}")

    def committed(self, count: int, sent: int, reserved_at: float) -> None:
        """A commit that is answered has committed all that it was sent, unless it took longer than a reservation."""
        if count != sent and self.world.loop.time() < reserved_at + self.world.plan.limits.reservation_s:
            self._fail(f"{sent} written chunks, {count} committed")
        self.world.count("commits.too_late", sent - count)

    def cleared(self, namespace: bytes, began: float) -> None:
        """A clear is answered: what was committed before it began is gone, in every tier.

        Only one host's clear says so, and only where nothing dies in the middle: what a tier was just writing when
        its host was killed may be found again.
        """
        if self.world.plan.nodes == 1 and not self.world.plan.faults & BRING_BACK:
            self.world.count("clears.checked")
            self._cleared.append(_Clear(namespace, began, self.world.loop.time()))

    def tiers_forgot(self) -> None:
        """Nothing is under way any more: no tier has anything left that a clear was told to forget."""
        if not self._cleared:
            return
        for tier, chunk, blob in self.world.tiers.stored():
            self.world.count("clears.tier_chunks")
            try:
                header, _, payload = split_blob(blob)
            except CorruptChunk:
                continue
            version = self.world.oracle.version_of(chunk.group, chunk.key, payload)
            if version is None:
                continue
            write = self.world.oracle.writes[chunk.group, chunk.key][version]
            if any(clear.covers(write) for clear in self._cleared):
                self._fail(f"tier {tier} still has a chunk of tokens [{header.start}, {header.end}) that was cleared")

    # --- facts -----------------------------------------------------------------------------------------

    def fact(self, daemon: SimDaemon, fact: HostFact) -> None:
        """What the core tells is so when it tells it."""
        core, entry = daemon.core, fact.entry
        assert core is not None
        if not daemon.process.alive:
            return
        self.world.count("facts")
        if fact.stored:
            self._stored(daemon, core, entry)
        elif entry.state is not SlotState.RETIRED or core.table.get(entry.group, entry.key) is entry:
            self._fail(f"a removal ({fact.reason}) is told of a chunk that is still there")
        elif fact.reason in ("evicted", "quota") and entry.pins:
            self._fail(f"a chunk with {entry.pins} pins is evicted")
        elif fact.reason == "replaced" and not self.world.rotted and not self._replaced(core, entry):
            self._fail("a chunk is told to be replaced, and no fuller one of its kind is there")

    def _stored(self, daemon: SimDaemon, core: StoreCore, entry: Entry) -> None:
        view = daemon.pool.views[entry.slot.extent]
        memory = view[entry.slot.offset : entry.slot.offset + 64]
        if entry.state is not SlotState.COMMITTED or core.table.get(entry.group, entry.key) is not entry:
            self._fail("a chunk is announced that isn't committed")
        elif slot_state(memory) is not SlotState.COMMITTED or not entry.verified:
            self._fail("a chunk is announced that the pool doesn't hold, or that wasn't read yet")
        elif not self.world.rotted:
            data = bytes(view[entry.payload_offset : entry.payload_offset + entry.payload_length])
            if self.world.oracle.version_of(entry.group, entry.key, data) is None:
                self._fail(
                    f"a chunk is announced whose bytes nobody committed, from {sorted(entry.tiers) or 'a worker'}"
                )

    @staticmethod
    def _replaced(core: StoreCore, entry: Entry) -> bool:
        mine = entry.header()
        for other in core.table.children(entry.group, entry.parent):
            its = other.header()
            if len(its.tokens) > len(mine.tokens) and its.tokens.startswith(mine.tokens) and its.extra == mine.extra:
                return True
        return False

    # --- after every tick ------------------------------------------------------------------------------

    def tick(self, daemon: SimDaemon) -> None:
        """One daemon's state after it did something."""
        core = daemon.core
        if core is None or not daemon.process.alive:
            return
        self.world.count("ticks")
        seen = fingerprint(core)
        if (daemon.pool.writes + core.aside.moves, seen) == (daemon.checked_at, daemon.checked_as):
            return  # nothing of what is looked at here has moved
        daemon.checked_as = seen
        self.world.count("ticks.changed")
        moved = daemon.pool.writes + core.aside.moves
        if moved != daemon.checked_at:
            # Whatever moves a slot writes to the pool, or sets it aside: else the costly half has nothing new to see.
            daemon.checked_at = moved
            self.world.count("ticks.full")
            self._slots(daemon, core)
        self._accounts(daemon, core)

    def _slots(self, daemon: SimDaemon, core: StoreCore) -> None:
        slots, held = core.place.slots, [*quarantined(core), *set_aside(core)]
        budget = self.world.plan.extents * self.world.plan.extent_bytes
        if slots.total_bytes > budget or len(daemon.pool.views) > self.world.plan.extents:
            self._fail(f"{slots.total_bytes} bytes of extents, a budget of {budget}")
        owners = {entry.slot: entry for entry in residents(core)}
        for entry in core.table:
            if owners.setdefault(entry.slot, entry) is not entry:
                self._fail(f"slot {entry.slot} belongs to two chunks")
        for entry in owners.values():
            self._resident(daemon.pool.views[entry.slot.extent], entry)
        if len(set(held)) != len(held) or any(slot in owners for slot in held):
            self._fail("a slot that is quarantined or set aside belongs to somebody else as well")
        used = 0
        for extent in slots.extents.values():
            used += extent.used
            if extent.used + len(extent.free) != extent.capacity:
                self._fail(
                    f"extent {extent.id} has {extent.capacity} slots, {extent.used} used, {len(extent.free)} free"
                )
        if used != len(owners) + len(held):
            self._fail(f"{used} slots in use, by {len(owners)} chunks and {len(held)} in quarantine or set aside")
        for slot in (*owners, *held):
            if slot.offset in slots.extents[slot.extent].free:
                self._fail(f"slot {slot} is in use and free")

    def _resident(self, view: memoryview, entry: Entry) -> None:
        magic, state, _, generation = _MARK.unpack_from(view, entry.slot.offset)
        if (magic, state, generation) != (MAGIC, entry.state, entry.generation):
            self._fail(
                f"slot {entry.slot} is {state} of generation {generation} in the pool, "
                f"{entry.state!r} of {entry.generation} in the table"
            )

    def _accounts(self, daemon: SimDaemon, core: StoreCore) -> None:
        aside = core.aside.bytes + core.aside.lent_bytes
        if not core.aside.bytes <= aside <= core.aside.budget:
            self._fail(f"{aside} bytes are set aside, {core.aside.budget} may be")
        reserved = promoting = unpinned = 0
        for entry in core.table:
            if entry.state is SlotState.RESERVED:
                reserved += entry.slot_bytes
            elif entry.state is SlotState.PROMOTING:
                promoting += entry.slot_bytes
            elif entry.pins == 0:
                unpinned += 1
        if (core.reserved_bytes, core.promoting_bytes) != (reserved, promoting):
            self._fail(
                f"{core.reserved_bytes} bytes reserved and {core.promoting_bytes} promoting, "
                f"the table has {reserved} and {promoting}"
            )
        going = evictable(core)
        if any(entry.pins or entry.state is not SlotState.COMMITTED for entry in going.entries):
            self._fail("a chunk that somebody holds may be evicted")
        if {len(set(going.entries)), going.counted} != {unpinned}:
            self._fail(
                f"{len(going.entries)} chunks may be evicted, {going.counted} are counted, {unpinned} are unpinned"
            )
        if charged(core) != core.place.slots.used_bytes:
            self._fail(f"tenants are charged {charged(core)} bytes, {core.place.slots.used_bytes} are in use")
        if daemon.service is not None:
            self._holders(daemon, core)

    def _holders(self, daemon: SimDaemon, core: StoreCore) -> None:
        assert daemon.service is not None
        pins: dict[Entry, int] = {}
        hard = 0
        for entry in leased(daemon.service):
            pins[entry] = pins.get(entry, 0) + 1
        for entry in core.table:
            if core.pins.is_hard(entry):
                hard += entry.slot_bytes
                pins[entry] = pins.get(entry, 0) + 1
        if hard != core.pins.hard_bytes or hard > core.limits.pin_share * core.place.slots.total_bytes:
            self._fail(f"{hard} bytes are pinned hard, the account says {core.pins.hard_bytes}; or that is too much")
        for tier in daemon.service.cascade.tiers.values():
            largest, held = 0, 0
            for entry in tier.stores.values():
                pins[entry] = pins.get(entry, 0) + 1
                length = entry.payload_offset - entry.slot.offset + entry.payload_length
                largest, held = max(largest, length), held + length
            if held != tier.store_bytes:
                self._fail(f"tier {tier.name} keeps {held} bytes pinned, its account says {tier.store_bytes}")
            if held > max(core.limits.cascade_share * core.place.slots.total_bytes, largest):
                self._fail(f"tier {tier.name} keeps {held} bytes pinned, more than its share")
        for entry, count in pins.items():
            if entry.pins < count or entry.state not in (SlotState.COMMITTED, SlotState.RETIRED):
                self._fail(f"a chunk that {count} hold has {entry.pins} pins and is {entry.state.name}")

    # --- subscribers -----------------------------------------------------------------------------------

    def view(self, subscriber: Subscriber) -> bool:
        """If it has heard everything and knows of no gap, it believes what is so. True if it could be compared."""
        daemon = subscriber.node.running
        if daemon is None or daemon.service is None or subscriber.gap or not subscriber.caught_up:
            return False
        announcer = daemon.service.announcer
        stream = announcer.streams.endpoints() if announcer.streams is not None else []
        if subscriber.stream >= len(stream) or announcer._pending:
            return False
        info = stream[subscriber.stream]
        if (
            subscriber.subscriber.last_seq != info.stats.next_seq - 1
            or subscriber.subscriber.epoch != daemon.service.boot.hex()
        ):
            return False
        self.world.count("views_compared")
        namespace = daemon.service.core.namespaces[info.namespace]
        if self.world.rotted:
            return True  # what a rotten header stands for can't be counted from the table
        believed = subscriber.view.get(CPU, set())
        true = {low64(unit) for unit in announced_units(daemon.service.core, namespace)}
        if believed != true:
            self._fail(
                f"{subscriber.process.name} believes in {len(believed)} units of host memory, {len(true)} are there; "
                f"{len(believed - true)} too many, {len(true - believed)} too few"
            )
        return True

    # --- the end ---------------------------------------------------------------------------------------

    def left_over(self, daemon: SimDaemon) -> dict[str, int]:
        """What a daemon still holds or does. Once every client has gone and time has passed, that is nothing."""
        service = daemon.service
        if service is None:
            return {"a start": 1}
        core: StoreCore = service.core
        left: dict[str, int] = {}
        left["reserved bytes"] = core.reserved_bytes
        left["promoting bytes"] = core.promoting_bytes
        left["quarantined slots"] = len(quarantined(core))
        left["pins"] = sum(entry.pins for entry in residents(core))
        left["unfinished chunks"] = sum(entry.state is not SlotState.COMMITTED for entry in core.table)
        left["connections"] = len(service.connections)
        left["loads"] = len(service.cascade.loading)
        for tier in service.cascade.tiers.values():
            left[f"jobs of {tier.name}"] = len(tier.stores) + len(tier.loads)
        left["arrivals waited for"] = len(service.reader._arrivals)
        left["checks under way"] = len(service.reader._checks)
        left["bytes in quarantine"] = core.quarantined_bytes
        left["long work"] = len(core.chores)
        left["kept chunks"] = len(core.pins)
        left["leases"] = len(core.leases)
        left["slots set aside"] = len(core.aside.slots)
        left["failures in the background"] = int(core.counters.values.get("store.background_failures", 0))
        return {name: count for name, count in left.items() if count}


def announced_units(core: StoreCore, namespace: Namespace) -> set[bytes]:
    """Unit keys that a router may believe in, counted from the table alone: in all full groups, and in all window
    groups too or before such a unit."""
    groups = namespace.groups
    full = [i for i, group in enumerate(groups) if group.kind in ("full", "latent")] or list(range(len(groups)))
    windows = [i for i in range(len(groups)) if i not in full]
    have: dict[bytes, set[int]] = {}
    parents: dict[bytes, bytes] = {}
    for entry in core.table:
        if entry.state is SlotState.COMMITTED and entry.announced and entry.namespace == namespace.id:
            before, header = entry.parent, entry.header()
            for key in chain(entry.parent, header.tokens, header.extra):
                have.setdefault(key, set()).add(entry.group)
                parents[key] = before
                before = key
    base = {key for key, groups_there in have.items() if groups_there.issuperset(full)}
    found = {key for key in base if have[key].issuperset(windows)}
    todo = list(found)
    while todo:
        parent = parents[todo.pop()]
        if parent in base and parent not in found:
            found.add(parent)
            todo.append(parent)
    return found
