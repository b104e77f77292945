"""The quota holds, and what is of least use makes room."""

from __future__ import annotations

from forebay.testing.conformance.abilities import needs
from forebay.testing.conformance.base import BIG, QUOTA, Suite
from forebay.testing.conformance.chunks import numbered
from forebay.testing.conformance.driver import Driver


class Keeping(Suite):
    """Quota and eviction."""

    @needs("quota", "eviction")
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

    @needs("quota", "eviction")
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

    @needs("quota", "eviction")
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

    @needs("quota")
    def test_a_chunk_that_is_larger_than_the_quota_is_refused(self, driver: Driver) -> None:
        small = numbered(1)
        driver.store(small)
        result = driver.store(numbered(2, granule=QUOTA))
        assert (result.ok, result.reason) == (False, "quota")
        assert driver.has(small), "nothing was evicted in vain"

    @needs("quota", "counts")
    def test_the_quota_holds_while_many_are_stored_at_once(self, driver: Driver) -> None:
        chunks = [numbered(i, granule=BIG) for i in range(24)]
        jobs = [driver.store_job(chunk) for chunk in chunks]
        driver.engine.begin(jobs)
        ids, most = {job.id for job in jobs}, 0.0

        def finished() -> bool:
            nonlocal most
            most = max(most, driver.value("bytes"))
            return ids <= {result.id for result in driver.results}

        driver.until(finished, "all stores")
        assert 0 < most <= QUOTA
        held = [chunk for chunk in chunks if driver.has(chunk)]
        assert held and all(driver.serves(chunk) for chunk in held)

    @needs("quota", "eviction")
    def test_a_cold_chunk_that_was_loaded_is_cold_no_more(self, driver: Driver) -> None:
        cold, others = numbered(1, granule=BIG), [numbered(10 + i, granule=BIG) for i in range(6)]
        driver.store(cold, cold=True)
        for chunk in others:
            driver.store(chunk)
        assert driver.serves(cold)
        for chunk in [numbered(100 + i, granule=BIG) for i in range(5)]:
            driver.store(chunk)
        assert driver.has(cold), "it was used after the others"
