"""Ends and new starts."""

from __future__ import annotations

import os
import threading

from forebay.testing.conformance.abilities import needs
from forebay.testing.conformance.base import QUOTA, MakeDriver, Suite
from forebay.testing.conformance.chunks import numbered
from forebay.testing.conformance.driver import Driver


class Enduring(Suite):
    """Close, restart."""

    def test_a_close_ends_every_job_and_what_it_calls_stored_is_there_later(self, make_driver: MakeDriver) -> None:
        driver = make_driver(QUOTA)
        chunks = [numbered(i, granule=10_000) for i in range(10)]
        jobs = [driver.store_job(chunk) for chunk in chunks]
        driver.engine.begin(jobs)
        driver.end()
        ids = [job.id for job in jobs]
        assert sorted(result.id for result in driver.results) == ids, "each ends once, at the latest with the close"
        if "persistent" in self.lacks:
            return
        stored = {result.id for result in driver.results if result.ok}
        again = make_driver(QUOTA)
        for job, chunk in zip(jobs, chunks, strict=True):
            assert again.serves(chunk) or job.id not in stored

    @needs("persistent")
    def test_what_was_stored_is_there_after_a_restart(self, make_driver: MakeDriver) -> None:
        chunks = [numbered(i, granule=granule) for i, granule in enumerate((16, 3000, 4096, 40_000))]
        first = make_driver(QUOTA)
        for chunk in chunks:
            first.store(chunk)
        first.end()
        again = make_driver(QUOTA)
        assert all(again.has(chunk) for chunk in chunks)
        assert all(again.serves(chunk) for chunk in chunks)
        if "counts" not in self.lacks:
            assert again.value("chunks") == 4 and again.value("bytes") > 0

    @needs("persistent", "forget", "clear")
    def test_what_was_removed_stays_away_after_a_restart(self, make_driver: MakeDriver) -> None:
        forgotten, kept, cleared = numbered(1), numbered(2), numbered(3, namespace=b"o" * 32)
        first = make_driver(QUOTA)
        for chunk in (forgotten, kept, cleared):
            first.store(chunk)
        first.engine.forget([forgotten.id], "cleared")
        assert first.engine.clear(cleared.header.namespace) == 1
        first.end()
        again = make_driver(QUOTA)
        assert not again.serves(forgotten) and not again.serves(cleared)
        assert again.serves(kept)

    def test_a_tier_that_keeps_nothing_forgets_everything(self, make_driver: MakeDriver) -> None:
        if "persistent" not in self.lacks:
            return  # the tests above are for this tier
        first, chunk = make_driver(QUOTA), numbered(1)
        first.store(chunk)
        first.end()
        again = make_driver(QUOTA)
        assert not again.has(chunk) and not again.serves(chunk)
        assert again.store(chunk).ok and again.serves(chunk)

    @needs("tidy")
    def test_a_close_leaves_no_thread_and_no_descriptor(self, make_driver: MakeDriver) -> None:
        self._use_once(make_driver(QUOTA))  # what is opened once and for all, libraries and the like, is open now
        threads, descriptors = _threads(), _descriptors()
        self._use_once(make_driver(QUOTA))
        assert _threads() == threads
        assert _descriptors() == descriptors

    def _use_once(self, driver: Driver) -> None:
        chunk = numbered(1)
        driver.store(chunk)
        assert driver.serves(chunk)
        driver.end()


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
