"""What peers said is remembered briefly, and never more of it than fits."""

from __future__ import annotations

import msgspec
import pytest

from forebay.tiers.base import ChunkId, LookupResult, Query
from forebay.tiers.p2p import answers
from forebay.tiers.p2p.answers import AWAY, MISS, RETRY, Answers
from forebay.tiers.p2p.push import ranked

PEERS = frozenset("ab")


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def query(number: int) -> Query:
    return Query(0, number.to_bytes(32, "big"), b"p" * 32, b"")


def hit(number: int, matched: int = 32) -> LookupResult:
    return LookupResult("hit", number.to_bytes(32, "big"), matched, 32, 100)


def known(time: Time, **more: int) -> Answers:
    return Answers(hit_s=1.0, miss_s=0.1, clock=time, **more)


def test_a_question_is_open_until_somebody_has_it_or_all_have_answered() -> None:
    asked = known(Time())
    first = asked.look([query(1), query(2)], PEERS)
    assert first.results == [RETRY, RETRY] and first.unasked == [query(1), query(2)]
    assert asked.look([query(1)], PEERS).unasked == [], "it has been asked already"
    asked.heard("a", [query(1), query(2)], [hit(1), MISS])
    assert asked.look([query(1), query(2)], PEERS).results == [hit(1), RETRY]
    asked.silent("b", [query(2)])
    assert asked.look([query(2)], PEERS).results == [AWAY], "b may have it"


def test_of_partial_hits_the_longest_is_taken_once_all_have_answered() -> None:
    asked = known(Time())
    asked.look([query(1)], PEERS)
    asked.heard("a", [query(1)], [hit(7, matched=16)])
    assert asked.look([query(1)], PEERS).results == [RETRY]
    asked.heard("b", [query(1)], [hit(8, matched=24)])
    assert asked.look([query(1)], PEERS).results == [hit(8, matched=24)]
    assert asked.places(ChunkId(0, hit(8).key)) == ["b"]


def test_a_partial_hit_is_not_all_there_is_where_somebody_did_not_say() -> None:
    asked, part = known(Time()), hit(7, matched=16)
    asked.look([query(1), query(2)], PEERS)
    asked.look([query(3)], PEERS, absent=True)
    asked.heard("a", [query(1), query(2), query(3)], [part, hit(2), part])
    asked.heard("b", [query(3)], [MISS])
    asked.silent("b", [query(1)])
    unsure = msgspec.structs.replace(part, sure=False)
    assert asked.look([query(1), query(2), query(3)], PEERS).results == [unsure, hit(2), unsure]


def test_answers_end_misses_sooner_than_hits() -> None:
    time = Time()
    asked = known(time)
    asked.look([query(1), query(2)], PEERS)
    for peer in "ab":
        asked.heard(peer, [query(1), query(2)], [hit(1), MISS])
    time.now += 0.2
    assert asked.look([query(1), query(2)], PEERS).unasked == [query(2)]
    time.now += 1.0
    assert asked.look([query(1)], PEERS).unasked == [query(1)]


def test_a_hit_is_no_hit_once_its_last_place_is_gone() -> None:
    asked = known(Time())
    asked.look([query(1)], PEERS)
    for peer in "ab":
        asked.heard(peer, [query(1)], [hit(1)])
    chunk = ChunkId(0, query(1).key)
    asked.not_there(chunk, "a")
    assert asked.look([query(1)], PEERS).results == [hit(1)] and asked.places(chunk) == ["b"]
    asked.not_there(chunk, "b")
    assert asked.look([query(1)], PEERS).unasked == [query(1)]


def test_it_is_a_miss_when_all_that_there_are_have_said_so() -> None:
    asked = known(Time())
    asked.look([query(1), query(2)], PEERS)
    for peer in "ab":
        asked.heard(peer, [query(1)], [MISS])
    asked.silent("a", [query(2)])
    asked.heard("b", [query(2)], [hit(2)])
    assert asked.look([query(1), query(2)], PEERS).results == [MISS, hit(2)]
    asked.look([query(3)], PEERS, absent=True)
    for peer in "ab":
        asked.heard(peer, [query(3)], [MISS])
    assert asked.look([query(3)], PEERS, absent=True).results == [AWAY]


def test_without_peers_everything_is_a_miss_at_once() -> None:
    asked = known(Time())
    assert asked.look([query(1)], frozenset()).results == [MISS]
    assert asked.look([query(1)], frozenset(), absent=True).results == [AWAY]
    assert asked.figures()["answers_open"] == 0


def test_what_is_remembered_has_a_cap() -> None:
    asked = known(Time(), known_max=10)
    for number in range(50):
        asked.look([query(number)], PEERS)
        for peer in "ab":
            asked.heard(peer, [query(number)], [hit(number)])
    assert asked.figures() == {"answers_known": 10, "answers_open": 0, "places_known": 10}


def test_open_questions_have_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "OPEN_MAX", 5)
    asked = known(Time())
    found = asked.look([query(number) for number in range(8)], PEERS)
    assert found.results == [RETRY] * 5 + [AWAY] * 3
    assert asked.figures()["answers_open"] == 5


def test_a_chunk_ranks_its_peers_the_same_everywhere_and_spreads_over_them() -> None:
    names = ["a", "b", "c"]
    keys = [number.to_bytes(32, "big") for number in range(300)]
    assert all(ranked(key, names) == ranked(key, names[::-1]) for key in keys)
    firsts = [ranked(key, names)[0] for key in keys]
    assert all(firsts.count(name) > 60 for name in names)
    without = [ranked(key, ["a", "b"])[0] for key in keys]
    assert all(old == new for old, new in zip(firsts, without, strict=True) if old != "c"), "the others stay"
