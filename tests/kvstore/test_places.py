"""Single places of a prompt: how far tiers would reach, and bringing what is wanted in the order in which it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.errors import RequestRefused
from forebay.kvstore.client import StoreClient
from forebay.kvstore.header import SlotState
from forebay.kvstore.limits import Limits
from forebay.kvstore.lookup import match, offer, place_promotions
from forebay.kvstore.protocol import ChunkRead, Fetched, Surveyed
from forebay.tiers.base import LookupResult
from tests.kvstore.running import payload_of, prompt_of
from tests.kvstore.support import CHUNK, SmallStore, namespace
from tests.kvstore.test_daemon_tiers import CHUNKS, ODD, TOKENS, TierStore, evict_all, fs

SPEC = namespace()
FULL, WINDOW = 0, 1


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> TierStore:
    """A store that had four chunk positions of two groups, which are in its tier now."""
    made = TierStore(tmp_path_factory.mktemp("places"))
    made.start(fs(made.config.parent, "disk"))
    made.fill(TOKENS)
    made.until(lambda v: v["tier.disk.chunks"] == CHUNKS)
    made.forget()
    return made


@pytest.fixture
def store(filled: TierStore) -> Iterator[TierStore]:
    """The same, with nothing in memory."""
    filled.start(fs(filled.config.parent, "disk"))
    yield filled
    filled.forget()


def survey(store: TierStore, tokens: list[int] = TOKENS) -> Surveyed:
    prompt = prompt_of(SPEC, tokens)
    with StoreClient(store.address) as client:
        client.register(SPEC)
        return client.survey(
            SPEC.id, prompt.root, prompt.tokens, prompt.keys, limit=len(tokens), deadline_ms=5000
        )


def fetch(
    client: StoreClient, wanted: list[tuple[int, int]], tokens: list[int] = TOKENS, deadline_ms: int = 5000,
    tokens_from: int = 0, aside: int = 0,
) -> Fetched:  # fmt: skip
    prompt = prompt_of(SPEC, tokens)
    return client.fetch(
        SPEC.id, prompt.root, prompt.tokens[4 * tokens_from :], prompt.keys, limit=len(tokens), wanted=wanted,
        deadline_ms=deadline_ms, tokens_from=tokens_from, aside=aside,
    )  # fmt: skip


@contextmanager
def connected(store: TierStore) -> Iterator[StoreClient]:
    with StoreClient(store.address) as client:
        client.register(SPEC)
        yield client


def places(chunks: list[ChunkRead]) -> list[tuple[int, int]]:
    return sorted((chunk.group, chunk.start // CHUNK) for chunk in chunks)


def test_a_survey_says_how_far_tiers_reach_and_brings_nothing(store: TierStore) -> None:
    told = survey(store)
    assert (told.hit, told.reach) == (0, len(TOKENS))
    needed = [(FULL, 0), (FULL, 1), (FULL, 2), (FULL, 3), (WINDOW, 2), (WINDOW, 3)]
    assert sorted((place.group, place.position) for place in told.places) == needed
    assert all(place.tier == "disk" and place.length > 0 for place in told.places)
    values = store.until(lambda v: True)
    assert values.get("tier.disk.promoted", 0) == 0 and values["host.bytes_used"] == 0


def test_a_survey_of_a_prompt_that_goes_on_otherwise_ends_where_it_does(store: TierStore) -> None:
    told = survey(store, [*TOKENS[: 3 * CHUNK - 16], *[9] * 64])
    assert told.reach == 3 * CHUNK - 16
    assert max(place.position for place in told.places) == 2


def test_a_survey_of_what_memory_has_asks_for_nothing_more(store: TierStore) -> None:
    store.lookup(TOKENS)
    told = survey(store)
    assert (told.hit, told.reach, told.places) == (len(TOKENS), len(TOKENS), [])


def test_the_end_of_a_prefix_is_brought_without_its_beginning(store: TierStore) -> None:
    with connected(store) as client:
        fetched = fetch(client, [(FULL, 3), (WINDOW, 3)], tokens_from=3 * CHUNK)
        assert places(fetched.chunks) == [(FULL, 3), (WINDOW, 3)] and fetched.lease and not fetched.pending
        for chunk in fetched.chunks:
            assert chunk.promoted == "disk" and chunk.start == 3 * CHUNK
            assert bytes(client.payload(chunk)) == payload_of(SPEC, chunk.group, chunk.key, chunk.tokens)
        values = client.stats().values
        assert values["tier.disk.promoted"] == 2 and values["store.leases"] == 1
        client.release([fetched.lease])
    store.until(lambda v: v["store.leases"] == 0)


def test_a_place_that_ends_inside_of_a_stored_chunk_is_found(store: TierStore) -> None:
    prompt = [*TOKENS[: 3 * CHUNK + 16], 9]
    with connected(store) as client:
        fetched = fetch(client, [(FULL, 3)], prompt, tokens_from=3 * CHUNK)
        assert [(chunk.start, chunk.tokens) for chunk in fetched.chunks] == [(3 * CHUNK, CHUNK)]


def test_what_memory_has_is_pinned_without_asking_a_tier(store: TierStore) -> None:
    store.lookup(TOKENS)
    with connected(store) as client:
        fetched = fetch(client, [(FULL, 0), (WINDOW, 3)], deadline_ms=0)
        assert places(fetched.chunks) == [(FULL, 0), (WINDOW, 3)]
        assert {chunk.promoted for chunk in fetched.chunks} == {""}


def test_without_time_nothing_is_brought(store: TierStore) -> None:
    with connected(store) as client:
        fetched = fetch(client, [(FULL, 0)], deadline_ms=0)
        assert (fetched.lease, fetched.chunks) == (0, [])


@pytest.mark.parametrize("place", [(2, 0), (-1, 0), (0, 4), (0, 2)])
def test_a_place_that_the_prompt_does_not_have_or_tell_is_refused(store: TierStore, place: tuple[int, int]) -> None:
    with connected(store) as client, pytest.raises(RequestRefused, match="is no place of this prompt"):
        fetch(client, [place], tokens_from=3 * CHUNK)


def test_where_one_cannot_be_had_the_later_ones_are_not_brought(store: TierStore) -> None:
    gone = prompt_of(SPEC, TOKENS).key_at(3 * CHUNK).hex()
    for path in (store.config.parent / "disk" / "chunks").rglob("*"):
        if path.is_file() and gone in path.name:
            path.unlink()
    with connected(store) as client:
        wanted = [(FULL, 3), (FULL, 2), (FULL, 1)]
        fetched = fetch(client, wanted)
        assert places(fetched.chunks)[-1] == (FULL, 3)
        assert (FULL, 2) not in places(fetched.chunks)
        assert fetched.gone == [(FULL, 2)], "the tier said that it has it, and hasn't"


ELSEWHERE = [*TOKENS[:CHUNK], *range(5000, 5000 + 3 * CHUNK)]
"""A prompt of which the store has the first chunk."""


def test_it_says_what_nobody_has(store: TierStore) -> None:
    with connected(store) as client:
        fetched = fetch(client, [(FULL, 2), (FULL, 0), (WINDOW, 3)], ELSEWHERE)
        assert (fetched.chunks, fetched.gone) == ([], [(FULL, 2), (WINDOW, 3)]), "in their order, up to the first"
        fetched = fetch(client, [(FULL, 0), (FULL, 2)], ELSEWHERE)
        assert (places(fetched.chunks), fetched.gone) == ([(FULL, 0)], [(FULL, 2)])
        client.release([fetched.lease])
        assert fetch(client, [(FULL, 0), (FULL, 1)], deadline_ms=0).gone == [], "nobody was asked"


@pytest.mark.parametrize(("tier", "reason"), [("Never", "slow"), ("Raising", "away")])
def test_nothing_is_gone_as_long_as_a_tier_does_not_say_so(filled: TierStore, tier: str, reason: str) -> None:
    """One that never knows, and one that isn't well."""
    filled.start(fs(filled.config.parent, "disk") + f'[tiers.odd]\nkind = "{ODD}{tier}"\n')
    try:
        with connected(filled) as client:
            fetched = fetch(client, [(FULL, 0), (FULL, 2)], ELSEWHERE)
            assert (places(fetched.chunks), fetched.gone) == ([(FULL, 0)], [])
            prompt = prompt_of(SPEC, ELSEWHERE)
            explained = client.explain(SPEC.id, prompt.root, prompt.tokens)
            assert {reach.reason for reach in explained.reaches if reach.tier == "odd"} == {reason}
    finally:
        filled.forget()


def test_what_a_tier_cannot_bring_now_is_not_gone(tmp_path: Path) -> None:
    store = TierStore(tmp_path)
    store.start(f'[tiers.broken]\nkind = "{ODD}Broken"\n')
    try:
        store.fill(TOKENS)
        store.until(lambda v: v["tier.broken.chunks"] == CHUNKS)
        evict_all(store)
        with connected(store) as client:
            fetched = fetch(client, [(FULL, 1)])
            assert (fetched.chunks, fetched.gone) == ([], []) and not fetched.pending
    finally:
        store.forget()


def test_what_is_brought_takes_the_room_that_was_set_aside_for_it(store: TierStore) -> None:
    with connected(store) as client:
        aside = client.set_aside(SPEC.id, "", FULL, 3, lease_ms=60_000, for_tiers=2)
        room = client.stats().values["host.aside_bytes"]
        fetched = fetch(client, [(FULL, 0), (FULL, 1), (WINDOW, 3)], aside=aside.lease)
        assert places(fetched.chunks) == [(FULL, 0), (FULL, 1), (WINDOW, 3)]
        values = client.stats().values
        assert values["host.aside_bytes"] == room / 3, "the other group has ordinary room"
        assert values["host.aside_lent_chunks"] == 2
        client.release([aside.lease])
        values = client.stats().values
        assert values["host.aside_bytes"] == 0 and values["host.evictable"] == 0, "who asked for them reads them"
        assert values["host.aside_lent_chunks"] == 0
        client.release([fetched.lease])
    store.until(lambda v: v["host.evictable"] == 3)


def test_what_is_brought_leaves_the_room_that_is_for_what_will_be_stored(store: TierStore) -> None:
    with connected(store) as client:
        aside = client.set_aside(SPEC.id, "", FULL, 3, lease_ms=60_000, for_tiers=1)
        room = client.stats().values["host.aside_bytes"]
        for positions in ([0], [1, 3]):  # 2 is lost by now
            wanted = [(FULL, position) for position in positions]
            fetched = fetch(client, wanted, aside=aside.lease)
            assert places(fetched.chunks) == wanted, "what is more than that has ordinary room"
        assert client.stats().values["host.aside_bytes"] == room * 2 / 3


def test_what_is_there_is_not_evicted_for_what_is_brought_with_the_same_message() -> None:
    """It is behind it in the order of use, and nobody reads it."""
    small = SmallStore(extents=1, limits=Limits(promoting_share=1.0))
    tokens = [1] * (40 * CHUNK)
    chunks = [chunk for chunk in small.chunks(tokens) if chunk.group == FULL]
    last = small.store(chunks[-1])
    assert last is not None
    found = match(small.core, small.prompt(tokens), [(FULL, position) for position in range(40)])
    for position, chunk in enumerate(chunks[:-1]):
        offer(found, "fs", [(FULL, position)], [LookupResult("hit", chunk.key, CHUNK, CHUNK, 0)])
    plan = place_promotions(small.core, found, {"fs": b"t" * 16})
    assert 0 < len(plan.new) < 39 and plan.held == [last]
    assert last.state is SlotState.COMMITTED and last.pins == 1


def test_no_more_can_be_for_tiers_than_there_is(store: TierStore) -> None:
    with connected(store) as client:
        for count in (-1, 4):
            with pytest.raises(RequestRefused, match="of 3 chunks can't be for tiers"):
                client.set_aside(SPEC.id, "", FULL, 3, for_tiers=count)
