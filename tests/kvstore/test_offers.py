"""What a tier says of its chunks decides how much room is made for them: what can't be true is passed over."""

from __future__ import annotations

import pytest

from forebay.kvstore.header import header_bytes
from forebay.kvstore.layout import payload_bytes
from forebay.kvstore.lookup import CUTS_MAX, match, offer, promotions, queries
from forebay.tiers.base import LookupResult
from tests.kvstore.support import CHUNK, SmallStore

KEY = b"k" * 32


@pytest.fixture
def store() -> SmallStore:
    return SmallStore()


def length(store: SmallStore, tokens: int, extra: int = 0) -> int:
    return header_bytes(tokens, extra) + payload_bytes(store.namespace.groups[0], tokens)


def test_a_possible_answer_is_an_offer(store: SmallStore) -> None:
    found = match(store.core, store.prompt(list(range(2 * CHUNK))))
    answer = LookupResult("hit", KEY, 16, CHUNK, length(store, CHUNK, 4096))
    assert offer(found, "t", [(0, 1)], [answer]) == 0
    assert found.offers[0, 1].tokens == CHUNK


@pytest.mark.parametrize(
    ("key", "matched", "tokens", "more"),
    [
        (b"", 16, 16, 0), (KEY[1:], 16, 16, 0), (KEY, 0, 16, 0), (KEY, -16, 16, 0), (KEY, 32, 16, 0), (KEY, 7, 16, 0),
        (KEY, 16, 13, 0), (KEY, 16, 0, 0), (KEY, 48, 48, 0), (KEY, 16, 2 * CHUNK, 0), (KEY, 16, 1 << 40, 0),
        (KEY, 16, 16, 1 << 40),
    ],
)  # fmt: skip
def test_an_impossible_answer_is_counted_and_no_offer(
    store: SmallStore, key: bytes, matched: int, tokens: int, more: int
) -> None:
    found = match(store.core, store.prompt(list(range(2 * CHUNK))))
    assert offer(found, "t", [(0, 1)], [LookupResult("hit", key, matched, tokens, 8192 + more)]) == 1
    assert not found.offers


def test_no_more_is_offered_than_the_prompt_has_there(store: SmallStore) -> None:
    found = match(store.core, store.prompt(list(range(CHUNK + 16))))
    assert offer(found, "t", [(0, 1)], [LookupResult("hit", KEY, 32, 32, 8192)]) == 1


def test_where_there_is_no_room_it_is_looked_for_a_few_times_and_not_at_every_length(
    store: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = match(store.core, store.prompt(list(range(100 * CHUNK))))
    for place, query in queries(found):
        length = header_bytes(CHUNK) + payload_bytes(store.namespace.groups[place[0]], CHUNK)
        assert offer(found, "t", [place], [LookupResult("hit", query.key, CHUNK, CHUNK, length)]) == 0
    tried = []
    monkeypatch.setattr(store.core, "reserve_promotion", lambda *about: tried.append(about))
    plan = promotions(store.core, found, {"t": b"o" * 16})
    assert (plan.hit, plan.new, plan.held) == (0, [], []) and 0 < len(tried) <= CUTS_MAX
