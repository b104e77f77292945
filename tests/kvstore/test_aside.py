"""Room that is set aside: whoever has it is never refused, and what is stored with it stays."""

from __future__ import annotations

import msgspec

from forebay.kvstore.client import StoreClient
from forebay.kvstore.core import Client
from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.header import SlotState, granule_checksums
from forebay.kvstore.leases import Hold
from forebay.kvstore.limits import Limits
from forebay.kvstore.pins import Owner
from forebay.kvstore.protocol import NewChunk, Written
from forebay.kvstore.slots import slot_bytes_for
from forebay.kvstore.tenancy import TenantRule
from tests.kvstore.running import Store, payload_of, prompt_of
from tests.kvstore.support import CHUNK, SmallStore, namespace

GROUP = 0


def slot_bytes(store: SmallStore) -> int:
    return slot_bytes_for(store.namespace.groups[GROUP], CHUNK, CHUNK)


def set_aside(
    store: SmallStore, count: int, client: Client | None = None, lease_s: float = 0.0, for_tiers: int = 0
) -> Hold:
    hold = store.core.aside.open(
        client or store.client, store.namespace_id, "", GROUP, slot_bytes(store), lease_s, for_tiers
    )  # fmt: skip
    assert hold is not None and store.core.aside.add(hold, count)
    return hold


def whole(store: SmallStore, seed: int, count: int) -> list[NewChunk]:
    """The chunks of one prompt in the group that room is set aside for."""
    return [chunk for chunk in store.chunks([seed] * (count * CHUNK)) if chunk.group == GROUP]


def store_under(store: SmallStore, hold: Hold, chunk: NewChunk, client: Client | None = None) -> Entry | None:
    client = client or store.client
    slot = store.core.reserve(client, store.namespace_id, "", chunk, aside=hold.lease)
    return store.write_and_commit(client, slot, chunk) if slot.status == "reserved" else None


def flood(store: SmallStore, seeds: range = range(100, 300)) -> None:
    """Others store more than the pool holds, and read all of it without ever letting go."""
    for seed in seeds:
        for chunk in store.chunks([seed] * CHUNK):
            entry = store.store(chunk, Client(b"f" * 16))
            if entry is not None:
                store.core.pin(entry)


def test_what_is_set_aside_is_there_however_full_the_pool_is() -> None:
    store = SmallStore(extents=3)
    hold = set_aside(store, 5)
    flood(store)
    chunks = whole(store, 1, 6)
    assert store.core.reserve(Client(b"x" * 16), store.namespace_id, "", chunks[0]).status == "full"
    assert all(store_under(store, hold, chunk) for chunk in chunks[:5])
    assert store_under(store, hold, chunks[5]) is None, "there is no more of it"
    assert store.core.aside.bytes == 0


def test_what_was_stored_with_it_stays_from_its_commit_on() -> None:
    store = SmallStore(extents=3)
    hold = set_aside(store, 5)
    entries = [store_under(store, hold, chunk) for chunk in whole(store, 1, 5)]
    flood(store)
    assert all(entry is not None and entry.state is SlotState.COMMITTED and entry.pins == 1 for entry in entries)
    store.core.release(store.client, [hold.lease])
    assert all(entry is not None and entry.pins == 0 for entry in entries)


def test_a_chunk_that_is_there_already_is_kept_and_its_room_given_back() -> None:
    store = SmallStore()
    chunks = whole(store, 1, 2)
    store.store_prompt([1] * (2 * CHUNK))
    hold = set_aside(store, 2)
    for _ in range(2):  # also when it is offered once more
        slot = store.core.reserve(store.client, store.namespace_id, "", chunks[0], aside=hold.lease)
        entry = store.core.table.get(GROUP, chunks[0].key)
        assert entry is not None and slot.status == "exists" and slot.kept
        assert (SlotRef(slot.extent, slot.slot_offset), slot.generation) == (entry.slot, entry.generation)
        assert entry.pins == 1 and store.core.aside.bytes == slot_bytes(store)


def test_one_that_was_not_read_since_a_restart_isn_t_kept_unread() -> None:
    store = SmallStore()
    chunk = whole(store, 1, 1)[0]
    entry = store.store(chunk)
    assert entry is not None
    entry.verified = False
    hold = set_aside(store, 1)
    slot = store.core.reserve(store.client, store.namespace_id, "", chunk, aside=hold.lease)
    assert (slot.status, slot.kept, entry.pins) == ("exists", False, 0)


def test_it_is_for_whole_chunks_of_one_group_of_one_tenant() -> None:
    store = SmallStore()
    hold = set_aside(store, 3)
    before = store.core.aside.bytes
    tail, other = store.chunks([1] * 16)[GROUP], store.chunks([1] * CHUNK)[1 - GROUP]
    for chunk, tenant in ((tail, ""), (other, ""), (whole(store, 2, 1)[0], "somebody")):
        reserved = store.core.reserve(store.client, store.namespace_id, tenant, chunk, aside=hold.lease)
        assert reserved.status == "reserved" and store.core.aside.bytes == before


def test_it_ends_with_its_lease_its_time_or_its_connection() -> None:
    for end in ("release", "time", "connection"):
        store = SmallStore(extents=2)
        free = store.core.place.slots.free_bytes
        hold = set_aside(store, 3, lease_s=5)
        assert store.core.aside.bytes == 3 * slot_bytes(store) < free - store.core.place.slots.free_bytes + 1
        if end == "release":
            store.core.release(store.client, [hold.lease])
        elif end == "time":
            store.now += 6
            while store.core.tick():
                pass
        else:
            store.core.drop_client(store.client, writing=True)
            store.core.chores.finish()
        assert store.core.aside.bytes == 0 and not store.core.aside.slots, end
        assert store.core.place.slots.used_bytes == 0 and not store.core.place.held, end


def test_a_write_that_ends_after_its_lease_is_stored_like_any_other() -> None:
    store = SmallStore()
    hold = set_aside(store, 2)
    chunk = whole(store, 1, 1)[0]
    slot = store.core.reserve(store.client, store.namespace_id, "", chunk, aside=hold.lease)
    store.core.release(store.client, [hold.lease])
    assert store.write_and_commit(store.client, slot, chunk).pins == 0


class Tier:
    """Brings the chunks of one prompt into a store, one after the other."""

    def __init__(self, store: SmallStore, hold: Hold | None, seed: int = 1) -> None:
        self.store, self.hold = store, hold
        self.chunks = iter(whole(store, seed, 200))

    def begin(self) -> Entry | None:
        core = self.store.core
        return core.reserve_promotion(self.store.namespace_id, next(self.chunks), b"t" * 16, "", self.hold)

    def bring(self) -> Entry | None:
        """As a reader has it: pinned once by whoever asked for it."""
        entry = self.begin()
        if entry is not None:
            self.store.core.promoted(entry, entry.header(), "fs")
        return entry


def test_what_a_tier_brings_takes_room_that_was_set_aside_for_it_however_full_the_pool_is() -> None:
    store = SmallStore(extents=3)
    hold = set_aside(store, 2, for_tiers=2)
    flood(store)
    others, mine = Tier(store, None), Tier(store, hold, 2)
    while others.begin() is not None:
        pass
    first, second = mine.begin(), mine.begin()
    assert first is not None and second is not None and mine.begin() is None
    store.core.promotion_failed(first)
    assert store.core.aside.bytes == slot_bytes(store), "what didn't come leaves its room"
    assert others.begin() is None and mine.begin() is not None


def test_what_a_tier_brought_and_nobody_reads_makes_room_for_others_of_its_request() -> None:
    store = SmallStore(extents=3)
    hold = set_aside(store, 2, for_tiers=2)
    flood(store)
    tier, chunks = Tier(store, hold), whole(store, 2, 3)
    first, second = tier.bring(), tier.bring()
    assert first is not None and second is not None and tier.bring() is None, "both are read"
    store.core.unpin(first)
    assert first.state is SlotState.COMMITTED, "until it is needed it stays"
    third = tier.bring()
    assert third is not None and first.state is SlotState.FREE and third.slot == first.slot
    store.core.unpin(second)
    assert store_under(store, hold, chunks[0]) is not None, "what is stored is never refused"
    assert second.state is SlotState.FREE and store_under(store, hold, chunks[1]) is None
    store.core.unpin(third)
    assert store_under(store, hold, chunks[2]) is not None and not hold.aside.lent  # type: ignore[union-attr]


def test_what_somebody_wants_kept_goes_last() -> None:
    store = SmallStore(extents=3)
    hold = set_aside(store, 2, for_tiers=2)
    flood(store)
    tier = Tier(store, hold)
    kept, other = tier.bring(), tier.bring()
    assert kept is not None and other is not None
    store.core.keep([kept], Owner("soft", "somebody"), 60)
    store.core.unpin(kept)
    store.core.unpin(other)
    assert tier.bring() is not None and (kept.state, other.state) == (SlotState.COMMITTED, SlotState.FREE)
    assert tier.bring() is not None and kept.state is SlotState.FREE


def test_tiers_leave_the_rest_of_the_room_as_long_as_there_is_other() -> None:
    store = SmallStore(extents=3)
    hold = set_aside(store, 5, for_tiers=2)
    tier, size = Tier(store, hold), slot_bytes(store)
    brought = [tier.bring() for _ in range(6)]
    assert None not in brought and store.core.aside.bytes == 3 * size
    flood(store)
    more = tier.bring()
    assert more is not None and store.core.aside.bytes == 2 * size, "better than not at all"
    store.core.unpin(more)
    assert tier.bring() is not None and store.core.aside.bytes == 2 * size


def test_what_is_cleared_or_damaged_leaves_its_room() -> None:
    store = SmallStore(extents=3)
    hold = set_aside(store, 2, for_tiers=2)
    tier, size = Tier(store, hold), slot_bytes(store)
    first, second = tier.bring(), tier.bring()
    assert first is not None and second is not None and store.core.aside.bytes == 0
    store.core.unpin(first)
    store.core.damaged(first)
    assert first.state is SlotState.FREE and store.core.aside.bytes == size
    store.core.damaged(second)
    assert second.state is SlotState.RETIRED and store.core.aside.bytes == 2 * size, "of what is free"
    store.core.unpin(second)
    assert second.state is SlotState.FREE and not store.core.aside.lent


def test_room_that_went_and_can_not_be_had_again_is_counted() -> None:
    store = SmallStore(extents=3)
    hold = set_aside(store, 1, for_tiers=1)
    entry = Tier(store, hold).bring()
    flood(store)
    assert entry is not None
    store.core.damaged(entry)  # it is still being read, and all else as well
    assert store.core.counters.values["store.aside_lost"] == 1 and store.core.aside.bytes == 0


def test_room_that_is_lent_is_still_promised_and_nobody_else_gets_it() -> None:
    store = SmallStore(extents=4, limits=Limits(aside_share=0.5))
    hold, room, size = set_aside(store, 3, for_tiers=3), store.core.aside, slot_bytes(store)
    under_way = [Tier(store, hold, seed).begin() for seed in range(3)]
    assert None not in under_way and room.bytes == 0
    while room.now(size, 1):
        set_aside(store, 1)
    for entry in under_way:
        assert entry is not None
        store.core.promotion_failed(entry)
    assert len(hold.aside.slots) == 3 and room.bytes <= room.budget  # type: ignore[union-attr]
    assert "store.aside_lost" not in store.core.counters.values


def test_two_that_ask_at_a_time_get_no_more_than_there_may_be() -> None:
    store = SmallStore(extents=4, limits=Limits(aside_share=0.5))
    room, size = store.core.aside, slot_bytes(store)
    most = max(count for count in range(1, 200) if room.ever("", size, count))
    holds = [room.open(store.client, store.namespace_id, "", GROUP, size, 0) for _ in range(2)]
    assert room.now(size, most)
    added = [room.add(hold, 1) for _ in range(most) for hold in holds if hold is not None]
    assert most <= added.count(True) < 2 * most and room.budget - size < room.bytes <= room.budget


def test_slots_that_were_used_up_leave_tiers_what_they_have_brought() -> None:
    store = SmallStore(extents=3)
    hold = set_aside(store, 4, for_tiers=3)
    tier = Tier(store, hold)
    brought = [tier.bring(), tier.bring()]
    for chunk in whole(store, 2, 2):  # it is never written
        slot = store.core.reserve(store.client, store.namespace_id, "", chunk, aside=hold.lease)
        store.core.abort(store.client, slot.reservation)
    flood(store)
    assert tier.bring() is None, "all of it is read"
    for entry in brought:
        assert entry is not None
        store.core.unpin(entry)
    assert tier.bring() is not None and tier.bring() is not None


def test_what_turns_out_to_be_another_tenant_s_makes_room_all_the_same() -> None:
    """Whoever asked has reached its quota since."""
    store = SmallStore(extents=3)
    core, size = store.core, slot_bytes(store)
    core.place.accounts.of("poor").rule = TenantRule(quota=2 * size)
    hold = core.aside.open(store.client, store.namespace_id, "poor", GROUP, size, 0, 2)
    assert hold is not None and core.aside.add(hold, 2)
    for chunk in whole(store, 1, 2):
        entry = core.reserve_promotion(store.namespace_id, chunk, b"t" * 16, "poor", hold)
        assert entry is not None
        core.promoted(entry, msgspec.structs.replace(entry.header(), tenant="rich"), "fs")
        core.unpin(entry)
    for chunk in whole(store, 2, 2):
        slot = core.reserve(store.client, store.namespace_id, "poor", chunk)
        core.pin(store.write_and_commit(store.client, slot, chunk))
    mine = [core.reserve(store.client, store.namespace_id, "poor", c, aside=hold.lease) for c in whole(store, 3, 2)]
    assert [slot.status for slot in mine] == ["reserved"] * 2 and not hold.aside.lent  # type: ignore[union-attr]


def test_what_a_tier_brought_is_like_any_other_chunk_when_the_room_ends() -> None:
    store = SmallStore()
    hold = set_aside(store, 3, for_tiers=3)
    tier = Tier(store, hold)
    entries, under_way = [tier.bring(), tier.bring()], tier.begin()
    store.core.release(store.client, [hold.lease])
    assert [entry.pins for entry in entries if entry is not None] == [1, 1]
    assert under_way is not None and under_way.pins == 1 and not store.core.aside.lent
    store.core.promotion_failed(under_way)
    assert store.core.aside.bytes == 0 and store.core.promoting_bytes == 0


def test_a_chunk_that_a_tier_brought_and_that_is_stored_then_is_kept_with_the_room_it_has() -> None:
    store = SmallStore()
    hold = set_aside(store, 2, for_tiers=1)
    entry = Tier(store, hold).bring()
    assert entry is not None and store.core.aside.bytes == slot_bytes(store)
    store.core.unpin(entry)
    slot = store.core.reserve(store.client, store.namespace_id, "", whole(store, 1, 1)[0], aside=hold.lease)
    assert slot.status == "exists" and slot.kept and entry.pins == 1
    assert store.core.aside.bytes == slot_bytes(store) and not store.core.aside.lent


def test_connections_of_an_engine_draw_on_each_other_s_and_nobody_else_does() -> None:
    store = SmallStore()
    leader, rank, stranger = (Client(name * 16, group) for name, group in ((b"a", b"e"), (b"b", b"e"), (b"c", b"x")))
    for client in (leader, rank, stranger):
        store.core.leases.attach(client)
    hold = set_aside(store, 2, leader)
    for client, left in ((stranger, 2), (rank, 1)):
        chunk = whole(store, left, 1)[0]
        assert store_under(store, hold, chunk, client) is not None
        assert store.core.aside.bytes == left * slot_bytes(store)


def test_so_much_may_be_set_aside_and_no_more() -> None:
    store = SmallStore(extents=4, limits=Limits(aside_share=0.5))
    room, size = store.core.aside, slot_bytes(store)
    most = max(count for count in range(1, 200) if room.ever("", size, count))
    assert not room.ever("", size, most + 1) and room.now(size, most)
    while room.now(size, 1):
        set_aside(store, 1)
    assert room.budget - size < room.bytes <= room.budget


def test_a_tenant_sets_aside_within_its_quota() -> None:
    store = SmallStore()
    size = slot_bytes(store)
    store.core.place.accounts.of("poor").rule = TenantRule(quota=3 * size)
    assert store.core.aside.ever("poor", size, 3) and not store.core.aside.ever("poor", size, 4)
    hold = store.core.aside.open(store.client, store.namespace_id, "poor", GROUP, size, 0)
    assert hold is not None and store.core.aside.add(hold, 3) and not store.core.aside.add(hold, 1)
    assert store.core.place.accounts.of("poor").used == 3 * size


def test_what_can_not_be_had_is_not_evicted_for() -> None:
    store = SmallStore(extents=2)
    flood(store)
    assert not store.core.aside.now(slot_bytes(store), 1), "all of it is being read"


def test_a_client_asks_and_writes_over_its_connection(store: Store) -> None:
    spec = namespace()
    prompt = prompt_of(spec, [3] * (2 * CHUNK))
    with StoreClient(store.address) as client:
        client.register(spec)
        aside = client.set_aside(spec.id, "", GROUP, 2, lease_ms=60_000)
        assert aside.lease and aside.ever and aside.lease_ms == 60_000
        figures = client.stats().values
        assert figures["host.aside_bytes"] > 0 and figures["store.set_aside"] == 1
        slots = client.reserve(spec.id, "", [prompt.chunk(GROUP, 0)], aside=aside.lease).slots
        data = payload_of(spec, GROUP, prompt.chunk(GROUP, 0).key, CHUNK)
        client.room(slots[0], len(data))[:] = data
        sums = granule_checksums(memoryview(data), spec.groups[GROUP].granule_bytes)
        assert client.commit([Written(slots[0].reservation, sums)]).committed == 1
        assert [len(shared.chunks) for shared in client.join([aside.lease]).leases] == [1]
        refused = client.set_aside(spec.id, "", GROUP, 1 << 17)
        assert not refused.lease and not refused.ever
        client.release([aside.lease])
        assert client.stats().values["host.aside_bytes"] == 0
