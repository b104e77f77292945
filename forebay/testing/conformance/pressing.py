"""Much at once, devices that stand still, queues that are full."""

from __future__ import annotations

import random
import time

import pytest

from forebay.testing.conformance.abilities import needs
from forebay.testing.conformance.base import BIG, QUEUE, QUOTA, MakeDriver, Suite
from forebay.testing.conformance.chunks import Made, numbered
from forebay.testing.conformance.driver import Driver
from forebay.tiers.base import LoadJob, StoreJob


class Pressing(Suite):
    """Concurrency, full queues, deadlines."""

    def test_loads_and_stores_at_once_each_end_once_with_the_right_bytes(self, driver: Driver) -> None:
        old, new = [numbered(i) for i in range(12)], [numbered(100 + i) for i in range(12)]
        for chunk in old:
            driver.store(chunk)
        loads, stores = [driver.load_job(chunk) for chunk in old], [driver.store_job(chunk) for chunk in new]
        both: list[StoreJob | LoadJob] = [job for pair in zip(stores, loads, strict=True) for job in pair]
        results = driver.finish(both)
        for job, chunk in zip(loads, old, strict=True):
            assert driver.check_load(job, chunk, results[job.id])
        assert all(results[job.id].ok for job in stores)
        assert all(driver.serves(chunk) for chunk in new)
        driver.expect_no_more()

    def test_two_loads_of_one_chunk_at_once_both_succeed(self, driver: Driver) -> None:
        chunk = numbered(1, granule=20_000)
        driver.store(chunk)
        jobs = [driver.load_job(chunk) for _ in range(6)]
        results = driver.finish(jobs)
        assert all(driver.check_load(job, chunk, results[job.id]) for job in jobs)

    def test_two_stores_of_one_chunk_at_once_keep_one(self, driver: Driver) -> None:
        chunk = numbered(1)
        results = driver.finish([driver.store_job(chunk) for _ in range(6)])
        assert all(result.ok for result in results.values())
        assert driver.serves(chunk)
        if "counts" not in self.lacks:
            assert driver.value("chunks") == 1

    @pytest.mark.parametrize("seed", range(3))
    def test_any_history_serves_the_bytes_of_the_key_or_a_miss(self, driver: Driver, seed: int) -> None:
        rng = random.Random(seed)
        chunks = [numbered(i, granule=rng.choice((16, 3000, 4096, BIG))) for i in range(24)]
        for _ in range(40):
            wanted: list[tuple[LoadJob, Made]] = []
            jobs: list[StoreJob | LoadJob] = []
            for chunk in rng.choices(chunks, k=rng.randrange(1, 6)):
                if rng.random() < 0.5:
                    jobs.append(driver.store_job(chunk, cold=rng.random() < 0.2))
                else:
                    wanted.append((driver.load_job(chunk), chunk))
                    jobs.append(wanted[-1][0])
            driver.engine.begin(jobs)
            if "forget" not in self.lacks and rng.random() < 0.2:
                driver.engine.forget([chunk.id for chunk in rng.choices(chunks, k=2)], "cleared")
            results = driver.results_of(jobs)
            for job, chunk in wanted:
                driver.check_load(job, chunk, results[job.id])
        driver.expect_no_more()
        if not {"quota", "counts"} & self.lacks.keys():
            assert driver.value("bytes") <= QUOTA

    @needs("stall", "queue")
    def test_a_full_store_queue_drops_at_once_and_counts(self, make_driver: MakeDriver) -> None:
        driver = make_driver(4 << 20)
        chunks = [numbered(i, granule=16 << 10) for i in range(40)]
        assert sum(chunk.length for chunk in chunks) > 4 * QUEUE
        with self.stalled(driver):
            jobs = [driver.store_job(chunk) for chunk in chunks]
            driver.engine.begin(jobs)
            driver.until(lambda: len(driver.results) >= 20, "what is over the queue's bound")
            driver.until(lambda: self._dropped(driver) >= 20, "a count of it")
            assert {result.reason for result in driver.results} == {"dropped"}
            assert driver.value("queue_bytes") <= QUEUE
        results = driver.results_of(jobs)
        reasons = [result.reason for result in results.values() if not result.ok]
        assert set(reasons) <= {"dropped"} and len(reasons) < len(jobs), reasons
        assert self._dropped(driver) == len(reasons)
        for job, chunk in zip(jobs, chunks, strict=True):
            assert driver.serves(chunk) == results[job.id].ok
        driver.until(lambda: driver.value("queue_bytes") == 0, "an empty queue")

    def _dropped(self, driver: Driver) -> float:
        return sum(value for name, value in driver.engine.stats().values.items() if "dropped" in name)

    @needs("stall", "deadline")
    def test_a_load_that_misses_its_deadline_is_late(self, driver: Driver) -> None:
        chunk = numbered(1)
        driver.store(chunk)
        with self.stalled(driver):
            jobs = [driver.load_job(chunk, deadline_s=0.05) for _ in range(4)]
            driver.engine.begin(jobs)
            time.sleep(0.2)
        assert {result.reason for result in driver.results_of(jobs).values()} == {"late"}
        driver.until(lambda: driver.serves(chunk), "the device to be well again")

    @needs("stall")
    def test_what_stood_still_goes_on_and_every_job_ends_once(self, driver: Driver) -> None:
        old, new = [numbered(i) for i in range(4)], [numbered(100 + i) for i in range(4)]
        for chunk in old:
            driver.store(chunk)
        with self.stalled(driver):
            loads, stores = [driver.load_job(chunk) for chunk in old], [driver.store_job(chunk) for chunk in new]
            driver.engine.begin([*loads, *stores])
            for _ in range(5):
                driver.pump()
        results = driver.results_of([*loads, *stores])
        for job, chunk in zip(loads, old, strict=True):
            driver.check_load(job, chunk, results[job.id])
        for store, chunk in zip(stores, new, strict=True):
            assert not results[store.id].ok or driver.serves(chunk)
        driver.expect_no_more()
