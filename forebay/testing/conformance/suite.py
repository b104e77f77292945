"""What every tier owes, ours and others'. Subclass `TierConformance`, give it a `make_driver` fixture, and run.

`make_driver(quota)` returns a `Driver` over an empty tier with that byte quota. A tier that keeps nothing
across `close` sets `persistent = False`; one that answers for exact keys alone sets `partial = False`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from forebay.kvstore.header import SlotState, decode_header, slot_generation, slot_state
from forebay.kvstore.identity import pack_tokens
from forebay.testing.conformance.chunks import Made, Pool, make_chunk, numbered
from forebay.testing.conformance.driver import Driver
from forebay.tiers.base import ClearScope, LoadJob, Query, StoreJob

QUOTA = 1 << 20
BIG = 48 << 10
"""Granule size of chunks of which ten fill the quota."""

MakeDriver = Callable[[int], Driver]


class TierConformance:
    """The suite. See the module's text."""

    partial = True

    @pytest.fixture
    def pool(self) -> Iterator[Pool]:
        """Memory that jobs name."""
        made = Pool()
        yield made
        made.close()

    @pytest.fixture
    def driver(self, make_driver: MakeDriver) -> Driver:
        """A driver over an empty tier."""
        return make_driver(QUOTA)

    # --- storing and loading ---------------------------------------------------------------------------

    @pytest.mark.parametrize("granule", [16, 300, 4096, 20_000, 65_536, 65_540])
    def test_what_was_stored_comes_back_byte_for_byte(self, make_driver: MakeDriver, granule: int) -> None:
        driver = make_driver(QUOTA)
        chunk = make_chunk(granule=granule)
        assert driver.store(chunk).ok
        loaded = driver.load(chunk)
        assert loaded.result.ok, loaded.result.reason
        assert loaded.payload == chunk.payload

    def test_a_load_returns_the_header_with_the_slots_own_fields_reset(self, driver: Driver) -> None:
        chunk = make_chunk()
        driver.store(chunk)
        block = driver.load(chunk).result.header
        assert decode_header(block) == chunk.header
        assert slot_state(block) is SlotState.COMMITTED
        assert slot_generation(memoryview(block)) == 0
        assert len(block) == len(chunk.block)

    def test_a_chunk_that_was_never_stored_is_missing(self, driver: Driver) -> None:
        chunk = make_chunk()
        assert driver.lookup(chunk.query())[0].outcome == "miss"
        assert driver.load(chunk).result.reason == "missing"

    def test_storing_a_chunk_again_keeps_one(self, driver: Driver) -> None:
        chunk = make_chunk()
        assert driver.store(chunk).ok
        assert driver.store(chunk).ok
        assert driver.value("chunks") == 1
        assert sum(change.stored for change in driver.changes) == 1

    def test_groups_with_the_same_key_are_different_chunks(self, driver: Driver) -> None:
        full, window = make_chunk(group=0), make_chunk(group=1)
        assert full.header.key == window.header.key
        driver.store(full)
        assert not driver.has(window)
        driver.store(window)
        assert driver.load(full).payload == full.payload
        assert driver.load(window).payload == window.payload

    def test_every_job_of_a_batch_finishes_exactly_once(self, driver: Driver) -> None:
        chunks = [numbered(i) for i in range(20)]
        stored = driver.finish([driver.store_job(chunk) for chunk in chunks])
        assert all(result.ok for result in stored.values())
        loads = []
        for chunk in [*chunks, numbered(99)]:
            at = driver.pool.slot(len(chunk.payload))
            loads.append(LoadJob(driver.next_id(), chunk.id, 0, at, len(chunk.payload), 10.0))
        results = driver.finish(loads)
        for job, chunk in zip(loads[:-1], chunks, strict=True):
            assert results[job.id].ok
            at = job.payload_offset
            assert driver.pool.memory[at : at + len(chunk.payload)] == chunk.payload
        assert results[loads[-1].id].reason == "missing"

    def test_a_load_into_a_slot_that_is_too_small_fails_and_stays_inside_it(self, driver: Driver) -> None:
        chunk = make_chunk(granule=40_000)
        driver.store(chunk)
        assert not driver.load(chunk, capacity=10_000).result.ok

    # --- slots that aren't what their job says ---------------------------------------------------------

    def _refused(self, driver: Driver, job: StoreJob) -> None:
        result = driver.finish([job])[job.id]
        assert (result.ok, result.reason) == (False, "corrupt")
        assert driver.value("chunks") == 0

    def test_a_slot_with_another_key_than_its_job_is_refused(self, driver: Driver) -> None:
        chunk, other = numbered(1), numbered(2)
        at = driver.pool.put(other)
        self._refused(driver, StoreJob(driver.next_id(), chunk.id, chunk.header.parent, 0, at, chunk.length))

    def test_a_slot_with_another_length_than_its_job_is_refused(self, driver: Driver) -> None:
        chunk = numbered(1)
        at = driver.pool.put(chunk)
        self._refused(driver, StoreJob(driver.next_id(), chunk.id, chunk.header.parent, 0, at, chunk.length - 16))

    def test_a_slot_with_a_damaged_header_is_refused(self, driver: Driver) -> None:
        chunk = numbered(1)
        at = driver.pool.put(chunk)
        driver.pool.memory[at + 100] ^= 1
        self._refused(driver, StoreJob(driver.next_id(), chunk.id, chunk.header.parent, 0, at, chunk.length))

    # --- lookups ---------------------------------------------------------------------------------------

    def test_a_lookup_tells_what_a_hit_has(self, driver: Driver) -> None:
        chunk = make_chunk(range(48))
        driver.store(chunk)
        (found,) = driver.lookup(chunk.query())
        assert (found.outcome, found.key, found.matched) == ("hit", chunk.header.key, 48)
        assert (found.tokens, found.length) == (48, chunk.length)

    def test_answers_come_in_the_order_of_the_queries(self, driver: Driver) -> None:
        chunks = [numbered(i) for i in range(8)]
        for chunk in chunks[::2]:
            driver.store(chunk)
        found = driver.lookup(*[chunk.query() for chunk in chunks])
        assert [f.outcome for f in found] == ["hit", "miss"] * 4
        assert [f.key for f in found[::2]] == [chunk.header.key for chunk in chunks[::2]]

    def test_a_prefix_that_ends_inside_a_stored_chunk_hits_to_the_unit(self, driver: Driver) -> None:
        if not self.partial:
            pytest.skip("this tier answers for exact keys alone")
        chunk = make_chunk(range(64))
        driver.store(chunk)
        wanted = Query(0, b"x" * 32, chunk.header.parent, pack_tokens([*range(40), *[9] * 24]))
        (found,) = driver.lookup(wanted)
        assert (found.outcome, found.key, found.matched, found.tokens) == ("hit", chunk.header.key, 32, 64)

    def test_of_several_children_the_one_that_shares_most_is_named(self, driver: Driver) -> None:
        if not self.partial:
            pytest.skip("this tier answers for exact keys alone")
        for length in (16, 32, 48):
            driver.store(make_chunk([*range(length), *[5000 + length] * (64 - length)]))
        (found,) = driver.lookup(Query(0, b"x" * 32, make_chunk().header.parent, pack_tokens(range(64))))
        assert found.matched == 48

    def test_a_whole_chunk_is_asked_for_where_a_front_of_one_is_of_no_use(self, driver: Driver) -> None:
        """A recurrent state: it belongs to the last of its tokens."""
        if not self.partial:
            pytest.skip("this tier answers for exact keys alone")
        for length in (16, 32, 64):
            driver.store(make_chunk(range(length)))
        parent, tokens = make_chunk().header.parent, pack_tokens([*range(48), *[9] * 16])
        whole, any_front = (Query(0, b"x" * 32, parent, tokens, b"", flag) for flag in (True, False))
        assert [(f.outcome, f.matched, f.tokens) for f in driver.lookup(whole, any_front)] == [
            ("hit", 32, 32), ("hit", 48, 64),
        ]  # fmt: skip

    def test_a_child_of_another_parent_or_group_is_no_partial_hit(self, driver: Driver) -> None:
        driver.store(make_chunk(range(64)))
        tokens = pack_tokens(range(48))
        other_parent, other_group = Query(0, b"x" * 32, b"p" * 32, tokens), Query(1, b"x" * 32, b"r" * 32, tokens)
        assert [f.outcome for f in driver.lookup(other_parent, other_group)] == ["miss", "miss"]

    def test_less_than_one_shared_unit_is_a_miss(self, driver: Driver) -> None:
        driver.store(make_chunk(range(64)))
        query = Query(0, b"x" * 32, make_chunk().header.parent, pack_tokens([*range(15), *[7] * 17]))
        assert driver.lookup(query)[0].outcome == "miss"

    # --- leaving ---------------------------------------------------------------------------------------

    def test_a_fuller_chunk_replaces_the_shorter_one(self, driver: Driver) -> None:
        tail, full = make_chunk(range(32)), make_chunk(range(48))
        driver.store(tail)
        assert driver.store(full, replaces=tail.header.key).ok
        driver.until(lambda: driver.value("chunks") == 1, "the shorter chunk to leave")
        assert driver.has(full)
        assert driver.serves(full)
        assert driver.lookup(tail.query())[0].key != tail.header.key

    def test_a_forgotten_chunk_is_a_miss(self, driver: Driver) -> None:
        gone, kept = numbered(1), numbered(2)
        driver.store(gone)
        driver.store(kept)
        driver.engine.forget([gone.id, numbered(3).id], "corrupt")
        driver.until(lambda: not driver.has(gone), "the chunk to leave")
        assert not driver.serves(gone)
        assert driver.serves(kept)

    def test_clearing_a_namespace_leaves_the_others(self, driver: Driver) -> None:
        ours = [numbered(i) for i in range(5)]
        other = numbered(9, namespace=b"o" * 32)
        for chunk in (*ours, other):
            driver.store(chunk)
        assert driver.engine.clear(ours[0].header.namespace) == 5
        assert not any(driver.has(chunk) for chunk in ours)
        assert not any(driver.serves(chunk) for chunk in ours)
        assert driver.serves(other)

    def test_clearing_everything_leaves_nothing(self, driver: Driver) -> None:
        empty = driver.value("bytes")
        for chunk in (numbered(1), numbered(2, namespace=b"o" * 32)):
            driver.store(chunk)
        assert driver.engine.clear(b"") == 2
        driver.until(lambda: driver.value("bytes") == empty, "all bytes to be freed")
        assert driver.value("chunks") == 0

    def test_a_cleared_chunk_can_be_stored_again(self, driver: Driver) -> None:
        chunk = make_chunk()
        for _ in range(3):
            assert driver.store(chunk).ok
            assert driver.serves(chunk)
            driver.engine.clear(b"")
            assert not driver.serves(chunk)

    # A tier that can't tell what a scope covers answers None, and has removed nothing.

    def test_clearing_a_tenant_leaves_the_others(self, driver: Driver) -> None:
        ours = [numbered(i, tenant="acme") for i in range(3)]
        others = [numbered(8, tenant="other"), numbered(9), numbered(10, tenant="acme", namespace=b"o" * 32)]
        for chunk in (*ours, *others):
            driver.store(chunk)
        count = driver.engine.clear_scope(ClearScope(ours[0].header.namespace, "acme"))
        assert [driver.serves(chunk) for chunk in ours] == [count is None] * 3 and count in (3, None)
        assert all(driver.serves(chunk) for chunk in others)

    def test_clearing_behind_a_prefix_takes_what_goes_on_from_it_in_all_groups(self, driver: Driver) -> None:
        shared = make_chunk(range(32))
        one = [make_chunk([1] * 32, parent=shared.header.key, start=32, group=g) for g in (0, 1)]
        deep = make_chunk([5] * 32, parent=one[0].header.key, start=64)
        deep_tail = make_chunk([5] * 16, parent=one[1].header.key, start=64, group=1)
        orphan = make_chunk([6] * 32, parent=b"gone" * 8, start=64)
        two = make_chunk([2] * 32, parent=shared.header.key, start=32)
        below, kept = [*one, deep, deep_tail, orphan], [shared, two]
        for chunk in (*below, *kept):
            driver.store(chunk)
        scope = ClearScope(shared.header.namespace, None, 2, shared.header.key, 32, pack_tokens([1] * 16))
        count = driver.engine.clear_scope(scope)
        assert count in (len(below), None)
        assert [driver.serves(chunk) for chunk in below] == [count is None] * len(below)
        assert all(driver.serves(chunk) for chunk in kept)

    # --- the quota -------------------------------------------------------------------------------------

    def test_the_quota_holds_and_the_least_recently_used_chunk_leaves(self, driver: Driver) -> None:
        chunks = [numbered(i, granule=BIG) for i in range(8)]
        for chunk in chunks:
            assert driver.store(chunk).ok
        assert driver.has(chunks[0])
        for chunk in [numbered(100 + i, granule=BIG) for i in range(4)]:
            assert driver.store(chunk).ok
            assert driver.value("bytes") <= QUOTA
        assert driver.has(chunks[0]), "it was used after the others"
        assert not driver.has(chunks[1])

    def test_the_front_of_a_chain_outlives_its_end(self, driver: Driver) -> None:
        chunks = [numbered(i, granule=BIG) for i in range(8)]
        for chunk in chunks:
            driver.store(chunk)
        driver.lookup(*[chunk.query() for chunk in chunks])
        for chunk in [numbered(100 + i, granule=BIG) for i in range(5)]:
            driver.store(chunk)
        held = [driver.has(chunk) for chunk in chunks]
        assert held == sorted(held, reverse=True), "a chunk is of no use without those before it"
        assert 0 < sum(held) < 8

    def test_cold_chunks_leave_first(self, driver: Driver) -> None:
        warm = [numbered(i, granule=BIG) for i in range(5)]
        cold = [numbered(50 + i, granule=BIG) for i in range(4)]
        for chunk in warm:
            driver.store(chunk)
        for chunk in cold:
            driver.store(chunk, cold=True)
        for chunk in [numbered(100 + i, granule=BIG) for i in range(4)]:
            driver.store(chunk)
        assert all(driver.has(chunk) for chunk in warm)
        assert not any(driver.has(chunk) for chunk in cold[:3])

    def test_a_chunk_that_is_larger_than_the_quota_is_refused(self, driver: Driver) -> None:
        small = numbered(1)
        driver.store(small)
        result = driver.store(numbered(2, granule=QUOTA))
        assert (result.ok, result.reason) == (False, "quota")
        assert driver.has(small), "nothing was evicted in vain"

    # --- what is told ----------------------------------------------------------------------------------

    def test_arrivals_and_removals_are_told_with_their_headers(self, driver: Driver) -> None:
        chunk = make_chunk()
        driver.store(chunk)
        driver.engine.forget([chunk.id], "cleared")
        driver.until(lambda: len(driver.changes) == 2, "both changes")
        came, went = driver.changes
        assert (came.chunk, came.stored, decode_header(came.header)) == (chunk.id, True, chunk.header)
        assert (went.chunk, went.stored, went.reason) == (chunk.id, False, "cleared")
        assert decode_header(went.header) == chunk.header

    def test_what_is_told_adds_up_to_what_is_held(self, driver: Driver) -> None:
        chunks: dict[object, Made] = {}
        for i in range(24):
            chunk = numbered(i, granule=BIG)
            chunks[chunk.id] = chunk
            driver.store(chunk)
        driver.until(lambda: sum(1 if c.stored else -1 for c in driver.changes) == driver.value("chunks"), "changes")
        told: set[object] = set()
        for change in driver.changes:
            (told.add if change.stored else told.discard)(change.chunk)
        assert told == {key for key, chunk in chunks.items() if driver.has(chunk)}
        assert {change.reason for change in driver.changes if not change.stored} == {"evicted"}

    def test_statistics_always_have_the_agreed_names(self, driver: Driver) -> None:
        assert {"bytes", "bytes_quota", "chunks", "queue_bytes"} <= driver.engine.stats().values.keys()
        assert driver.value("bytes_quota") == QUOTA
