"""What goes in comes out, byte for byte, and what is no chunk is refused."""

from __future__ import annotations

import pytest

from forebay.kvstore.header import SlotState, decode_header, slot_generation, slot_state
from forebay.testing.conformance.base import QUOTA, MakeDriver, Suite
from forebay.testing.conformance.chunks import make_chunk, numbered
from forebay.testing.conformance.driver import Driver
from forebay.tiers.base import LoadJob, StoreJob


class Storing(Suite):
    """Storing and loading."""

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
        if "counts" not in self.lacks:
            assert driver.value("chunks") == 1
        assert "told" in self.lacks or sum(change.stored for change in driver.changes) == 1

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

    # --- slots that are not what their job says ---------------------------------------------------------

    def _refused(self, driver: Driver, job: StoreJob) -> None:
        result = driver.finish([job])[job.id]
        assert (result.ok, result.reason) == (False, "corrupt")
        if "counts" not in self.lacks:
            assert driver.value("chunks") == 0
        assert not driver.serves(numbered(1))

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

    # --- sizes -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("tokens", "granule"), [(16, 1), (16, 16), (512, 16), (512, 4096), (32, 3 << 19)])
    def test_tiny_and_big_chunks_come_back(self, make_driver: MakeDriver, tokens: int, granule: int) -> None:
        driver = make_driver(32 << 20)
        chunk = make_chunk(range(tokens), granule=granule, tenant="acme")
        assert driver.store(chunk).ok
        assert driver.has(chunk)
        assert driver.serves(chunk)

    def test_a_chunk_comes_back_into_another_extent_and_leaves_the_rest_alone(self, driver: Driver) -> None:
        second = driver.attach()
        chunk = make_chunk()
        assert driver.store(chunk).ok
        assert driver.load(chunk, extent=second, capacity=len(chunk.payload) + 5000).payload == chunk.payload
