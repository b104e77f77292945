"""The core against a dumb model: random stores, reads, releases, crashes of clients, quarantine, damage.

The model is a dict of every payload that was ever stored under a key. What must hold after every step: a hit
serves exactly those bytes; pinned bytes don't move; slots are conserved; facts equal the table.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.kvstore.clearing import Scope
from forebay.kvstore.core import Client
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState, decode_header, granule_checksums, slot_generation, slot_state
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.lookup import match, pin
from forebay.kvstore.protocol import NewChunk, Slot
from tests.kvstore.support import CHUNK, SmallStore

prompts = st.builds(
    lambda shared, own, seed: list(range(shared)) + [1000 + seed] * own,
    st.integers(0, 4 * CHUNK),
    st.integers(0, 2 * CHUNK),
    st.integers(0, 3),
)


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = SmallStore(extents=3)
        self.clients = [Client(bytes([n]) * 16) for n in range(3)]
        self.written: list[tuple[Client, Slot, NewChunk]] = []
        self.leases: list[tuple[Client, int, list[tuple[Entry, bytes, int]]]] = []

    @rule(tokens=prompts, who=st.integers(0, 2))
    def reserve(self, tokens: list[int], who: int) -> None:
        store, client = self.store, self.clients[who]
        for chunk in store.chunks(tokens):
            slot = store.core.reserve(client, store.namespace_id, "t", chunk)
            if slot.status == "reserved":
                self.written.append((client, slot, chunk))

    @precondition(lambda self: self.written)
    @rule(pick=st.randoms(use_true_random=False), count=st.integers(1, 8))
    def write_and_commit(self, pick: object, count: int) -> None:
        for _ in range(min(count, len(self.written))):
            client, slot, chunk = self.written.pop(pick.randrange(len(self.written)))  # type: ignore[attr-defined]
            data = self.store.payload(chunk)
            self.store.memory.extents[slot.extent][slot.payload_offset : slot.payload_offset + len(data)] = data
            granule = self.store.namespace.groups[chunk.group].granule_bytes
            entry = self.store.core.commit(client, slot.reservation, granule_checksums(memoryview(data), granule))
            assert entry is not None
            self.store.core.unpin(entry)

    @precondition(lambda self: self.written)
    @rule()
    def abort(self) -> None:
        client, slot, _ = self.written.pop()
        self.store.core.abort(client, slot.reservation)

    @rule(tokens=prompts, who=st.integers(0, 2), limit=st.integers(0, 200))
    def look_up(self, tokens: list[int], who: int, limit: int) -> None:
        store = self.store
        prompt = store.prompt(tokens, limit=limit)
        pinned = pin(store.core, self.clients[who], match(store.core, prompt))
        assert pinned.hit <= limit and pinned.hit % MATCH_UNIT == 0
        seen = []
        for entry in pinned.entries:
            tokens = entry.header().tokens
            whole = NewChunk(entry.group, entry.key, entry.parent, entry.start, tokens)
            assert store.bytes_of(entry) == store.payload(whole)
            shared = min(pinned.hit, entry.end) - entry.start
            assert tokens[: 4 * shared] == prompt.tokens[4 * entry.start : 4 * (entry.start + shared)]
            seen.append((entry, store.bytes_of(entry), entry.generation))
        if pinned.lease:
            self.leases.append((self.clients[who], pinned.lease, seen))

    @precondition(lambda self: self.leases)
    @rule(pick=st.randoms(use_true_random=False))
    def release(self, pick: object) -> None:
        client, lease, _ = self.leases.pop(pick.randrange(len(self.leases)))  # type: ignore[attr-defined]
        self.store.core.release(client, [lease])

    @rule(who=st.integers(0, 2), writing=st.booleans())
    def client_goes(self, who: int, writing: bool) -> None:
        client = self.clients[who]
        self.store.core.drop_client(client, writing=writing)
        self.written = [w for w in self.written if w[0] is not client]
        self.leases = [lease for lease in self.leases if lease[0] is not client]
        if not writing:
            self.store.core.end_quarantine(client.id)
        self.store.core.chores.finish()
        self.clients[who] = Client(client.id)

    @rule(pick=st.randoms(use_true_random=False))
    def damage(self, pick: object) -> None:
        held = [entry for entry in self.store.core.table if entry.state is SlotState.COMMITTED]
        if held:
            self.store.core.damaged(held[pick.randrange(len(held))])  # type: ignore[attr-defined]

    @rule()
    def clear(self) -> None:
        self.store.core.clear(Scope())
        self.store.core.chores.finish()

    @invariant()
    def pinned_bytes_stay(self) -> None:
        for _, _, seen in self.leases:
            for entry, data, generation in seen:
                assert self.store.bytes_of(entry) == data
                memory = memoryview(self.store.memory.extents[entry.slot.extent])[entry.slot.offset :]
                assert slot_generation(memory) == generation

    @invariant()
    def slots_are_conserved(self) -> None:
        slots, core = self.store.core.place.slots, self.store.core
        for extent in slots.extents.values():
            assert extent.used + len(extent.free) == extent.capacity
            assert len(set(extent.free)) == len(extent.free)
        retired = {e for _, _, seen in self.leases for e, _, _ in seen if e.state is SlotState.RETIRED}
        quarantined = len(core.quarantine)
        assert sum(e.used for e in slots.extents.values()) == len(core.table) + len(retired) + quarantined
        reserved = [entry for client in self.clients for entry in client.reservations.values()]
        assert core.reserved_bytes == sum(r.entry.slot_bytes for r in reserved)

    @invariant()
    def the_pool_describes_itself(self) -> None:
        for entry in self.store.core.table:
            memory = memoryview(self.store.memory.extents[entry.slot.extent])[entry.slot.offset :]
            assert slot_state(memory) is entry.state
            assert decode_header(memory).key == entry.key

    @invariant()
    def facts_equal_the_table(self) -> None:
        held: set[tuple[int, bytes]] = set()
        for fact in self.store.facts:
            (held.add if fact.stored else held.remove)(fact.entry.id)
        assert held == {e.id for e in self.store.core.table if e.state is SlotState.COMMITTED}


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
