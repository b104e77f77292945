"""How chunks leave: replaced, forgotten, cleared."""

from __future__ import annotations

from forebay.kvstore.identity import pack_tokens
from forebay.testing.conformance.abilities import needs
from forebay.testing.conformance.base import Suite
from forebay.testing.conformance.chunks import make_chunk, numbered
from forebay.testing.conformance.driver import Driver
from forebay.tiers.base import ClearScope


class Leaving(Suite):
    """Removals that somebody asks for."""

    @needs("forget", "counts")
    def test_a_fuller_chunk_replaces_the_shorter_one(self, driver: Driver) -> None:
        tail, full = make_chunk(range(32)), make_chunk(range(48))
        driver.store(tail)
        assert driver.store(full, replaces=tail.header.key).ok
        driver.until(lambda: driver.value("chunks") == 1, "the shorter chunk to leave")
        assert driver.has(full)
        assert driver.serves(full)
        assert driver.lookup(tail.query())[0].key != tail.header.key

    @needs("forget")
    def test_a_forgotten_chunk_is_a_miss(self, driver: Driver) -> None:
        gone, kept = numbered(1), numbered(2)
        driver.store(gone)
        driver.store(kept)
        driver.engine.forget([gone.id, numbered(3).id], "corrupt")
        driver.until(lambda: not driver.has(gone), "the chunk to leave")
        assert not driver.serves(gone)
        assert driver.serves(kept)

    @needs("clear")
    def test_clearing_a_namespace_leaves_the_others(self, driver: Driver) -> None:
        ours = [numbered(i) for i in range(5)]
        other = numbered(9, namespace=b"o" * 32)
        for chunk in (*ours, other):
            driver.store(chunk)
        assert driver.engine.clear(ours[0].header.namespace) == 5
        assert not any(driver.has(chunk) for chunk in ours)
        assert not any(driver.serves(chunk) for chunk in ours)
        assert driver.serves(other)

    @needs("clear", "counts")
    def test_clearing_everything_leaves_nothing(self, driver: Driver) -> None:
        empty = driver.value("bytes")
        for chunk in (numbered(1), numbered(2, namespace=b"o" * 32)):
            driver.store(chunk)
        assert driver.engine.clear(b"") == 2
        driver.until(lambda: driver.value("bytes") == empty, "all bytes to be freed")
        assert driver.value("chunks") == 0

    @needs("clear")
    def test_a_cleared_chunk_can_be_stored_again(self, driver: Driver) -> None:
        chunk = make_chunk()
        for _ in range(3):
            assert driver.store(chunk).ok
            assert driver.serves(chunk)
            driver.engine.clear(b"")
            assert not driver.serves(chunk)

    # A tier that can't tell what a scope covers answers None, and has removed nothing.

    @needs("clear")
    def test_clearing_a_tenant_leaves_the_others(self, driver: Driver) -> None:
        ours = [numbered(i, tenant="acme") for i in range(3)]
        others = [numbered(8, tenant="other"), numbered(9), numbered(10, tenant="acme", namespace=b"o" * 32)]
        for chunk in (*ours, *others):
            driver.store(chunk)
        count = driver.engine.clear_scope(ClearScope(ours[0].header.namespace, "acme"))
        assert [driver.serves(chunk) for chunk in ours] == [count is None] * 3 and count in (3, None)
        assert all(driver.serves(chunk) for chunk in others)

    @needs("clear")
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

    @needs("told", "forget")
    def test_what_is_replaced_is_told_as_that(self, driver: Driver) -> None:
        tail, full = make_chunk(range(32)), make_chunk(range(48))
        driver.store(tail)
        driver.store(full, replaces=tail.header.key)
        driver.until(lambda: len(driver.changes) == 3, "two arrivals and a removal")
        assert [(c.chunk, c.stored, c.reason) for c in driver.changes if not c.stored] == [(tail.id, False, "replaced")]

    def test_replacing_what_is_not_there_is_a_plain_store(self, driver: Driver) -> None:
        chunk = make_chunk()
        assert driver.store(chunk, replaces=numbered(7).header.key).ok
        assert driver.serves(chunk)

    @needs("forget")
    def test_forgetting_and_loading_at_once_gives_the_bytes_or_a_miss(self, driver: Driver) -> None:
        chunks = [numbered(i) for i in range(16)]
        for chunk in chunks:
            driver.store(chunk)
        loads = [driver.load_job(chunk) for chunk in chunks]
        driver.engine.begin(loads)
        driver.engine.forget([chunk.id for chunk in chunks], "cleared")
        results = driver.results_of(loads)
        for job, chunk in zip(loads, chunks, strict=True):
            driver.check_load(job, chunk, results[job.id])
        assert not any(driver.serves(chunk) for chunk in chunks)
