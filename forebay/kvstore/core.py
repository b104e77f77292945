"""The store's core: reservations, commits, pins, evictions. Pure: no I/O, clock, thread or randomness.

    reserve            commit               pin / release            evict
    FREE --> RESERVED --------> COMMITTED <--------------> pinned
      ^          |  PROMOTING --^    |
      |          v                   v
      +---- quarantine    RETIRED ---+      (out of sight; free when the last reader lets go)

    In quarantine is a slot without an entry that somebody may still be writing.

Memory is reached through an injected `PoolMemory`, which writes slot headers; facts go out through `tell`; time comes
from `clock`. Nothing here walks the whole table at once: `tick` does what is due and what was dropped in slices.
The daemon calls it from one thread. One file because every change of a chunk's state is here and nowhere else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from forebay.errors import CorruptChunk
from forebay.kvstore.aside import Asides
from forebay.kvstore.chores import Chores
from forebay.kvstore.clearing import Clearing, Scope, clear_steps
from forebay.kvstore.departures import Departures
from forebay.kvstore.entry import Entry, EntryId, SlotRef
from forebay.kvstore.facts import Counters, HostFact, PoolMemory
from forebay.kvstore.header import ChunkHeader, SlotState, encode_header, header_bytes
from forebay.kvstore.identity import Namespace, party_of
from forebay.kvstore.index import ChunkTable
from forebay.kvstore.layout import extends, granule_count, needed_from, needs_all, payload_bytes
from forebay.kvstore.leases import Client, Hold, Leases
from forebay.kvstore.limits import Limits
from forebay.kvstore.lineage import ChunkLineage
from forebay.kvstore.namespaces import Namespaces
from forebay.kvstore.pins import Owner, Pins
from forebay.kvstore.placement import Placement
from forebay.kvstore.policies.registry import Policies, PolicyChoice
from forebay.kvstore.protocol import NewChunk, Slot
from forebay.kvstore.quarantine import Quarantine
from forebay.kvstore.reservations import Reservations, parts_of
from forebay.kvstore.slots import slot_bytes_for
from forebay.kvstore.tenancy import TenantRule

__all__ = ["Client", "StoreCore"]

S = TypeVar("S")
SHARED_MAX = 1 << 16

SLICE_STEPS = 1024
"""What one slice is worth (see `chores`): about a millisecond."""


def _header_of(entry: Entry, tokens: bytes, extra: bytes, checksums: bytes = b"", owner: bytes = b"") -> ChunkHeader:
    return ChunkHeader(
        namespace=entry.namespace, group=entry.group, key=entry.key, parent=entry.parent, start=entry.start,
        tokens=tokens, tenant=entry.tenant, extra=extra, payload_length=entry.payload_length,
        checksums=checksums, owner=owner,
    )  # fmt: skip


class StoreCore:
    """All state of a store. Public attributes are for reading; `on_forgotten` is told of namespaces that had to
    make room for others, `on_retired` of chunks that went out of sight, and why."""

    def __init__(
        self,
        memory: PoolMemory,
        *,
        tell: Callable[[HostFact], None],
        limits: Limits | None = None,
        first_generation: int = 1,
        policy: PolicyChoice | str = "lru",
        tenants: Mapping[str, TenantRule] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.memory = memory
        self.limits = limits or Limits()
        self.counters = Counters()
        self.table = ChunkTable()
        self.use = Namespaces(self.limits.namespaces)
        self.namespaces, self.labels = self.use.known, self.use.labels
        self.on_forgotten: Callable[[bytes], None] = lambda namespace_id: None
        self.on_retired: Callable[[Entry, str], None] = lambda entry, reason: None
        self.removed: OrderedDict[EntryId, str] = OrderedDict()
        self.policies = Policies(policy, ChunkLineage(self.table, self.namespaces))
        self.place = Placement(
            evict=self.retire, cut=memory.cut, policies=self.policies, rules=tenants or {},
            accounts_max=self.limits.tenants,
        )  # fmt: skip
        self.chores = Chores()
        self.aside = Asides(self)
        self.leases = Leases(
            self.pin_all, self.unpin_all, self.chores, self.limits.leases_per_client, self.aside.free
        )  # fmt: skip
        self.pins = Pins(self.place, self.limits, self.pin, self.unpin)
        self.promoting_bytes = 0
        self.clock = clock
        self._tell = tell
        self._generation = first_generation
        # Ids of leases and reservations don't come again after a restart: an old one must not match a new one.
        self._serial = first_generation
        self._departures = Departures(self)
        self.reservations = Reservations(self._departures, self._discard)
        self._shared: dict[Any, Any] = {}

    @property
    def quarantine(self) -> Quarantine:
        """Slots that somebody may still be writing though nobody waits for it."""
        return self._departures.quarantine

    @property
    def reserved_bytes(self) -> int:
        return self.reservations.bytes

    @property
    def quarantined_bytes(self) -> int:
        return self._departures.quarantined_bytes

    @property
    def quarantined_slots(self) -> int:
        """How many slots are in quarantine, whoever may be writing into them."""
        return self._departures.slots

    @property
    def generation(self) -> int:
        """Grows with every chunk that comes or goes."""
        return self._generation

    # --- namespaces ------------------------------------------------------------------------------------

    def register(self, namespace: Namespace, label: str = "", client: Client | None = None) -> bytes:
        """Make a namespace known, and in use for as long as `client` is there; returns its id.

        Where there are too many, the one that has been idle for longest is forgotten. Raises ValueError if a chunk
        of it can't fit an extent, or if all others are in use.
        """
        namespace_id = namespace.id
        if namespace_id not in self.namespaces:
            self._check_fits(namespace)
            for forgotten in self.use.make_room():
                self.counters.add("store.namespaces_forgotten")
                self.on_forgotten(forgotten)
        self.use.remember(namespace_id, namespace, label)
        if client is not None:
            self.use.joined(namespace_id, client.namespaces)
        return namespace_id

    def remember(self, namespace: Namespace) -> None:
        """Know a namespace, of an earlier boot perhaps, without anybody using it."""
        self.use.remember(namespace.id, namespace)

    def _check_fits(self, namespace: Namespace) -> None:
        largest = max(slot_bytes_for(g, namespace.chunk_tokens, namespace.chunk_tokens) for g in namespace.groups)
        size = min((e.size for e in self.place.slots.extents.values()), default=0)
        if largest > size - 4096:
            raise ValueError(
                f"a chunk takes {largest} bytes, an extent has {size}: start the store with a larger --extent "
                "(and --memory), or the worker with fewer --chunk-tokens"
            )

    # --- writing ---------------------------------------------------------------------------------------

    def reserve(
        self,
        client: Client,
        namespace_id: bytes,
        tenant: str,
        chunk: NewChunk,
        *,
        retain_s: float = 0.0,
        writers: int = 1,
        aside: int = 0,
    ) -> Slot:
        """A slot that `client` may write this chunk into, or why not. It comes from what was set `aside` under that
        lease, if there is any left for such chunks; and the chunk, once it is there, is kept under it.

        With `retain_s` the chunk is retained for its tenant so long, also if it is here already. With several
        `writers` so many connections of the client's group reserve it, get the same slot, and write a part each.
        """
        namespace = self.namespaces[namespace_id]
        hold = self.aside.of(client, aside, namespace_id, tenant, chunk)
        known = self.table.get(chunk.group, chunk.key)
        if known is not None and known.state is not SlotState.COMMITTED:
            return self._join_write(client, known, writers, retain_s, hold)
        if known is None and extends(namespace.groups[chunk.group]):
            known = self._covering(chunk)
        if known is not None:
            self.retain(known, tenant, retain_s)
            return self._place(known, "exists", kept=True) if self.aside.found(hold, known) else Slot("exists")
        if len(client.reservations) >= self.limits.reservations_per_client:
            return self._refuse("full")
        # Quarantined slots count as well: who never finishes what it reserves doesn't get more for that.
        taken = self.reserved_bytes + self.quarantined_bytes
        slot = self.aside.spend(hold, self._slot_bytes(namespace, chunk))
        if slot is None and not self._within(taken, self.limits.reserved_share, namespace, chunk):
            return self._refuse("full")
        owner = client.id if writers == 1 else party_of(client.group)
        entry = self._new_entry(namespace, namespace_id, tenant, chunk, SlotState.RESERVED, owner, slot=slot)
        if entry is None:
            return self._refuse("full")
        self.reservations.open(entry, client.group, writers)
        self.counters.add("store.reserved")
        return self._give(client, entry, retain_s, hold)

    def _give(self, client: Client, entry: Entry, retain_s: float, hold: Hold | None) -> Slot:
        self._serial += 1
        self.reservations.give(client, entry, self._serial, retain_s, self.clock() + self.limits.reservation_s, hold)
        return self._place(entry, "reserved", self._serial, kept=hold is not None)

    @staticmethod
    def _place(entry: Entry, status: Literal["reserved", "exists"], reservation: int = 0, *, kept: bool) -> Slot:
        slot = entry.slot
        return Slot(status, reservation, slot.extent, slot.offset, entry.payload_offset, entry.generation, kept)

    def _join_write(self, client: Client, entry: Entry, writers: int, retain_s: float, hold: Hold | None) -> Slot:
        if not self.reservations.may_join(client, entry, writers):
            return Slot("busy")
        if len(client.reservations) >= self.limits.reservations_per_client:
            return self._refuse("full")
        return self._give(client, entry, retain_s, hold)

    def _refuse(self, status: str) -> Slot:
        assert status == "full"
        self.counters.add("store.refused_full")
        return Slot("full")

    def _covering(self, chunk: NewChunk) -> Entry | None:
        """A committed chunk that begins with all of this one."""
        return self.table.covering(chunk.group, chunk.parent, chunk.tokens, chunk.extra)

    def _within(self, used: int, share: float, namespace: Namespace, chunk: NewChunk) -> bool:
        wanted = self._slot_bytes(namespace, chunk)
        return used + wanted <= max(share * self.place.slots.total_bytes, wanted)

    @staticmethod
    def _slot_bytes(namespace: Namespace, chunk: NewChunk) -> int:
        group = namespace.groups[chunk.group]
        return slot_bytes_for(group, len(chunk.tokens) // 4, namespace.chunk_tokens, len(chunk.extra))

    def _new_entry(
        self, namespace: Namespace, namespace_id: bytes, tenant: str, chunk: NewChunk, state: SlotState, owner: bytes,
        *, slot: SlotRef | None = None,
    ) -> Entry | None:  # fmt: skip
        slot_bytes = self._slot_bytes(namespace, chunk)
        slot = slot or self.place.take(slot_bytes, tenant)
        if slot is None:
            return None
        self._generation += 1
        tokens, parent = len(chunk.tokens) // 4, self.table.get(chunk.group, chunk.parent)
        entry = Entry(
            namespace=self._same(namespace_id), group=chunk.group, key=chunk.key,
            parent=chunk.parent if parent is None else parent.key, start=chunk.start, token_count=tokens,
            tenant=self._same(tenant), home=self.memory, slot=slot, slot_bytes=self._same(slot_bytes),
            header_bytes=self._same(header_bytes(tokens, len(chunk.extra))),
            payload_length=self._same(payload_bytes(namespace.groups[chunk.group], tokens)),
            generation=self._generation, state=state, pins=1,
        )  # fmt: skip
        # The writer's name is in the slot before it may write, so that a restarted daemon knows whom to ask.
        header = _header_of(entry, chunk.tokens, chunk.extra, owner=owner)
        self.memory.write_header(slot, encode_header(header, state=state, generation=entry.generation))
        self.table.insert(entry)
        self.place.settle(entry)
        self.use.stored(entry)
        return entry

    def _same(self, value: S) -> S:
        """An equal value that other entries hold too: a million entries share a few hundred of these."""
        if len(self._shared) > SHARED_MAX:
            self._shared.clear()
        shared: S = self._shared.setdefault(value, value)
        return shared

    def commit(self, client: Client, reservation: int, checksums: bytes) -> Entry | None:
        """Make a written chunk visible; None if the reservation is gone or the checksums don't fit, or if others who
        share it are still to write their parts.

        The entry comes back pinned once; the caller releases it when cascading is arranged.
        """
        ended = self.reservations.end(client, reservation)
        if ended is None:
            return None
        entry = ended.entry
        try:
            written = entry.header()
        except CorruptChunk:  # whoever wrote the chunk has written over its header too
            written = None
        group = self.namespaces[entry.namespace].groups[entry.group]
        if written is None or len(checksums) != 8 * granule_count(group, entry.token_count):
            self._discard(entry)
            return None
        self._publish(entry, _header_of(entry, written.tokens, written.extra, checksums))
        self.counters.add("store.committed")
        self.counters.add("store.committed_bytes", entry.payload_length)
        self.retain(entry, entry.tenant, ended.retain_s)
        for part in parts_of(ended):
            self.aside.keep(part.hold, entry)
        return entry

    def _publish(self, entry: Entry, header: ChunkHeader) -> None:
        """RESERVED or PROMOTING becomes COMMITTED: header first, state last, facts after that."""
        self.memory.write_header(entry.slot, encode_header(header, state=entry.state, generation=entry.generation))
        entry.state = SlotState.COMMITTED
        self.memory.mark(entry.slot, SlotState.COMMITTED, entry.generation)
        self.table.commit(entry)
        self.removed.pop(entry.id, None)
        self._announce(entry)
        self._supersede_shorter(entry, header)
        self._demote_passed(entry)

    def _announce(self, entry: Entry) -> None:
        if not entry.announced:
            entry.announced = True
            self._tell(HostFact(True, entry))

    def _supersede_shorter(self, entry: Entry, header: ChunkHeader) -> None:
        if not extends(self.namespaces[entry.namespace].groups[entry.group]):
            return
        # A hard pin names one chunk within a budget: it stays, whatever else has come.
        siblings = self.table.shorter(entry, header.tokens, header.extra)
        shorter = [child for child in siblings if not self.pins.is_hard(child)]
        entry.replaces = max(shorter, key=lambda child: child.end).key if shorter else b""
        for child in shorter:
            self.pins.inherit(child, entry)
            self.retire(child, "replaced")

    def _demote_passed(self, entry: Entry) -> None:
        """A window chunk or a state that the chain's frontier has left behind goes first when room is needed.

        No hit at the frontier reads it; only a prompt that branches off further back would.
        """
        group = self.namespaces[entry.namespace].groups[entry.group]
        if needs_all(group):
            return
        edge, ancestor = needed_from(group, entry.end), entry
        while ancestor.start > 0 and ancestor.end > edge:
            parent = self.table.get(entry.group, ancestor.parent)
            if parent is None or parent.state is not SlotState.COMMITTED or parent.end > ancestor.start:
                return  # the chain's head isn't here (or, in a pool that was tampered with, is no head)
            ancestor = parent
        if ancestor is not entry and ancestor.end <= edge:
            self.place.demote(ancestor)

    def abort(self, client: Client, reservation: int) -> None:
        """The client has stopped writing and gives the slot back."""
        ended = self.reservations.end(client, reservation)
        if ended is not None:
            self._discard(ended.entry)

    # --- promotion -------------------------------------------------------------------------------------

    def reserve_promotion(
        self, namespace_id: bytes, chunk: NewChunk, owner: bytes, tenant: str = "", hold: Hold | None = None
    ) -> Entry | None:
        """A slot for a tier to fill, within the promotions' share; None if there is no room. It is `tenant`'s, who
        asks for it, until the chunk's own header says whose it is. With a `hold` that has room set aside, it is lent of
        that room as long as that is for tiers, and as long as there is no other."""
        namespace = self.namespaces[namespace_id]
        if not self._within(self.promoting_bytes, self.limits.promoting_share, namespace, chunk):
            return None
        slot_bytes = self._slot_bytes(namespace, chunk)
        slot = self.aside.for_tier(hold, slot_bytes)
        ordinary = None if slot is not None else self.place.take(slot_bytes, tenant)
        if slot is None and ordinary is None:
            slot = self.aside.last_for_tier(hold, slot_bytes)
        if slot is None and ordinary is None:
            return None
        about = namespace, namespace_id, tenant, chunk, SlotState.PROMOTING, owner
        entry = self._new_entry(*about, slot=slot or ordinary)
        assert entry is not None, "there is a slot for it"
        if slot is not None and hold is not None:
            self.aside.lend(hold, entry)
        self.promoting_bytes += entry.slot_bytes
        return entry

    def promoted(self, entry: Entry, header: ChunkHeader, tier: str) -> None:
        """The tier has filled and verified it: visible from now on, pinned once."""
        assert entry.state is SlotState.PROMOTING and header.key == entry.key and header.end == entry.end
        self.promoting_bytes -= entry.slot_bytes
        self.place.belongs_to(entry, header.tenant)
        self.in_tier(entry, tier)
        self._publish(entry, _header_of(entry, header.tokens, header.extra, header.checksums))
        self.counters.add(f"tier.{tier}.promoted")
        self.counters.add(f"tier.{tier}.promoted_bytes", entry.payload_length)

    def promotion_failed(self, entry: Entry) -> None:
        """The tier has stopped writing without success: the slot is free again."""
        self.promoting_bytes -= entry.slot_bytes
        self._discard(entry)

    def in_tier(self, entry: Entry, tier: str) -> None:
        """`tier` has this chunk, too."""
        entry.tiers = self._same(entry.tiers | {tier})

    def not_in_tier(self, entry: Entry, tier: str) -> None:
        """`tier` has lost this chunk."""
        entry.tiers = self._same(entry.tiers - {tier})

    def take_out_suspects(self) -> None:
        """Entries whose header turned out unreadable are damaged: never served again."""
        while self.table.suspects:
            entry = self.table.suspects.pop()
            if entry.state is SlotState.COMMITTED:
                self.damaged(entry)

    # --- re-adoption -----------------------------------------------------------------------------------

    def saw_generation(self, generation: int) -> None:
        """The pool holds this generation: new ones are greater."""
        self._generation = max(self._generation, generation)

    def adopt(self, entry: Entry) -> None:
        """Take a chunk of an earlier boot in. It is unverified, so it is not announced yet."""
        assert entry.state is SlotState.COMMITTED and not entry.verified and entry.pins == 0
        self.place.slots.claim(entry.slot)
        self.table.insert(entry)
        self.place.settle(entry)
        self.place.released(entry)
        self.use.stored(entry)
        self.counters.add("host.readopted")

    def verified(self, entry: Entry, intact: bool) -> None:
        """The result of reading an adopted chunk. It is announced now, or never served."""
        if entry.verified or entry.state is not SlotState.COMMITTED:
            return
        if intact:
            entry.verified = True
            self._announce(entry)
        else:
            self.damaged(entry)

    # --- pins ------------------------------------------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        """Keep an entry's bytes in place until `unpin`."""
        if entry.pins == 0:
            self.place.pinned(entry)
        entry.pins += 1

    def pin_all(self, entries: Sequence[Entry]) -> None:
        """Pin many at once, each of them another: what a lookup of a long prompt does."""
        self.place.pinned_all([entry for entry in entries if entry.pins == 0])
        for entry in entries:
            entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """One pin less. The last one makes the entry evictable, or frees it if it was retired meanwhile."""
        assert entry.pins > 0, "every unpin has its pin"
        if entry.pins == 1 and entry.state is SlotState.RETIRED:
            self._free(entry)
            return
        entry.pins -= 1
        if entry.pins == 0:
            self.place.released(entry)

    def unpin_all(self, entries: Sequence[Entry]) -> None:
        """`unpin` for many, in their order: what the end of a lease does."""
        free: list[Entry] = []
        for entry in entries:
            if entry.pins == 1 and entry.state is not SlotState.RETIRED:
                entry.pins = 0
                free.append(entry)
            else:
                self.unpin(entry)
        self.place.released_all(free)

    def give_back(self, entry: Entry) -> None:
        """As `unpin`, but it wasn't used: it is the first to go."""
        if entry.pins == 1 and entry.state is not SlotState.RETIRED:
            entry.pins = 0
            self.place.returned(entry)
        else:
            self.unpin(entry)

    def lease(self, client: Client, entries: list[Entry], *, hit: int = 0, lease_s: float = 0.0) -> int:
        """Pin entries for a client in one step; returns the lease's id, 0 if it may hold no more.

        It ends after `lease_s` at the latest (0: what is usual).
        """
        if not entries:
            return 0
        hold = self.open_lease(client, lease_s, entries, hit)
        return hold.lease if hold is not None else 0

    def open_lease(self, client: Client, lease_s: float, entries: Sequence[Entry] = (), hit: int = 0) -> Hold | None:
        """The same, also without any entries so far; None if the client may hold no more."""
        self._serial += 1
        return self.leases.grant(client, self._serial, hit, entries, self._lease_end(lease_s))

    def join(self, client: Client, lease: int, *, lease_s: float = 0.0) -> Hold | None:
        """Pin a lease of the client's group for this client too, or set a new end to its own hold of it."""
        return self.leases.join(client, lease, self._lease_end(lease_s))

    def lease_seconds(self, asked: float) -> float:
        """How long a lease lasts that is asked for with these seconds."""
        return min(asked, self.limits.lease_s_max) if asked > 0 else self.limits.lease_s

    def _lease_end(self, asked: float) -> float:
        return self.clock() + self.lease_seconds(asked)

    def release(self, client: Client, leases: Iterable[int]) -> None:
        """End leases. Deepest chunks are released first, so that a chain's head is the last to be evicted."""
        self.leases.release(client, leases)

    def drop_client(self, client: Client, *, writing: bool) -> None:
        """The connection is gone, and can reach nothing any more. With `writing` its process lives and may still
        write: its slots go to quarantine. What it held is let go of in slices."""
        assert not client.gone
        client.gone = True
        for namespace_id in client.namespaces:
            self.use.left(namespace_id)
        client.namespaces.clear()
        self._departures.drop(client, writing=writing)

    def hold_slot(self, owner: bytes, slot: SlotRef, slot_bytes: int, reservation: int = 0) -> None:
        """Put a slot into quarantine."""
        self._departures.hold(owner, slot, slot_bytes, reservation)

    def may_write(self, owner: bytes) -> bool:
        """Does anything wait for this process to stop writing, or to die?"""
        return self._departures.may_write(owner)

    def end_quarantine(self, owner: bytes) -> int:
        """`owner` is dead, or says that it writes nothing any more; returns how many slots come free."""
        return self._departures.all_stopped(owner)

    def free_slot(self, slot: SlotRef) -> None:
        """A slot without an entry is free: nobody writes into it any more."""
        self._free_mark(slot)
        self.place.drop_slot(slot)

    # --- keeping ---------------------------------------------------------------------------------------

    def retain(self, entry: Entry, tenant: str, seconds: float) -> None:
        """Keep a chunk for its tenant within the tenant's budget; beyond that it is stored like any other."""
        if seconds <= 0 or entry.state is not SlotState.COMMITTED:
            return
        kept = self.pins.retain(entry, tenant, self.clock() + min(seconds, self.limits.pin_s_max))
        self.counters.add("pins.retained" if kept else "pins.retain_refused")

    def keep(self, entries: Sequence[Entry], owner: Owner, seconds: float) -> None:
        """Pin entries softly or hard. Raises RequestRefused, and then none of them is."""
        self.pins.pin(entries, owner, self.clock() + min(seconds, self.limits.pin_s_max))

    def touch(self, entries: Iterable[Entry]) -> None:
        """These were just used: they are the last to be evicted."""
        for entry in sorted(entries, key=lambda e: -e.start):
            self.pin(entry)
            self.unpin(entry)

    # --- time ------------------------------------------------------------------------------------------

    def tick(self, steps: int = SLICE_STEPS) -> bool:
        """One bounded slice: promises whose time is over end, and what was dropped is let go of.

        True if there is more to do; it is no hurry, but pins and slots are held until then.
        """
        now = self.clock()
        for _ in range(steps):
            if not self._expire_one(now):
                return self.chores.run(steps)
        return True

    def _expire_one(self, now: float) -> bool:
        if self.leases.expire_one(now):
            self.counters.add("store.leases_expired")
            return True
        if self.pins.expire_one(now):
            return True
        if not self.reservations.expire_one(now):
            return False
        self.counters.add("store.reservations_expired")
        return True

    # --- removal ---------------------------------------------------------------------------------------

    def retire(self, entry: Entry, reason: str) -> None:
        """Take a committed entry out of sight at once; its slot is free once nobody pins it."""
        self.pins.forget(entry)
        self._withdraw(entry, reason)
        room = self.aside.lost(entry)
        if room is not None:
            self.unpin(entry)
            self.aside.regain(room)
        elif entry.pins == 0:
            self._free(entry)

    def _discard(self, entry: Entry, *, keep_slot: bool = False) -> None:
        """Drop an unfinished entry. With `keep_slot` its slot goes to quarantine."""
        assert entry.state in (SlotState.RESERVED, SlotState.PROMOTING)
        room = self.aside.lost(entry)
        self.table.remove(entry)
        entry.state = SlotState.FREE
        self._free(entry, keep_slot=keep_slot)
        if room is not None:
            self.aside.regain(room)

    def _withdraw(self, entry: Entry, reason: str) -> None:
        assert entry.state is SlotState.COMMITTED, entry.state
        # The mark in the pool goes first: after a crash in between, the chunk is gone rather than wrong.
        # Readers compare the generation, so it stays until the slot is free.
        self.memory.mark(entry.slot, SlotState.RETIRED, entry.generation)
        self.table.remove(entry)
        self.place.may_have_room()  # what this one needed may go now, also while it is being read
        entry.state = SlotState.RETIRED
        self.counters.add(f"host.removed_{reason}")
        self.removed[entry.id] = reason
        self.on_retired(entry, reason)
        while len(self.removed) > self.limits.removed_remembered:
            self.removed.popitem(last=False)
        if entry.announced:
            self._tell(HostFact(False, entry, reason))

    def _free(self, entry: Entry, *, keep_slot: bool = False) -> None:
        if not keep_slot:
            self._free_mark(entry.slot)
        self.place.leave(entry, keep_slot=keep_slot)
        self.use.gone(entry)
        entry.state = SlotState.FREE

    def _free_mark(self, slot: SlotRef) -> None:
        self._generation += 1
        self.memory.mark(slot, SlotState.FREE, self._generation)

    def damaged(self, entry: Entry) -> None:
        """The entry's bytes are wrong: it is never served again."""
        self.counters.add("host.corrupt")
        self.retire(entry, "corrupt")

    def clear(self, scope: Scope, then: Callable[[], None] = lambda: None) -> Clearing:
        """Begin to forget the chunks of a scope that are here now, pinned or not; those that are being read lose
        their slot later. It is done in slices; when the result says `done`, none of them is found any more."""
        clearing = Clearing(scope, self._generation, then)
        self.chores.add(clear_steps(self, clearing))
        return clearing
