"""When a chunk goes to which tier: at once, when it is hit twice, or before it would be evicted."""

from __future__ import annotations

import random

import pytest

from forebay.kvstore.cascade import REST_S, Cascade, TierTraffic
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState
from forebay.kvstore.lookup import match, pin
from forebay.tiers.base import JobResult, StoreJob
from forebay.tiers.rules import EVICT, SECOND_HIT, WRITE_THROUGH
from tests.kvstore.support import CHUNK, SmallStore


class Tiers:
    """A cascade over a small store, and the jobs that its tiers have in hand."""

    def __init__(self, *copies: str, extents: int = 4, pinned_share: float | None = None) -> None:
        self.store = SmallStore(extents=extents)
        self.core = self.store.core
        self.cascade = Cascade(self.core)
        for copy in copies:
            self.cascade.tiers[copy] = TierTraffic(copy, b"t" * 16, copy, pinned_share)
        self.jobs: list[tuple[str, StoreJob]] = []
        self.serial = 0

    def put(self, tokens: list[int] | None = None) -> list[Entry]:
        """Store a prompt of one chunk, as the service does: it is spread before the store lets go of it."""
        self.serial += 1
        entries = []
        for chunk in self.store.chunks(tokens or [self.serial] * CHUNK)[:1]:
            entry = self.store.store(chunk)
            assert entry is not None
            self.spread(entry)
            entries.append(entry)
        return entries

    def spread(self, entry: Entry) -> None:
        self.jobs += self.cascade.store_jobs(entry)
        self.jobs += self.cascade.copy_ahead()

    def finish(self, count: int | None = None, ok: bool = True) -> None:
        done, self.jobs = self.jobs[:count], self.jobs[count or len(self.jobs) :]
        for tier, job in done:
            self.cascade.finished(tier, JobResult(job.id, ok, "" if ok else "io"))

    def hit(self, entry: Entry) -> None:
        self.core.pin(entry)
        self.jobs += self.cascade.hit([entry])
        self.core.unpin(entry)

    def named(self) -> list[tuple[str, bytes]]:
        return [(tier, job.chunk.key) for tier, job in self.jobs]


def test_a_chunk_goes_at_once_to_tiers_that_are_written_through_and_to_no_others() -> None:
    tiers = Tiers(WRITE_THROUGH, SECOND_HIT, EVICT)
    [entry] = tiers.put()
    assert tiers.named() == [(WRITE_THROUGH, entry.key)]


def test_a_chunk_goes_to_a_tier_when_it_is_hit_for_the_second_time() -> None:
    tiers = Tiers(SECOND_HIT)
    [entry] = tiers.put()
    tiers.hit(entry)
    assert tiers.named() == []
    tiers.hit(entry)
    tiers.hit(entry)
    assert tiers.named() == [(SECOND_HIT, entry.key)], "once, while it is on its way"
    tiers.finish()
    tiers.hit(entry)
    assert tiers.named() == [] and entry.tiers == {SECOND_HIT}


def test_a_copy_that_failed_is_made_at_the_next_hit() -> None:
    tiers = Tiers(SECOND_HIT)
    [entry] = tiers.put()
    for _ in range(2):
        tiers.hit(entry)
    tiers.finish(ok=False)
    tiers.hit(entry)
    assert tiers.named() == [(SECOND_HIT, entry.key)]


def test_whatever_reasons_a_tier_makes_up_the_figures_stay_few() -> None:
    tiers = Tiers(WRITE_THROUGH)
    for serial in range(100):
        tiers.put()
        for tier, job in tiers.jobs:
            tiers.cascade.finished(tier, JobResult(job.id, False, f"reason {serial}"))
        tiers.jobs.clear()
    assert tiers.core.counters.values["tier.write-through.store_failed"] == 100
    assert len(tiers.core.counters.values) < 20


def fill(tiers: Tiers, until: float = 1.0) -> list[Entry]:
    """Store chunks until so much of the pool is in use."""
    entries: list[Entry] = []
    slots = tiers.core.place.slots
    while not entries or slots.used_bytes + 2 * entries[0].slot_bytes <= until * slots.total_bytes:
        before = slots.used_bytes
        entries += tiers.put()
        if slots.used_bytes == before:
            break
    return entries


def test_with_room_left_nothing_is_copied_ahead() -> None:
    tiers = Tiers(EVICT)
    fill(tiers, 0.9)
    assert tiers.named() == []


def test_the_coldest_are_copied_before_room_runs_out_and_nothing_is_lost() -> None:
    tiers = Tiers(EVICT)
    entries = fill(tiers)
    copied = tiers.named()
    assert copied and copied == [(EVICT, entry.key) for entry in entries[: len(copied)]], "coldest first"
    lost = tiers.core.counters.values.get("tier.evict.missed", 0)
    for _ in range(200):
        tiers.finish()
        tiers.put()
    counters = tiers.core.counters.values
    assert counters["host.removed_evicted"] > 150
    assert counters.get("tier.evict.missed", 0) == lost, "nothing is lost once the tier keeps up"


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_what_was_copied_ahead_goes_in_the_order_in_which_it_would_have_gone(at_once: int) -> None:
    tiers = Tiers(EVICT, extents=16)
    entries = [entry for entry in fill(tiers) if entry.state is SlotState.COMMITTED]
    assert len(tiers.jobs) > 4
    gone: list[Entry] = []
    for _ in range(len(entries)):
        while tiers.jobs:
            tiers.finish(at_once)
        tiers.put()
        gone += [entry for entry in entries if entry.state is not SlotState.COMMITTED and entry not in gone]
    assert len(gone) > len(entries) / 2
    assert [entries.index(entry) for entry in gone] == list(range(len(gone))), "the coldest first"


def test_what_was_copied_ahead_goes_first_unless_it_was_used_meanwhile() -> None:
    tiers = Tiers(EVICT)
    fill(tiers)
    copied = [tiers.core.table.get(0, key) for _, key in tiers.named()]
    used, *unused = [entry for entry in copied if entry is not None]
    tiers.hit(used)
    tiers.finish()
    while unused[0].state is SlotState.COMMITTED:
        assert used.state is SlotState.COMMITTED
        tiers.put()
        tiers.finish()
    assert used.state is SlotState.COMMITTED and used.tiers == {EVICT}


def test_a_tier_that_takes_nothing_loses_chunks_and_that_is_counted() -> None:
    tiers = Tiers(EVICT, pinned_share=0.1)
    fill(tiers)
    for _ in range(100):
        tiers.put()
    counters = tiers.core.counters.values
    assert counters["tier.evict.missed"] > 50
    pinned = tiers.cascade.tiers[EVICT].store_bytes
    assert pinned <= 0.1 * tiers.core.place.slots.total_bytes, "it can't fill the pool"


def test_a_tier_that_takes_nothing_is_left_alone_for_a_while() -> None:
    tiers = Tiers(EVICT)
    fill(tiers)
    tried = len(tiers.jobs)
    assert tried > 0
    for _ in range(50):
        tiers.finish(ok=False)
        tiers.put()
    assert tiers.jobs == [] and tiers.core.counters.values["tier.evict.store_io"] == tried
    tiers.store.now += REST_S
    tiers.put()
    assert tiers.jobs, "then it is tried again"


def test_the_reserve_has_so_many_chunks_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.kvstore.cascade.AHEAD_SHARE", 1.0)
    monkeypatch.setattr("forebay.kvstore.cascade.AHEAD_CHUNKS", 8)
    tiers = Tiers(EVICT)
    fill(tiers)
    for _ in range(100):
        tiers.put()
        assert len(tiers.cascade._ahead) + len(tiers.cascade._clean) <= 8
        tiers.finish(3)
    assert len(tiers.cascade._clean) >= 4


def test_a_copy_that_the_tier_has_lost_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.kvstore.cascade.AHEAD_SHARE", 0.5)
    tiers = Tiers(EVICT)
    entries = fill(tiers)
    tiers.finish()
    lost = max(tiers.cascade._clean, key=entries.index)  # of what was copied the last to go
    tiers.cascade.left(lost, EVICT)
    assert lost not in tiers.cascade._clean
    while lost.state is SlotState.COMMITTED and (EVICT, lost.key) not in tiers.named():
        tiers.put()
    assert lost.state is SlotState.COMMITTED, "not before it has been copied again"
    check(tiers)


def test_what_is_touched_is_no_part_of_the_reserve() -> None:
    tiers = Tiers(EVICT)
    entries = fill(tiers)
    tiers.finish()
    tiers.core.touch(entries[:1])
    tiers.cascade.touched(entries[:1])
    check(tiers)
    assert entries[0] not in tiers.cascade._clean and entries[1] in tiers.cascade._clean


def test_stores_go_on_while_everything_is_being_copied() -> None:
    tiers = Tiers(EVICT, pinned_share=1.0)
    fill(tiers)
    before = tiers.core.counters.values["store.committed"]
    for _ in range(50):
        tiers.put()
    assert tiers.core.counters.values["store.committed"] == before + 50


def test_accounts_are_right_after_whatever_happens() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        tiers = Tiers(EVICT, *rng.sample((SECOND_HIT, WRITE_THROUGH), rng.randrange(3)), extents=rng.choice((1, 2)))
        known: list[Entry] = []
        for _ in range(300):
            tiers.store.now += 0.1
            action = rng.random()
            if action < 0.4:
                known += tiers.put()
            elif action < 0.7 and known:
                entry = rng.choice(known)
                if entry.state is SlotState.COMMITTED:
                    tiers.hit(entry)
            elif action < 0.75 and known:
                entry = rng.choice(known)
                if entry.state is SlotState.COMMITTED:
                    tiers.core.retire(entry, "cleared")
            elif tiers.jobs:
                rng.shuffle(tiers.jobs)
                tiers.finish(rng.randrange(1, 5), ok=rng.random() < 0.8)
            check(tiers)
        tiers.finish()
        check(tiers)
        assert not tiers.cascade._ahead and not tiers.cascade._ahead_bytes
        assert all(entry.pins == 0 for entry in tiers.core.table)


def check(tiers: Tiers) -> None:
    cascade = tiers.cascade
    assert cascade._clean_bytes == sum(entry.slot_bytes for entry in cascade._clean)
    assert cascade._ahead_bytes == sum(entry.slot_bytes for entry in cascade._ahead)
    assert all(entry.state is SlotState.COMMITTED and EVICT in entry.tiers for entry in cascade._clean)
    for tier in cascade.tiers.values():
        assert tier.storing == set(tier.stores.values()) and len(tier.storing) == len(tier.stores)


def test_a_lookups_pins_count_as_hits_only_where_a_tier_wants_to_know() -> None:
    plain, counting = Tiers(WRITE_THROUGH), Tiers(EVICT)
    assert not plain.cascade.counts_hits and counting.cascade.counts_hits
    [entry] = counting.put()
    found = match(counting.core, counting.store.prompt([1] * CHUNK))
    pinned = pin(counting.core, counting.store.client, found)
    counting.cascade.hit(pinned.entries)
    assert entry.hits == (1 if entry in pinned.entries else 0)
