"""Leases: shared by a group, given back in parts, ended by time, by their connections, and never by anybody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kvstore.chores import Chores
from forebay.kvstore.core import Client
from forebay.kvstore.deadlines import Deadlines
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState
from forebay.kvstore.leases import AT_ONCE
from forebay.kvstore.lookup import match, pin
from tests.kvstore.support import CHUNK, SmallStore

TOKENS = list(range(3 * CHUNK))
GROUP = b"engine"


def found(store: SmallStore, client: Client, lease_s: float = 0.0) -> tuple[int, list[Entry]]:
    pinned = pin(store.core, client, match(store.core, store.prompt(TOKENS, lease_s=lease_s)))
    assert pinned.lease and pinned.hit == len(TOKENS)
    return pinned.lease, list(pinned.entries)


@pytest.fixture
def store() -> SmallStore:
    made = SmallStore()
    made.store_prompt(TOKENS)
    return made


def member(store: SmallStore, name: bytes, group: bytes = GROUP) -> Client:
    client = Client(name * 16, group)
    store.core.leases.attach(client)
    return client


def pins(entries: list[Entry]) -> set[int]:
    return {entry.pins for entry in entries}


# --- a group ---------------------------------------------------------------------------------------------


def test_a_lease_ends_when_the_last_of_its_connections_closes(store: SmallStore) -> None:
    scheduler, *ranks = (member(store, name) for name in (b"s", b"a", b"b"))
    lease, entries = found(store, scheduler)
    for rank in ranks:
        hold = store.core.join(rank, lease)
        assert hold is not None and hold.hit == len(TOKENS) and hold.entries == entries
    for count, client in ((2, scheduler), (1, ranks[0]), (0, ranks[1])):
        store.core.drop_client(client, writing=False)
        store.core.chores.finish()
        assert pins(entries) == {count}
    assert len(store.core.leases) == 0


def test_only_the_same_group_may_join(store: SmallStore) -> None:
    scheduler, stranger, loner = member(store, b"s"), member(store, b"x", b"other"), member(store, b"l", b"")
    lease, entries = found(store, scheduler)
    assert store.core.join(stranger, lease) is None and store.core.join(loner, lease) is None
    assert store.core.join(member(store, b"r"), lease + 1) is None
    assert pins(entries) == {1}


def test_what_a_dead_connection_held_cannot_be_joined_even_before_it_is_let_go_of(store: SmallStore) -> None:
    scheduler, rank = member(store, b"s"), member(store, b"r")
    lease, _ = found(store, scheduler)
    store.core.drop_client(scheduler, writing=False)
    assert store.core.join(rank, lease) is None


def test_joining_again_renews(store: SmallStore) -> None:
    client = member(store, b"s")
    lease, entries = found(store, client, lease_s=10)
    store.now = 9
    assert store.core.join(client, lease, lease_s=10) is not None
    store.now = 15
    store.core.tick()
    assert pins(entries) == {1}
    store.now = 20
    store.core.tick()
    assert pins(entries) == {0} and client.leases == {}


# --- parts -----------------------------------------------------------------------------------------------


def test_parts_of_a_lease_are_given_back_and_the_rest_stays(store: SmallStore) -> None:
    client = member(store, b"s")
    lease, entries = found(store, client)
    store.core.leases.release_chunks(client, lease, [0, 0, 2, 99, -1])
    assert [entry.pins for entry in entries] == [0, 1, 0, *[1] * (len(entries) - 3)]
    store.core.leases.release_chunks(client, lease, range(len(entries)))
    assert client.leases == {} and pins(entries) == {0}
    store.core.release(client, [lease])
    store.core.leases.release_chunks(client, lease, [0])


def test_whoever_joins_later_gets_what_is_still_pinned(store: SmallStore) -> None:
    scheduler, first, late = (member(store, name) for name in (b"s", b"a", b"b"))
    lease, entries = found(store, scheduler)
    assert store.core.join(first, lease) is not None
    store.core.leases.release_chunks(scheduler, lease, [0, 1])
    store.core.leases.release_chunks(first, lease, [1, 2])
    hold = store.core.join(late, lease)
    assert hold is not None
    assert set(hold.entries) == set(entries) - {entries[1]} and len(hold.entries) == len(entries) - 1


# --- time ------------------------------------------------------------------------------------------------


def test_a_lease_ends_with_its_time_and_no_sooner(store: SmallStore) -> None:
    client = member(store, b"s")
    _, entries = found(store, client, lease_s=5)
    for now, held in ((4.9, 1), (5.2, 0)):
        store.now = now
        store.core.tick()
        assert pins(entries) == {held}
    assert store.core.counters.values["store.leases_expired"] == 1


def test_no_lease_lasts_longer_than_the_limit(store: SmallStore) -> None:
    client = member(store, b"s")
    _, entries = found(store, client, lease_s=1e9)
    store.now = store.core.limits.lease_s_max + 1
    store.core.tick()
    assert pins(entries) == {0}


def test_a_reservation_ends_with_its_time_and_its_slot_waits_for_the_writer(store: SmallStore) -> None:
    writer = member(store, b"w")
    chunk = store.chunks([7] * CHUNK)[0]
    slot = store.core.reserve(writer, store.namespace_id, "", chunk)
    store.now = store.core.limits.reservation_s + 1
    store.core.tick()
    assert len(store.core.quarantine) == 1 and store.core.quarantined_bytes > 0 == store.core.reserved_bytes
    assert store.store(chunk) is not None, "others may store it at once"
    for reservation in (slot.reservation + 1, slot.reservation, slot.reservation):
        assert store.core.commit(writer, reservation, b"") is None
    assert len(store.core.quarantine) == store.core.quarantined_bytes == 0, "its commit says that it has stopped"


def test_what_a_writer_never_finishes_counts_against_the_share_of_stores() -> None:
    store = SmallStore(extents=2)
    writer = Client(b"w" * 16)
    refused = 0
    for number in range(60):
        for chunk in store.chunks([number] * CHUNK):
            refused += store.core.reserve(writer, store.namespace_id, "", chunk).status == "full"
        store.now += store.core.limits.reservation_s + 1
        store.core.tick()
        assert store.core.quarantined_bytes <= store.core.limits.reserved_share * store.core.place.slots.total_bytes
    assert refused and len(store.core.quarantine)
    store.core.end_quarantine(writer.id)
    store.core.chores.finish()
    assert store.core.place.slots.used_bytes == store.core.quarantined_bytes == 0


def test_a_client_that_comes_back_frees_slots_that_were_still_to_be_quarantined(store: SmallStore) -> None:
    writer = member(store, b"w")
    for chunk in store.chunks([7] * CHUNK):
        assert store.core.reserve(writer, store.namespace_id, "", chunk).status == "reserved"
    store.core.drop_client(writer, writing=True)
    store.core.end_quarantine(writer.id)  # before any slice of the drop
    store.core.chores.finish()
    assert len(store.core.quarantine) == store.core.quarantined_bytes == store.core.reserved_bytes == 0
    assert not store.core.may_write(writer.id)


# --- slices ----------------------------------------------------------------------------------------------


def test_a_slice_does_no_more_than_it_may(store: SmallStore) -> None:
    client = member(store, b"s")
    leases = [found(store, client) for _ in range(30)]
    store.core.drop_client(client, writing=False)
    entries = leases[0][1]
    before = sum(entry.pins for entry in entries)
    while store.core.tick(steps=5):
        now = sum(entry.pins for entry in entries)
        assert before - 6 <= now <= before
        before = now
    assert pins(entries) == {0}


def test_many_leases_that_end_at_once_end_in_slices(store: SmallStore) -> None:
    client = member(store, b"s")
    for _ in range(50):
        found(store, client, lease_s=1)
    store.now = 10
    turns = 1
    while store.core.tick(steps=8):
        turns += 1
    assert turns >= 50 // 8 and len(store.core.leases) == 0


def test_chores_take_turns() -> None:
    log: list[str] = []

    def work(name: str) -> Iterator[int]:
        for _ in range(4):
            log.append(name)
            yield 1

    woken: list[int] = []
    chores = Chores()
    chores.wake = lambda: woken.append(1)
    for name in "ab":
        chores.add(work(name))
    while chores.run(2):
        pass
    assert "".join(log) == "aabbaabb" and len(chores) == 0 and woken == [1]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["set", "drop", "pass"]), st.floats(0, 100), st.integers(0, 9))))
def test_deadlines_are_never_early_and_at_most_a_grain_late(steps: list[tuple[str, float, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines(0.5)
    now, model, buckets = 0.0, {}, {}
    for what, amount, item in steps:
        if what == "set" and item not in model:
            model[item] = now + amount
            buckets[item] = deadlines.set(item, now + amount)
        elif what == "drop" and item in model:
            deadlines.drop(item, buckets[item])
            del model[item]
        elif what == "pass":
            now += amount / 10
            due = set()
            while (ended := deadlines.take(now)) is not None:
                due.add(ended)
            assert all(model[i] <= now for i in due) and {i for i in model if model[i] <= now - 0.5} <= due
            model = {i: at for i, at in model.items() if i not in due}
        assert len(deadlines) == len(model)


def test_an_entry_that_is_retired_while_it_is_read_stays_until_then(store: SmallStore) -> None:
    client = member(store, b"s")
    lease, entries = found(store, client)
    store.core.retire(entries[0], "evicted")
    assert entries[0].state is SlotState.RETIRED
    store.core.release(client, [lease])
    assert entries[0].state is SlotState.FREE


def test_a_message_that_gives_back_very_much_is_worked_off_in_slices(store: SmallStore) -> None:
    client = member(store, b"s")
    leases = [found(store, client) for _ in range(120)]
    entries = leases[0][1]
    store.core.release(client, [lease for lease, _ in leases])
    left = sum(entry.pins for entry in entries)
    assert 0 < left <= 120 * len(entries) - AT_ONCE + len(entries) and client.leases == {}
    store.core.chores.finish()
    assert pins(entries) == {0}
