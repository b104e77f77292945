"""Lookups: exact, partial, in order."""

from __future__ import annotations

from forebay.kvstore.identity import pack_tokens
from forebay.testing.conformance.abilities import needs
from forebay.testing.conformance.base import Suite
from forebay.testing.conformance.chunks import make_chunk, numbered
from forebay.testing.conformance.driver import Driver
from forebay.tiers.base import Query


class Looking(Suite):
    """Lookups."""

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

    @needs("partial")
    def test_a_prefix_that_ends_inside_a_stored_chunk_hits_to_the_unit(self, driver: Driver) -> None:
        chunk = make_chunk(range(64))
        driver.store(chunk)
        wanted = Query(0, b"x" * 32, chunk.header.parent, pack_tokens([*range(40), *[9] * 24]))
        (found,) = driver.lookup(wanted)
        assert (found.outcome, found.key, found.matched, found.tokens) == ("hit", chunk.header.key, 32, 64)

    @needs("partial")
    def test_of_several_children_the_one_that_shares_most_is_named(self, driver: Driver) -> None:
        for length in (16, 32, 48):
            driver.store(make_chunk([*range(length), *[5000 + length] * (64 - length)]))
        (found,) = driver.lookup(Query(0, b"x" * 32, make_chunk().header.parent, pack_tokens(range(64))))
        assert found.matched == 48

    @needs("partial")
    def test_a_whole_chunk_is_asked_for_where_a_front_of_one_is_of_no_use(self, driver: Driver) -> None:
        """A recurrent state: it belongs to the last of its tokens."""
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

    def test_no_query_and_the_same_query_twice(self, driver: Driver) -> None:
        chunk = make_chunk()
        driver.store(chunk)
        assert driver.lookup() == []
        one, two = driver.lookup(chunk.query(), chunk.query())
        assert one == two and one.outcome == "hit"

    def test_a_lookup_of_thousands_is_answered_in_one_call_and_leaves_nothing_behind(self, driver: Driver) -> None:
        there = make_chunk()
        driver.store(there)
        queries = [Query(0, number.to_bytes(32, "little"), b"p" * 32, there.header.tokens) for number in range(3000)]
        found = driver.lookup(*queries, there.query())
        assert found[-1].outcome == "hit"
        assert {answer.outcome for answer in found[:-1]} <= {"miss", "away"}, "it may not look for so many at once"
        driver.until(lambda: driver.value("queue_bytes") == 0, "queues to be empty")

    @needs("stall")
    def test_a_lookup_answers_while_the_device_stands_still(self, driver: Driver) -> None:
        """With what it knows, or `retry`, or `away`, or a miss; but it answers, again and again."""
        chunk = make_chunk()
        driver.store(chunk)
        queries = [chunk.query(), *[numbered(1 + i).query() for i in range(100)]]
        with self.stalled(driver):
            for _ in range(20):
                answers = driver.within_patience(lambda: driver.engine.lookup_once(queries))
                assert len(answers) == len(queries)
                assert all(answer.outcome != "hit" for answer in answers[1:])
        assert driver.has(chunk)
