"""A model with recurrent layers in a store: a hit ends where a state was stored, or not at all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kvstore.geometry import ConvPart
from forebay.kvstore.identity import GroupGeometry, Namespace, chunk_key
from forebay.kvstore.layout import payload_bytes
from forebay.kvstore.lookup import Match, match, offer, pin, promotions, queries
from forebay.kvstore.protocol import NewChunk
from forebay.kvstore.slots import slot_bytes_for
from forebay.tiers.base import LookupResult
from tests.kvstore.support import CHUNK, SmallStore

CONV = (ConvPart("q", 2, 4, 3, "bfloat16"), ConvPart("v", 4, 4, 3, "bfloat16"))
FULL = GroupGeometry("full", "full", (0, 2), 2, 8, "bfloat16")
STATE = GroupGeometry("state", "recurrent", (1, 3), 4, 4, "float32", value_dim=8, conv=CONV)
HYBRID = Namespace(b"hybrid", (FULL, STATE), chunk_tokens=CHUNK)
TOKENS = list(range(100))


@dataclass
class HybridStore(SmallStore):
    """A small store whose namespace has a recurrent group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.namespace = HYBRID
        self.namespace_id = self.core.register(HYBRID)

    def payload(self, chunk: NewChunk) -> bytes:
        size = payload_bytes(HYBRID.groups[chunk.group], len(chunk.tokens) // 4)
        return (chunk.key * (size // 32 + 1))[:size]

    def piece(self, group: int, end: int, tokens: list[int] = TOKENS) -> NewChunk:
        """The chunk that ends at a position of a prompt."""
        chunk = self.prompt(tokens[:end]).chunk(group, (end - 1) // CHUNK)
        assert chunk.start + len(chunk.tokens) // 4 == end
        return chunk

    def hit(self, tokens: list[int] = TOKENS, limit: int | None = None) -> int:
        return match(self.core, self.prompt(tokens, limit=limit)).hit()


def store_with(rows: list[int], states: list[int]) -> HybridStore:
    store = HybridStore()
    for group, ends in enumerate((rows, states)):
        for end in ends:
            assert store.store(store.piece(group, end)) is not None
    return store


def test_a_hit_ends_where_a_state_is_stored() -> None:
    store = store_with([32, 64, 96], [48, 80])
    assert store.hit() == 80
    assert store.hit(limit=79) == 48
    assert store.hit(limit=47) == 0
    assert store.hit([*range(80), *[7] * 20]) == 80
    assert store.hit([*range(79), *[7] * 20]) == 48, "its own tokens must all be the prompt's"


def test_a_state_is_neither_covered_nor_replaced_by_a_later_one() -> None:
    store = store_with([32], [32, 16])
    assert store.hit() == 32 and store.hit(limit=31) == 16
    assert [fact for fact in store.facts if not fact.stored] == []
    assert store.core.reserve(store.client, store.namespace_id, "", store.piece(1, 16)).status == "exists"


def test_a_lookup_pins_the_one_state_that_it_promises() -> None:
    store = store_with([32, 64], [16, 32, 48, 64])
    for limit, hit in ((50, 48), (70, 64)):
        pinned = pin(store.core, store.client, match(store.core, store.prompt(TOKENS, limit=limit)))
        assert pinned.hit == hit
        assert sorted((entry.group, entry.end) for entry in pinned.entries) == [(0, 32), (0, 64), (1, hit)]


def test_a_state_takes_the_same_room_whatever_its_chunk_s_length() -> None:
    sizes = {slot_bytes_for(STATE, tokens, 2048) for tokens in range(16, 2049, 16)}
    assert len(sizes) == 1
    assert payload_bytes(STATE, 16) == payload_bytes(STATE, 2048) == 2 * (4 * 4 * 8 * 4 + (2 + 4) * 4 * 3 * 2)


def test_states_that_the_frontier_has_passed_go_first() -> None:
    store, tokens = HybridStore(extents=3), list(range(1, 8 * CHUNK + 1))
    store.store_prompt(tokens)
    for seed in range(1, 5):
        store.store_prompt([10_000 + seed] * CHUNK)
    gone = [fact.entry for fact in store.facts if not fact.stored]
    assert gone and {entry.group for entry in gone} == {1}
    assert max(entry.end for entry in gone) < 8 * CHUNK
    assert store.hit(tokens) == 8 * CHUNK, "the frontier can still be resumed"


@pytest.mark.parametrize("count", [0, 2])
def test_a_state_is_committed_with_one_checksum(count: int) -> None:
    store = HybridStore()
    slot = store.core.reserve(store.client, store.namespace_id, "", store.piece(1, 32))
    assert store.core.commit(store.client, slot.reservation, b"c" * 8 * count) is None
    assert store.hit() == 0


def test_tiers_are_asked_for_states_that_end_in_the_prompt_and_believed_for_no_others() -> None:
    store = store_with([32, 64], [])
    prompt = store.prompt(TOKENS, limit=50)
    found = match(store.core, prompt)
    places, asked = zip(*queries(found), strict=True)
    assert places == ((1, 0), (1, 1))
    assert [query.whole for query in asked] == [True, True]
    assert len(asked[1].tokens) == 4 * 16, "a state behind the longest allowed hit is of no use"
    assert asked[1].key == chunk_key(asked[1].parent, asked[1].tokens)
    offer(found, "fs", places, [LookupResult("hit", b"k" * 32, 16, 32, 8192), LookupResult("miss")])
    assert found.hit_with_offers() == 0, "16 tokens of a state of 32 are nothing"
    offer(found, "fs", places, [LookupResult("hit", asked[0].key, 32, 32, 8192), LookupResult("miss")])
    assert found.hit_with_offers() == 32


def test_a_later_state_in_memory_is_no_reason_not_to_ask_for_the_wanted_one() -> None:
    store = store_with([32, 64], [32, 64])
    found = match(store.core, store.prompt(TOKENS, limit=50))
    assert [place for place, _ in queries(found)] == [(1, 1)]
    wanted = store.piece(1, 48)
    offer(found, "fs", [(1, 1)], [LookupResult("hit", wanted.key, 16, 16, 4096 + STATE.granule_bytes)])
    plan = promotions(store.core, found, {"fs": b"o" * 16})
    assert (plan.hit, [new.entry.key for new in plan.new]) == (48, [wanted.key])


def test_a_state_that_finds_no_room_costs_the_hit_its_end_only() -> None:
    store = store_with([32, 64], [16])
    plan = promotions(store.core, offered(store), {"fs": b"o" * 16})
    assert (plan.hit, [new.entry.end for new in plan.new]) == (64, [64])
    full = store_with([32, 64], [16])
    full.core.limits = dataclasses.replace(full.core.limits, promoting_share=0.0)
    assert full.core.reserve_promotion(full.namespace_id, full.piece(1, 96), b"o" * 16) is not None
    plan = promotions(full.core, offered(full), {"fs": b"o" * 16})
    assert (plan.hit, plan.new) == (16, [])


def offered(store: HybridStore) -> Match:
    """A prompt's match where a tier has the states at 32 and 64."""
    found = match(store.core, store.prompt(TOKENS))
    size = 4096 + STATE.granule_bytes
    pieces = [store.piece(1, end) for end in (32, 64)]
    offer(found, "fs", [(1, 0), (1, 1)], [LookupResult("hit", piece.key, 32, 32, size) for piece in pieces])
    assert found.hit_with_offers() == 64
    return found


def contiguous(ends: list[int]) -> int:
    """How far chunks with these ends reach from the front."""
    reached = 0
    while further := [end for end in ends if reached < end <= reached + CHUNK]:
        reached = max(further)
        if reached % CHUNK:
            break
    return reached


ends = st.lists(st.sampled_from(range(16, 97, 16)), max_size=6, unique=True)


@settings(max_examples=100, derandomize=True)
@given(ends, ends, st.integers(0, 100))
def test_a_hit_is_never_a_length_that_one_group_can_t_serve(rows: list[int], states: list[int], limit: int) -> None:
    store = store_with([], states)
    for end in rows:
        store.store(store.piece(0, end))
    assert store.hit(limit=limit) == max((end for end in states if end <= min(contiguous(rows), limit)), default=0)
