"""When a place counts as gone: everybody has said that they haven't got it, and nobody may have it all the same."""

from __future__ import annotations

import pytest

from forebay.kvstore.cascade import Load
from forebay.kvstore.lookup import Match, match
from forebay.kvstore.said import NO_HIT, Said
from forebay.tiers.base import LookupResult
from tests.kvstore.support import CHUNK, SmallStore, bare_entry

PLACES = [(0, 0), (0, 1)]
KEY = b"k" * 32
TIERS = ("near", "far")
HIT = LookupResult("hit", KEY, CHUNK, CHUNK, 4096)
MISS, RETRY, AWAY = LookupResult("miss"), LookupResult("retry"), LookupResult("away")


@pytest.fixture
def lacking() -> Match:
    """Two places of which memory has nothing."""
    store = SmallStore()
    return match(store.core, store.prompt([1] * 2 * CHUNK), PLACES)


def failed(tier: str, *, lost: bool) -> Load:
    return Load(bare_entry(key=KEY), tier, done=True, lost=lost)


def test_a_place_is_gone_when_every_tier_has_nothing_for_it(lacking: Match) -> None:
    said = Said()
    assert said.answered(lacking, "near", (0, 0), MISS) == MISS
    assert said.gone(lacking, TIERS) == [], "the other one hasn't been asked"
    said.answered(lacking, "far", (0, 0), MISS)
    assert said.gone(lacking, TIERS) == [(0, 0)]
    assert Said().gone(lacking, ()) == PLACES, "without tiers nobody else could have it"


@pytest.mark.parametrize("answer", [RETRY, AWAY, HIT], ids=lambda answer: answer.outcome)
def test_it_is_not_when_one_may_have_it(lacking: Match, answer: LookupResult) -> None:
    said = Said()
    said.answered(lacking, "near", (0, 0), MISS)
    said.answered(lacking, "far", (0, 0), MISS)
    assert said.answered(lacking, "near", (0, 0), answer) == answer
    assert said.gone(lacking, TIERS) == [], "its last word counts"


def test_what_a_tier_has_lost_it_has_not_got_and_what_it_could_not_read_it_may_have(lacking: Match) -> None:
    for lost in (True, False):
        said = Said()
        assert said.loads_failed([failed("near", lost=lost)])
        assert said.answered(lacking, "near", (0, 0), HIT) == NO_HIT, "it isn't believed again"
        said.answered(lacking, "far", (0, 0), MISS)
        assert said.gone(lacking, TIERS) == ([(0, 0)] if lost else [])
    assert not said.loads_failed([Load(bare_entry(), "near"), Load(bare_entry(), "near", done=True, ok=True)])


def test_a_chunk_that_goes_on_otherwise_too_soon_is_of_no_use(lacking: Match) -> None:
    said, short = Said(), LookupResult("hit", KEY, CHUNK - 16, CHUNK, 4096)
    assert said.answered(lacking, "near", (0, 1), short) == short
    assert said.gone(lacking, ["near"]) == [(0, 1)]


def test_one_that_may_be_less_than_the_tier_has_is_no_proof(lacking: Match) -> None:
    said, short = Said(), LookupResult("hit", KEY, CHUNK - 16, CHUNK, 4096, sure=False)
    assert said.answered(lacking, "near", (0, 1), short) == short
    assert said.gone(lacking, ["near"]) == []


def test_what_memory_has_by_now_is_not_gone() -> None:
    store = SmallStore()
    prompt = store.prompt([1] * 2 * CHUNK)
    said, before = Said(), match(store.core, prompt, PLACES)
    for place in PLACES:
        said.answered(before, "near", place, MISS)
    store.store_prompt([1] * CHUNK)
    assert said.gone(match(store.core, prompt, PLACES), ["near"]) == [(0, 1)]
