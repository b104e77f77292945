"""Policies in a real core: whole prompts, tails in smaller slots, windows, several slot sizes competing."""

from __future__ import annotations

import random

import pytest

from forebay.kvstore.cascade import Cascade
from forebay.kvstore.entry import Entry
from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.lookup import match, pin
from forebay.kvstore.policies.registry import POLICY_NAMES
from forebay.kvstore.protocol import NewChunk
from forebay.kvstore.report import gauges
from tests.kvstore.support import CHUNK, FakeMemory, SmallStore


def roomy(policy: str = "lru", extents: int = 5) -> SmallStore:
    """A store whose tails are in smaller slots than its whole chunks."""
    store = SmallStore(extents=extents, memory=FakeMemory(extent_bytes=1 << 18), policy=policy)
    groups = (
        GroupGeometry("full", "full", (2,), 1, 64, "float32"),
        GroupGeometry("window", "window", (0, 1), 1, 64, "float32", 40),
    )
    store.namespace = Namespace(weights=b"w" * 32, groups=groups, chunk_tokens=CHUNK)
    store.namespace_id = store.core.register(store.namespace)
    return store


def ask(store: SmallStore, tokens: list[int]) -> int:
    """A request as a worker makes it: look up, release, store what is missing; returns the hit."""
    prompt = store.prompt(tokens)
    pinned = pin(store.core, store.client, match(store.core, prompt))
    if store.core.policies.observes:
        store.core.policies.looked_up(prompt.keys, pinned.entries, store.now, CHUNK)
    store.core.release(store.client, [pinned.lease])
    store.store_prompt(tokens)
    store.now += 1
    return pinned.hit


def watch_evictions(store: SmallStore) -> list[Entry]:
    """What is evicted from now on; fails if anything is that a chunk needs which is here."""
    place, evicted = store.core.place, []

    def evict(entry: Entry, reason: str) -> None:
        assert not place.policies.lineage.dependents(entry), "a prefix outlives what needs it"
        evicted.append(entry)
        store.core.retire(entry, reason)

    place.evict = evict
    return evicted


def talk(store: SmallStore, seed: int, requests: int) -> float:
    """Eight sessions in random order; returns the hit rate."""
    rng = random.Random(seed)
    prompts = [[session] * rng.randrange(40, 200) for session in range(8)]
    hit = asked = 0
    for _ in range(requests):
        prompt = prompts[rng.randrange(8)]
        hit += ask(store, prompt)
        asked += len(prompt)
        prompt += [rng.randrange(1000) for _ in range(rng.randrange(5, 40))]
        if len(prompt) > 400:
            del prompt[rng.randrange(32, 100) :]
    return hit / asked


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_a_prefix_outlives_what_needs_it_across_slot_sizes(name: str, seed: int) -> None:
    store = roomy(name)
    evicted = watch_evictions(store)
    assert talk(store, seed, 120) > 0.05
    assert len(evicted) > 50
    assert len({entry.slot_bytes for entry in evicted if entry.group == 0}) == 2


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_policy_keeps_nothing_of_what_is_gone(name: str) -> None:
    store = SmallStore(extents=3, policy=name)
    talk(store, 0, 60)
    entries = list(store.core.table)
    assert any(entry.note is not None for entry in entries) or name == "lru"
    for entry in entries:
        store.core.retire(entry, "cleared")
    assert all(entry.note is None for entry in entries)
    assert all(len(account.policy) == 0 for account in store.core.place.accounts)


def test_a_tail_goes_along_with_the_prefix_that_it_needs() -> None:
    store = roomy()
    store.store_prompt([1] * (CHUNK + 16))
    sizes = {entry.slot_bytes for entry in store.core.table if entry.group == 0}
    assert len(sizes) == 2, "the tail is in a smaller slot"
    head, tail = (chunk for chunk in store.chunks([1] * (CHUNK + 16)) if chunk.group == 0)
    seed = 2
    watch_evictions(store)
    while store.core.table.get(0, head.key) is not None:
        chunk = store.chunks([seed] * CHUNK)[0]
        assert store.store(chunk) is not None
        seed += 1
    assert store.core.table.get(0, tail.key) is None


def test_a_window_chunk_that_was_left_behind_goes_before_what_a_resume_needs() -> None:
    for name in POLICY_NAMES:
        store = SmallStore(extents=4, policy=name)
        tokens = list(range(6 * CHUNK))
        ask(store, tokens)
        account = next(iter(store.core.place.accounts))
        window = [entry for entry in store.core.table if entry.group == 1]
        victim = account.victim(window[0].slot_bytes)
        assert victim is not None and victim.group == 1
        assert victim.end <= 4 * CHUNK, "a resume at the end needs the window before it"


@pytest.mark.parametrize("name", ["arc", "s3fifo", "foresight"])
def test_what_a_policy_remembers_is_shown(name: str) -> None:
    store = SmallStore(extents=2, policy=name)
    talk(store, 1, 40)
    shown = {key: value for key, value in gauges(store.core, Cascade(store.core)).items() if key.startswith("policy.")}
    wanted = {"policy.sessions", "policy.awaited", "policy.kinds"} if name == "foresight" else {"policy.ghosts"}
    assert shown.keys() == wanted and sum(shown.values()) > 0


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_chains_of_any_length_go_along(name: str) -> None:
    """The first chunk has an image, so it is in a slot of another size than all that follow."""
    store = SmallStore(extents=800, policy=name)
    tokens = list(range(1500 * CHUNK))
    plain, *following = (chunk for chunk in store.chunks(tokens) if chunk.group == 0)
    first = NewChunk(0, plain.key, plain.parent, 0, plain.tokens, b"i" * 6000)
    for chunk in (first, *following):
        assert store.store(chunk) is not None
    watch_evictions(store)
    head = store.core.table.get(0, first.key)
    assert head is not None and sum(e.slot_bytes == head.slot_bytes for e in store.core.table) == 1
    account = next(iter(store.core.place.accounts))
    assert account.victim(head.slot_bytes) is head
    assert store.core.place._give_up(head, account, "evicted")
    assert len(store.core.table) == 0
