"""The core against a dumb model: clients that store, read, share, stop, die and wake up again; tiers that fail; pins,
retention, room set aside, clears; time that passes; and restarts that find the pool as it was.

The model knows the only right bytes of every key, who was promised what, and until when. What must hold after every
step: a hit serves exactly the right bytes, whoever scribbles into slots that were given up; what is promised doesn't
move; no slot belongs to two; budgets hold; every count adds up; facts equal the table.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.errors import RequestRefused
from forebay.kvstore.cascade import Load
from forebay.kvstore.clearing import Prefix, Scope
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState, decode_header, slot_generation, slot_state
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.lookup import (
    Match,
    Promotions,
    Room,
    match,
    offer,
    pin,
    pin_places,
    place_promotions,
    promotions,
    queries,
)
from forebay.kvstore.pins import Owner
from forebay.kvstore.slots import slot_bytes_for
from forebay.tiers.base import JobResult, StoreJob
from tests.kvstore.model import LIMITS, TIER, TIER_OWNER, Granted, Leased, Promised, Waiting, World
from tests.kvstore.support import CHUNK

EXAMPLES = int(os.environ.get("FOREBAY_MODEL_EXAMPLES", "120"))
STEPS = int(os.environ.get("FOREBAY_MODEL_STEPS", "50"))
TENANTS = ("", "acme", "other")

SYSTEM = list(range(2 * CHUNK))
PROMPTS = [
    SYSTEM[:16], SYSTEM[:CHUNK], SYSTEM, SYSTEM + [1] * 16, SYSTEM + [1] * CHUNK, SYSTEM + [1] * CHUNK + [2] * 40,
    SYSTEM + [3] * 40, SYSTEM[:16] + [5] * 48, [9] * 20, [9] * 3 * CHUNK, [8] * 4 * CHUNK,
]  # fmt: skip
prompts = st.sampled_from(PROMPTS)
"""Few, so that they meet: tails and fuller chunks, branches, and more than the pool holds."""
who = st.integers(0, 2)
dice = st.integers(0, 1 << 30).map(random.Random)
seldom = st.sampled_from([False] * 5 + [True])
"""What wipes so much that nothing else would be reached if it happened as often as the rest."""


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.w = World(extents=5)
        self.hard: dict[tuple[Entry, str], float] = {}
        self.unwanted: set[int] = set()

    @rule(tokens=prompts, who=who, tenant=st.sampled_from(TENANTS), retain=st.sampled_from([0, 500]), read=who)
    def store(self, tokens: list[int], who: int, tenant: str, retain: float, read: int) -> None:
        before = len(self.w.granted)
        self.reserve(tokens, who, tenant, retain)
        for granted in self.w.granted[before:]:
            self._commit(granted)
        del self.w.granted[before:]
        if read:
            self.look_up(tokens, read, 200, 1.0)

    # --- writing ---------------------------------------------------------------------------------------

    @rule(tokens=prompts, who=who, tenant=st.sampled_from(TENANTS), retain=st.sampled_from([0, 0, 5, 500]))
    def reserve(self, tokens: list[int], who: int, tenant: str, retain: float) -> None:
        client = self.w.clients[who]
        for chunk in self.w.chunks(tokens):
            slot = self.w.core.reserve(client, self.w.namespace_id, tenant, chunk, retain_s=retain)
            if slot.status == "reserved":
                self.w.granted.append(Granted(client, slot, chunk))

    @precondition(lambda self: self.w.granted)
    @rule(dice=dice, count=st.integers(1, 8))
    def write_and_commit(self, dice: random.Random, count: int) -> None:
        for _ in range(min(count, len(self.w.granted))):
            self._commit(self.w.granted.pop(dice.randrange(len(self.w.granted))))

    @rule(
        who=who, tenant=st.sampled_from(TENANTS), group=st.integers(0, 1), count=st.integers(1, 5), lease=who,
        tiers=st.integers(0, 5),
    )  # fmt: skip
    def set_aside(self, who: int, tenant: str, group: int, count: int, lease: int, tiers: int) -> None:
        client, room = self.w.clients[who], self.w.core.aside
        size = slot_bytes_for(self.w.namespace.groups[group], CHUNK, CHUNK)
        if not (room.ever(tenant, size, count) and room.now(size, count)):
            return
        hold = room.open(client, self.w.namespace_id, tenant, group, size, lease, min(count, tiers))
        assert hold is not None
        if room.add(hold, count):
            until = self.w.now + self.w.core.lease_seconds(lease)
            self.w.asides.append(Promised(client, hold.lease, tenant, group, count, [], until))
        else:
            self.w.core.release(client, [hold.lease])

    @precondition(lambda self: self.w.asides)
    @rule(tokens=prompts, dice=dice)
    def store_with_it(self, tokens: list[int], dice: random.Random) -> None:
        """However full the pool is."""
        mine = dice.choice(self.w.asides)
        for chunk in self.w.chunks(tokens):
            if chunk.group != mine.group or len(chunk.tokens) != 4 * CHUNK:
                continue
            can_store, unused = mine.can_store, bool(mine.room.slots)
            lent = self.w.core.table.get(chunk.group, chunk.key) in mine.room.lent
            slot = self.w.core.reserve(mine.client, self.w.namespace_id, mine.tenant, chunk, aside=mine.lease)
            assert slot.status != "full" or not can_store
            if slot.status == "reserved":
                mine.left -= can_store
                self._commit(Granted(mine.client, slot, chunk))
            entry = self.w.core.table.get(chunk.group, chunk.key)
            if slot.status == "exists" and slot.kept and entry not in mine.kept:
                mine.left -= unused or lent
            if entry is not None and slot.kept and entry not in mine.kept:
                mine.kept.append(entry)

    @precondition(lambda self: self.w.asides)
    @rule(dice=dice)
    def give_it_back(self, dice: random.Random) -> None:
        mine = self.w.asides.pop(dice.randrange(len(self.w.asides)))
        self.w.core.release(mine.client, [mine.lease])

    def _commit(self, granted: Granted) -> None:
        chunk = granted.chunk
        data = self.w.payload(chunk.group, chunk.key, len(chunk.tokens) // 4)
        self.w.write(granted.slot, data)
        entry = self.w.core.commit(granted.client, granted.slot.reservation, self.w.checksums(chunk.group, data))
        assert entry is not None
        self.w.files.jobs += [job for _, job in self.w.cascade.store_jobs(entry)]
        self.w.core.unpin(entry)

    @precondition(lambda self: self.w.granted)
    @rule()
    def abort(self) -> None:
        granted = self.w.granted.pop()
        self.w.core.abort(granted.client, granted.slot.reservation)

    # --- reading ---------------------------------------------------------------------------------------

    @rule(tokens=prompts, who=who, limit=st.sampled_from([200, 200, 50, 15]), lease=st.sampled_from([0, 1, 50]))
    def look_up(self, tokens: list[int], who: int, limit: int, lease: float) -> None:
        prompt = self.w.prompt(tokens, limit, lease)
        while unread := self._unread(match(self.w.core, prompt)):
            for entry in unread:
                self.w.core.verified(entry, self.w.bytes_of(entry) == self.w.right(entry))
        client = self.w.clients[who]
        pinned = pin(self.w.core, client, match(self.w.core, prompt))
        assert pinned.hit <= limit and pinned.hit % MATCH_UNIT == 0
        for entry in pinned.entries:
            shared = min(pinned.hit, entry.end) - entry.start
            tokens_here = entry.header().tokens[: 4 * shared]
            assert tokens_here == prompt.tokens[4 * entry.start : 4 * (entry.start + shared)]
        if pinned.lease:
            until = self.w.now + self.w.core.lease_seconds(lease)
            self._leased(client, pinned.lease, list(pinned.entries), until)

    @staticmethod
    def _unread(found: Match) -> list[Entry]:
        return [entry for entry in found.serving(found.hit()) if not entry.verified]

    def _leased(self, client: object, lease: int, entries: list[Entry], until: float) -> None:
        for entry in entries:
            assert self.w.bytes_of(entry) == self.w.right(entry)
        seen = [(entry, self.w.bytes_of(entry), entry.generation) for entry in entries]
        self.w.leases.append(Leased(client, lease, seen, until))  # type: ignore[arg-type]

    @precondition(lambda self: self.w.leases)
    @rule(dice=dice, who=who)
    def join(self, dice: random.Random, who: int) -> None:
        leased, client = dice.choice(self.w.leases), self.w.clients[who]
        hold = self.w.core.join(client, leased.lease)
        same = (client.group or client.id) == (leased.client.group or leased.client.id)
        assert hold is None or same
        assert hold is not None or not same or not leased.seen or self.w.now >= leased.until
        if hold is not None:
            self.w.leases = [x for x in self.w.leases if x.client is not client or x.lease != leased.lease]
            entries = [entry for entry in hold.entries if entry is not None]
            self._leased(client, leased.lease, entries, self.w.now + LIMITS.lease_s)

    @precondition(lambda self: self.w.leases)
    @rule(dice=dice, part=st.booleans())
    def release(self, dice: random.Random, part: bool) -> None:
        leased = self.w.leases[at := dice.randrange(len(self.w.leases))]
        hold = leased.client.leases.get(leased.lease)
        if not part or hold is None:
            self.w.core.release(leased.client, [leased.lease])
            del self.w.leases[at]
            return
        index = dice.randrange(len(hold.entries))
        gone = hold.entries[index]
        self.w.core.leases.release_chunks(leased.client, leased.lease, [index, index, index + 1000])
        leased.seen = [seen for seen in leased.seen if seen[0] is not gone]

    # --- tiers -----------------------------------------------------------------------------------------

    @rule(tokens=prompts, dice=dice)
    def ask_tiers(self, tokens: list[int], dice: random.Random) -> None:
        self.tier_works(dice, False, 3)
        self.pressure(dice, 2)
        found = match(self.w.core, self.w.prompt(tokens))
        asked = queries(found)
        offer(found, TIER, [place for place, _ in asked], [self.w.files.lookup(query) for _, query in asked])
        self._load(promotions(self.w.core, found, {TIER: TIER_OWNER}))

    @precondition(lambda self: self.w.asides)
    @rule(dice=dice, fails=seldom)
    def bring_with_it(self, dice: random.Random, fails: bool) -> None:
        """Into room that was set aside, what a tier has of some prompts; somebody reads some of it then."""
        mine = dice.choice(self.w.asides)
        for tokens in dice.sample(PROMPTS, 3):
            self._bring(mine, tokens, dice, fails)

    def _bring(self, mine: Promised, tokens: list[int], dice: random.Random, fails: bool) -> None:
        whole = [c for c in self.w.chunks(tokens) if c.group == mine.group and len(c.tokens) == 4 * CHUNK]
        for chunk in whole:
            self.w.have_in_tier(chunk, dice.choice((mine.tenant, "other")))
        if not whole:
            return
        some = dice.sample(whole, dice.randint(1, len(whole)))
        places = [(chunk.group, chunk.start // CHUNK) for chunk in some]
        found = match(self.w.core, replace(self.w.prompt(tokens), tenant=mine.tenant), places)
        asked = queries(found)
        offer(found, TIER, [place for place, _ in asked], [self.w.files.lookup(query) for _, query in asked])
        self._load(place_promotions(self.w.core, found, {TIER: TIER_OWNER}, Room(mine.client, mine.lease)))
        if dice.random() < 0.8:
            self.tier_works(dice, fails, len(self.w.files.jobs))
            if dice.random() < 0.4:
                self._read_places(mine, match(self.w.core, found.prompt, places[:1]))
            self.stop_waiting()

    def _read_places(self, mine: Promised, found: Match) -> None:
        read = pin_places(self.w.core, mine.client, found)
        if read.lease:
            until = self.w.now + self.w.core.lease_seconds(0)
            self._leased(mine.client, read.lease, list(read.entries), until)

    def _load(self, plan: Promotions) -> None:
        for new in plan.new:
            self.w.files.jobs.append(self.w.cascade.load_job(new, 1.0)[1])
        wanted = [new.entry for new in plan.new] + plan.running
        loading = self.w.cascade.loading
        loads: list[Load] = [loading[entry] for entry in wanted if entry in loading]
        for load in loads:
            load.waiters += 1
        self.w.waiting.append(Waiting(loads, plan.held))

    @precondition(lambda self: self.w.waiting)
    @rule()
    def stop_waiting(self) -> None:
        waiting = self.w.waiting.pop()
        for load in waiting.loads:
            if load.ok:
                self.w.core.unpin(load.entry)
            elif not load.done:
                load.waiters -= 1
        for entry in waiting.held:
            self.w.core.unpin(entry)

    @rule(dice=dice, fails=st.sampled_from([False, False, False, True]), count=st.integers(1, 6))
    def tier_works(self, dice: random.Random, fails: bool, count: int) -> None:
        for _ in range(min(count, len(self.w.files.jobs))):
            job = self.w.files.jobs.pop(dice.randrange(len(self.w.files.jobs)))
            block = self.w.do_job(job)
            if fails:
                result = JobResult(job.id, False, "io")
            else:
                header = b"" if isinstance(job, StoreJob) else block
                result = JobResult(job.id, bool(block), "" if block else "missing", header)
            late = self.w.cascade.came_too_late(TIER, result)
            if late is not None:
                self.w.files.chunks.pop(late, None)
            load = self.w.cascade.finished(TIER, result)
            assert load is None or not load.ok or job.id not in self.unwanted

    @rule(really=seldom)
    def tier_process_dies(self, really: bool) -> None:
        if not really:
            return
        for job in self.w.files.jobs:
            self.w.cascade.finished(TIER, JobResult(job.id, False, "io"))
        self.w.files.jobs.clear()
        self.w.files.done.clear()

    # --- keeping and forgetting ------------------------------------------------------------------------

    @rule(tokens=prompts, hard=st.booleans(), seconds=st.sampled_from([2.0, 300.0]), by=st.sampled_from(["a", "b"]))
    def pin_prompt(self, tokens: list[int], hard: bool, seconds: float, by: str) -> None:
        found = match(self.w.core, self.w.prompt(tokens))
        entries = found.serving(found.hit())
        try:
            self.w.core.keep(entries, Owner("hard" if hard else "soft", by), seconds)
        except RequestRefused:
            assert hard
            return
        for entry in entries if hard else ():
            self.hard[entry, by] = self.w.now + seconds  # renewed, be it for less

    @rule(dice=dice, by=st.sampled_from(["a", "b"]))
    def unpin_some(self, dice: random.Random, by: str) -> None:
        held = self._committed()
        some = dice.sample(held, min(4, len(held)))
        self.w.core.pins.unpin(some, by)
        for entry in some:
            self.hard.pop((entry, by), None)

    @rule(dice=dice, tenant=st.sampled_from(TENANTS), seconds=st.sampled_from([0, 3, 300]))
    def touch(self, dice: random.Random, tenant: str, seconds: float) -> None:
        some = dice.sample(held := self._committed(), min(4, len(held)))
        self.w.core.touch(some)
        for entry in some:
            self.w.core.retain(entry, tenant, seconds)

    @rule(tenant=st.sampled_from([None, *TENANTS]), really=seldom)
    def clear(self, tenant: str | None, really: bool) -> None:
        if really:
            self._clear(Scope(self.w.namespace_id if tenant is None else b"", tenant))

    @rule(tokens=prompts, really=seldom)
    def clear_prefix(self, tokens: list[int], really: bool) -> None:
        if not really:
            return
        prompt = self.w.prompt(tokens)
        start = max(prompt.whole - 1, 0) // CHUNK * CHUNK
        end = prompt.tokens[4 * start : 4 * prompt.whole]
        self._clear(Scope(self.w.namespace_id, None, Prefix(2, prompt.key_at(start), start, end)))
        assert match(self.w.core, prompt).hit() < max(prompt.whole, 1), "what holds its end is gone"
        for entry in self._committed():
            parents = [self.w.core.table.get(group, entry.parent) for group in (0, 1)]
            assert entry.start <= start or any(parents), "what may go on from it is gone"

    def _clear(self, scope: Scope) -> None:
        for job in self.w.files.jobs:  # the tier has brought it just before it was told to forget
            if not isinstance(job, StoreJob) and job.id not in self.w.files.done:
                block = self.w.files.done[job.id] = self.w.do_job(job)
                if block and scope.covers(decode_header(block)):
                    self.unwanted.add(job.id)
        with self.w.cascade.clearing_of(scope):
            clearing = self.w.core.clear(scope)
            self.w.core.chores.finish()
            assert clearing.done
            left = [entry for entry in self._committed() if scope.covers(entry)]
            assert scope.prefix is not None or not left
            # The tier forgets at least what it covers; a dumb one forgets all that may be meant.
            covered = [c for c, (block, _) in self.w.files.chunks.items() if scope.covers(decode_header(block))]
            for chunk in covered:
                del self.w.files.chunks[chunk]
        self._forget_pins()

    def _forget_pins(self) -> None:
        """What was cleared or damaged is kept no more."""
        self.hard = {kept: until for kept, until in self.hard.items() if kept[0].state is SlotState.COMMITTED}

    @rule(dice=dice)
    def damage(self, dice: random.Random) -> None:
        if held := self._committed():
            self.w.core.damaged(dice.choice(held))
            self._forget_pins()

    def _committed(self) -> list[Entry]:
        return [entry for entry in self.w.core.table if entry.state is SlotState.COMMITTED]

    @rule(dice=dice, count=st.integers(1, 4))
    def pressure(self, dice: random.Random, count: int) -> None:
        """What may be evicted is."""
        for _ in range(count):
            if free := [entry for entry in self._committed() if entry.pins == 0]:
                self.w.core.retire(dice.choice(free), "evicted")

    # --- time and death --------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 3.0, 70.0, 200.0]), steps=st.integers(1, 40))
    def time_passes(self, seconds: float, steps: int) -> None:
        self.w.now += seconds
        self.w.core.tick(steps)
        self._notice_ends()

    @rule(steps=st.integers(1, 40))
    def a_slice(self, steps: int) -> None:
        self.w.core.tick(steps)
        self._notice_ends()

    def _notice_ends(self) -> None:
        for leased in self.w.leases:
            assert leased.lease in leased.client.leases or not leased.seen or self.w.now >= leased.until
        self.w.leases = [x for x in self.w.leases if x.lease in x.client.leases]
        for mine in self.w.asides:
            assert mine.lease in mine.client.leases or self.w.now >= mine.until
        self.w.asides = [x for x in self.w.asides if x.lease in x.client.leases]
        self.hard = {kept: until for kept, until in self.hard.items() if until > self.w.now}
        ended = [g for g in self.w.granted if g.slot.reservation not in g.client.reservations]
        assert all(g.ref in self.w.core.quarantine.slots_of(g.client.id) for g in ended)
        self.w.granted = [g for g in self.w.granted if g not in ended]
        self.w.zombies += ended

    @rule(who=who, alive=st.booleans())
    def connection_ends(self, who: int, alive: bool) -> None:
        """Its process lives on and may write, or is dead."""
        client = self.w.clients[who]
        mine = [g for g in self.w.granted if g.client is client]
        self.w.core.drop_client(client, writing=alive)
        self.w.granted = [g for g in self.w.granted if g.client is not client]
        self.w.leases = [leased for leased in self.w.leases if leased.client is not client]
        self.w.asides = [mine for mine in self.w.asides if mine.client is not client]
        self.w.core.chores.finish()
        if alive:
            assert all(granted.ref in self.w.core.quarantine.slots_of(client.id) for granted in mine)
            self.w.zombies += mine
        else:
            self._stopped_writing(client.id)
        self.w.clients[who] = self.w.client()

    def _stopped_writing(self, owner: bytes) -> None:
        self.w.core.end_quarantine(owner)
        self.w.core.chores.finish()
        self.w.zombies = [zombie for zombie in self.w.zombies if zombie.client.id != owner]

    @precondition(lambda self: self.w.zombies)
    @rule(dice=dice)
    def zombie_writes(self, dice: random.Random) -> None:
        zombie = dice.choice(self.w.zombies)
        length = len(self.w.payload(zombie.chunk.group, zombie.chunk.key, len(zombie.chunk.tokens) // 4))
        self.w.write(zombie.slot, b"\xee" * length)

    @precondition(lambda self: self.w.zombies)
    @rule(dice=dice, how=st.sampled_from(["commits late", "aborts late", "comes back", "dies"]))
    def zombie_ends(self, dice: random.Random, how: str) -> None:
        zombie = dice.choice(self.w.zombies)
        connected = zombie.client in self.w.clients
        if not connected or how in ("comes back", "dies"):
            if not connected:
                self._stopped_writing(zombie.client.id)
            return
        if how == "commits late":
            assert self.w.core.commit(zombie.client, zombie.slot.reservation, b"") is None
        else:
            self.w.core.abort(zombie.client, zombie.slot.reservation)
        self.w.zombies.remove(zombie)

    @rule(alive=st.sets(who), tier_alive=st.booleans(), really=st.sampled_from([False, False, True]))
    def store_is_killed(self, alive: set[int], tier_alive: bool, really: bool) -> None:
        """And started again. What was committed is there; whoever may still write keeps its slots."""
        if not really:
            return
        before = {entry.id for entry in self._committed()}
        living = {self.w.clients[i].id for i in alive} | {zombie.client.id for zombie in self.w.zombies}
        self.w.zombies += [g for g in self.w.granted if g.client.id in living]
        self.hard.clear()
        self.unwanted.clear()
        self.w.start(living | ({TIER_OWNER} if tier_alive else set()))
        assert {entry.id for entry in self._committed()} == before
        for zombie in self.w.zombies:
            assert zombie.ref in self.w.core.quarantine.slots_of(zombie.client.id)
        if tier_alive:
            self._stopped_writing(TIER_OWNER)

    # --- what must hold --------------------------------------------------------------------------------

    @invariant()
    def what_is_promised_stays(self) -> None:
        for leased in self.w.leases:
            if leased.lease not in leased.client.leases:
                continue
            for entry, data, generation in leased.seen:
                assert self.w.bytes_of(entry) == data
                memory = memoryview(self.w.memory.extents[entry.slot.extent])[entry.slot.offset :]
                assert slot_generation(memory) == generation
        for mine in self.w.asides:
            for entry in mine.kept:
                assert entry.pins > 0 and self.w.bytes_of(entry) == self.w.right(entry)
        for (entry, _), until in self.hard.items():
            assert entry.state is SlotState.COMMITTED or until <= self.w.now

    @invariant()
    def what_is_held_is_right(self) -> None:
        for entry in self._committed():
            assert self.w.bytes_of(entry) == self.w.right(entry)

    @invariant()
    def no_slot_belongs_to_two_and_none_is_lost(self) -> None:
        core, slots = self.w.core, self.w.core.place.slots
        for extent in slots.extents.values():
            assert extent.used + len(extent.free) == extent.capacity and extent.used * extent.slot_bytes <= extent.size
        if len(core.chores):
            return  # who is being let go of is known to nobody else
        pinned = self.w.pins_expected()
        retired = [entry for entry in pinned if entry.state is SlotState.RETIRED]
        quarantined = [slot for owner in core.quarantine for slot in core.quarantine.slots_of(owner)]
        owned = [entry.slot for entry in (*core.table, *retired)] + quarantined + list(core.aside.slots)
        assert len(set(owned)) == len(owned) == sum(extent.used for extent in slots.extents.values())
        for entry in (*core.table, *retired):
            assert entry.pins == pinned[entry], (entry.state, entry.pins, pinned[entry])

    @invariant()
    def every_count_adds_up(self) -> None:
        core = self.w.core
        sizes = core.place.slots.extents
        quarantined = [slot for owner in core.quarantine for slot in core.quarantine.slots_of(owner)]
        assert core.quarantined_bytes == sum(sizes[slot.extent].slot_bytes for slot in quarantined)
        by_state = {state: [e for e in core.table if e.state is state] for state in SlotState}
        assert core.aside.bytes == sum(sizes[slot.extent].slot_bytes for slot in core.aside.slots)
        assert core.aside.lent_bytes == sum(entry.slot_bytes for entry in core.aside.lent)
        assert core.aside.bytes + core.aside.lent_bytes <= core.aside.budget
        if not len(core.chores):
            there = [mine.room for mine in self.w.asides]
            assert len(core.aside.slots) == sum(len(room.slots) for room in there)
            assert core.aside.lent.keys() == {entry for room in there for entry in room.lent}
            gone = sum(mine.left for mine in self.w.asides) - sum(room.count for room in there)
            assert 0 <= gone <= core.counters.values.get("store.aside_lost", 0)
        assert core.promoting_bytes == sum(e.slot_bytes for e in by_state[SlotState.PROMOTING])
        assert core.reserved_bytes == sum(e.slot_bytes for e in by_state[SlotState.RESERVED])
        assert sum(account.used for account in core.place.accounts) == core.place.slots.used_bytes
        keeps = [keep for entry in core.table for keep in core.pins.of(entry)]
        assert len(keeps) == len(core.pins) == sum(total.chunks for total in core.pins.totals.values())
        hard = {keep.entry for keep in keeps if keep.owner.kind == "hard"}
        assert core.pins.hard_bytes == sum(entry.slot_bytes for entry in hard) <= core.pins.hard_budget
        for owner, total in core.pins.totals.items():
            mine = [keep.entry for keep in keeps if keep.owner == owner]
            assert (total.chunks, total.bytes) == (len(mine), sum(entry.slot_bytes for entry in mine))
            assert owner.kind != "retained" or total.bytes <= core.pins.retain_budget

    @invariant()
    def the_pool_describes_itself(self) -> None:
        for entry in self.w.core.table:
            memory = memoryview(self.w.memory.extents[entry.slot.extent])[entry.slot.offset :]
            assert slot_state(memory) is entry.state and decode_header(memory).key == entry.key

    @invariant()
    def facts_equal_the_table(self) -> None:
        held: set[tuple[int, bytes]] = set()
        for fact in self.w.facts:
            (held.add if fact.stored else held.remove)(fact.entry.id)
        assert held == {entry.id for entry in self._committed() if entry.announced}


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, derandomize=True)
