"""What a tier says of itself: changes and figures."""

from __future__ import annotations

import math

from forebay.kvstore.header import decode_header
from forebay.testing.conformance.abilities import needs
from forebay.testing.conformance.base import BIG, QUOTA, Suite
from forebay.testing.conformance.chunks import Made, make_chunk, numbered
from forebay.testing.conformance.driver import Driver


class Telling(Suite):
    """Changes and statistics."""

    @needs("told", "forget")
    def test_arrivals_and_removals_are_told_with_their_headers(self, driver: Driver) -> None:
        chunk = make_chunk()
        driver.store(chunk)
        driver.engine.forget([chunk.id], "cleared")
        driver.until(lambda: len(driver.changes) == 2, "both changes")
        came, went = driver.changes
        assert (came.chunk, came.stored, decode_header(came.header)) == (chunk.id, True, chunk.header)
        assert (went.chunk, went.stored, went.reason) == (chunk.id, False, "cleared")
        assert decode_header(went.header) == chunk.header

    @needs("told", "quota", "eviction")
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
        assert "quota" in self.lacks or driver.value("bytes_quota") == QUOTA

    @needs("counts")
    def test_figures_are_finite_numbers_and_nothing_is_queued_at_rest(self, driver: Driver) -> None:
        chunk = make_chunk()
        driver.store(chunk)
        driver.serves(chunk)
        driver.until(lambda: driver.value("queue_bytes") == 0, "queues to be empty")
        stats = driver.engine.stats()
        assert all(math.isfinite(value) and value >= 0 for value in stats.values.values()), stats.values
        assert all(isinstance(text, str) for text in stats.info.values())
        assert driver.value("chunks") == 1 and driver.value("bytes") >= len(chunk.payload)

    @needs("told", "quota", "eviction")
    def test_changes_are_told_after_they_are_true(self, driver: Driver) -> None:
        """What is told last of a chunk is so when it is told, unless something newer is told by then."""
        chunks = {chunk.id: chunk for chunk in (numbered(i, granule=BIG) for i in range(20))}
        checked = 0
        for chunk in chunks.values():
            driver.store(chunk)
            fresh, checked = driver.changes[checked:], len(driver.changes)
            for key, stored in {change.chunk: change.stored for change in fresh}.items():
                so = driver.has(chunks[key])
                driver.pump()
                newest = [change.stored for change in driver.changes if change.chunk == key][-1]
                assert so == stored or newest != stored, "it was told before it was true"

    @needs("damage")
    def test_damage_is_a_miss_that_is_counted_and_told(self, driver: Driver) -> None:
        hurt, sound = numbered(1), numbered(2)
        driver.store(hurt)
        driver.store(sound)
        before = self._corrupt(driver)
        self.damage(driver, hurt)
        loaded = driver.load(hurt)
        assert (loaded.result.ok, loaded.result.reason) == (False, "corrupt")
        assert self._corrupt(driver) > before, "nobody would know"
        driver.until(lambda: not driver.has(hurt), "the damaged chunk to leave")
        if "told" not in self.lacks:
            driver.until(lambda: driver.changes[-1].chunk == hurt.id, "its removal")
            assert (driver.changes[-1].stored, driver.changes[-1].reason) == (False, "corrupt")
        assert driver.serves(sound)
        assert driver.store(hurt).ok
        assert driver.serves(hurt), "stored again, it is whole again"

    def _corrupt(self, driver: Driver) -> float:
        return sum(value for name, value in driver.engine.stats().values.items() if "corrupt" in name)
