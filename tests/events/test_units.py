from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.events.projection import Placement, Projection
from forebay.events.schema import CPU, GPU, LOCAL, REMOTE, STORAGE, BlockRemoved, BlockStored
from forebay.events.units import GroupKind, TierView, UnitChunk
from forebay.kvstore.identity import chain, pack_tokens

ROOT = b"r" * 32
FULL: tuple[GroupKind, ...] = ("full",)
HYBRID: tuple[GroupKind, ...] = ("full", "window")
CHUNK_UNITS = 2
MEANING: dict[bytes, tuple[bytes | None, int]] = {}
"""Of every key that a test made: the key before it, and its unit's word."""


def path(*words: int) -> list[bytes]:
    """Unit keys of the prompt whose i-th unit is sixteen times `words[i]`."""
    keys = chain(ROOT, b"".join(pack_tokens([word] * 16) for word in words))
    MEANING.update(zip(keys, zip([None, *keys], words, strict=False), strict=True))
    return keys


def chunk(words: Sequence[int], start: int, group: int = 0, extra: str | None = None) -> UnitChunk:
    """The chunk [start, len(words)) of that prompt, in units."""
    keys = path(*words)
    tokens = b"".join(pack_tokens([word] * 16) for word in words[start:])
    told = tuple((extra,) for _ in keys[start:]) if extra else ()
    return UnitChunk(group, keys[start - 1] if start else None, tuple(keys[start:]), tokens, told)


def blocks(events: Iterable[BlockStored | BlockRemoved]) -> list[bytes]:
    return [key for event in events for key in event.block_hashes if isinstance(key, bytes)]


def test_a_chunk_is_announced_unit_by_unit_with_tokens_parent_and_place() -> None:
    view = TierView(CPU, FULL, locality=LOCAL)
    keys = path(1, 2, 3, 4)
    assert view.chunk_stored("host", chunk((1, 2), 0)) == [
        BlockStored(keys[:2], None, [1] * 16 + [2] * 16, 16, medium=CPU, locality=LOCAL)
    ]
    assert view.chunk_stored("host", chunk((1, 2, 3, 4), 2)) == [
        BlockStored(keys[2:], keys[1], [3] * 16 + [4] * 16, 16, medium=CPU, locality=LOCAL)
    ]


def test_a_tail_and_the_chunk_that_grew_out_of_it_are_one_set_of_units() -> None:
    view = TierView(CPU, FULL)
    keys = path(1, 2, 3)
    assert blocks(view.chunk_stored("host", chunk((1,), 0))) == keys[:1]
    assert blocks(view.chunk_stored("host", chunk((1, 2, 3), 0))) == keys[1:]
    assert view.chunk_removed("host", 0, keys[0], "evicted") == []
    assert set(blocks(view.chunk_removed("host", 0, keys[2], "evicted"))) == set(keys)
    assert view.stats().units == 0


def test_a_removal_says_why_and_where() -> None:
    view = TierView(STORAGE, FULL, locality=LOCAL)
    view.chunk_stored("fs", chunk((1,), 0))
    [event] = view.chunk_removed("fs", 0, path(1)[0], "quota")
    assert event == BlockRemoved(path(1), STORAGE, locality=LOCAL, reason="quota")


def test_repeated_and_unknown_news_change_nothing() -> None:
    view = TierView(CPU, FULL)
    view.chunk_stored("host", chunk((1,), 0))
    assert view.chunk_stored("host", chunk((1,), 0)) == []
    assert view.chunk_removed("host", 0, path(9)[0]) == []
    assert blocks(view.chunk_removed("host", 0, path(1)[0])) == path(1)
    assert view.chunk_removed("host", 0, path(1)[0]) == []


def test_a_unit_waits_for_every_full_group() -> None:
    view = TierView(CPU, ("full", "full"))
    assert view.chunk_stored("host", chunk((1, 2), 0, group=0)) == []
    assert blocks(view.chunk_stored("host", chunk((1,), 0, group=1))) == path(1)
    assert blocks(view.chunk_removed("host", 0, path(1, 2)[1])) == path(1)


def test_a_chain_waits_for_a_window_to_resume_from_and_then_is_announced_whole() -> None:
    view = TierView(CPU, HYBRID)
    assert view.chunk_stored("host", chunk((1, 2), 0)) == []
    assert view.chunk_stored("host", chunk((1, 2, 3, 4), 2)) == []
    [event] = view.chunk_stored("host", chunk((1, 2, 3, 4), 2, group=1))
    assert event.block_hashes == path(1, 2, 3, 4) and event.parent_block_hash is None


def test_windows_in_the_middle_may_go_but_the_last_one_takes_the_chain_with_it() -> None:
    view = TierView(CPU, HYBRID)
    for group in (0, 1):
        view.chunk_stored("host", chunk((1, 2), 0, group))
        view.chunk_stored("host", chunk((1, 2, 3, 4), 2, group))
    keys = path(1, 2, 3, 4)
    assert view.chunk_removed("host", 1, keys[1]) == []
    assert set(blocks(view.chunk_removed("host", 1, keys[3]))) == set(keys)


def test_a_model_of_window_groups_alone_needs_them_all() -> None:
    view = TierView(CPU, ("window",))
    assert blocks(view.chunk_stored("host", chunk((1,), 0))) == path(1)


def test_an_open_view_announces_a_chain_without_its_head() -> None:
    view = TierView(CPU, FULL)
    [event] = view.chunk_stored("host", chunk((1, 2, 3), 2))
    assert event.parent_block_hash == path(1, 2)[1]


def test_a_device_view_announces_no_unit_before_its_parent_and_hides_what_lost_it() -> None:
    view = TierView(GPU, FULL)
    keys = path(1, 2, 3)
    assert view.chunk_stored("device", chunk((1, 2, 3), 2)) == []
    assert view.chunk_stored("device", chunk((1, 2), 1)) == []
    assert blocks(view.chunk_stored("device", chunk((1,), 0))) == keys
    assert set(blocks(view.chunk_removed("device", 0, keys[1]))) == set(keys[1:])
    assert blocks(view.chunk_stored("device", chunk((1, 2), 1))) == keys[1:]


def test_branches_are_runs_of_their_own_after_their_parent() -> None:
    view = TierView(CPU, HYBRID)
    view.chunk_stored("host", chunk((1, 2), 0))
    view.chunk_stored("host", chunk((1, 2, 3), 2))
    view.chunk_stored("host", chunk((1, 2, 4), 2))
    view.chunk_stored("host", chunk((1, 2, 3), 2, group=1))
    view.chunk_stored("host", chunk((1, 2, 4), 2, group=1))
    events = list(view.snapshot())
    assert sum(len(event.block_hashes) for event in events) == 4
    seen: list[object] = [None]
    for event in events:
        assert event.parent_block_hash in seen
        seen.extend(event.block_hashes)


def test_two_tiers_of_one_medium_are_counted_together() -> None:
    local = Placement(STORAGE, LOCAL)
    view = Projection(FULL, {"host": Placement(CPU, LOCAL), "a": local, "b": local})
    assert view.chunk_stored("a", chunk((1,), 0))
    assert view.chunk_stored("b", chunk((1,), 0)) == []
    assert view.chunk_stored("host", chunk((1,), 0))
    assert view.chunk_removed("a", 0, path(1)[0]) == []
    assert blocks(view.tier_removed("b", "cleared")) == path(1)
    assert {event.medium for event in view.snapshot()} == {CPU}


def test_groups_of_one_unit_may_lie_in_different_tiers_of_a_medium() -> None:
    local = Placement(STORAGE, LOCAL)
    view = Projection(("full", "full"), {"a": local, "b": local, "far": Placement(STORAGE, REMOTE)})
    assert view.chunk_stored("a", chunk((1,), 0, group=0)) == []
    assert view.chunk_stored("far", chunk((1,), 0, group=1)) == []
    assert blocks(view.chunk_stored("b", chunk((1,), 0, group=1))) == path(1)


def test_a_tier_without_a_placement_is_not_told() -> None:
    view = Projection(FULL, {"host": Placement(CPU, LOCAL)})
    assert view.chunk_stored("secret", chunk((1,), 0)) == []
    assert view.chunk_removed("secret", 0, path(1)[0]) == [] == view.tier_removed("secret")


def test_a_full_view_refuses_chunks_and_stays_right() -> None:
    view = TierView(CPU, FULL, max_units=2)
    view.chunk_stored("host", chunk((1, 2), 0))
    assert view.chunk_stored("host", chunk((3,), 0)) == []
    assert view.chunk_stored("host", chunk((1,), 0)) == []
    assert view.stats().refused == 1 and view.stats().units == 2
    assert view.chunk_removed("host", 0, path(3)[0]) == []
    assert len(blocks(view.chunk_removed("host", 0, path(1, 2)[1]))) == 1
    assert view.stats().announced == 1


def test_extra_keys_go_with_their_units() -> None:
    view = TierView(CPU, FULL)
    [event] = view.chunk_stored("host", chunk((1, 2), 0, extra="tenant-a"))
    assert event.extra_keys == [["tenant-a"], ["tenant-a"]]


def test_long_chains_come_in_runs_that_continue_each_other() -> None:
    view = TierView(CPU, FULL)
    words = tuple(range(150))
    events = view.chunk_stored("host", chunk(words, 0))
    assert blocks(events) == path(*words)
    parents = [None, *(event.block_hashes[-1] for event in events)]
    assert [event.parent_block_hash for event in events] == parents[:-1]
    assert max(len(event.block_hashes) for event in events) <= 64


# --- against the definition ------------------------------------------------------------------------------


@dataclass
class Naive:
    """The set of held chunks, and the definition applied to it from scratch."""

    kinds: tuple[GroupKind, ...]
    closed: bool
    chunks: dict[tuple[str, int, bytes], UnitChunk] = field(default_factory=dict)

    def announced(self) -> set[bytes]:
        full = [g for g, kind in enumerate(self.kinds) if kind == "full"] or list(range(len(self.kinds)))
        windows = [g for g in range(len(self.kinds)) if g not in full]
        have: list[set[bytes]] = [set() for _ in self.kinds]
        parent: dict[bytes, bytes | None] = {}
        for (_, group, _), piece in self.chunks.items():
            have[group].update(piece.keys)
            parent.update(zip(piece.keys, (piece.parent, *piece.keys[:-1]), strict=True))
        held = set.intersection(*(have[group] for group in full))
        candidates = held.intersection(*(have[group] for group in windows))
        while grown := {parent[key] for key in candidates} & held - candidates:
            candidates |= {key for key in grown if key is not None}
        if not self.closed:
            return candidates
        visible = {key for key in candidates if parent[key] is None}
        while grown := {key for key in candidates - visible if parent[key] in visible}:
            visible |= grown
        return visible


WORDS = [w for n in (1, 2, 3, 4) for w in itertools.product((1, 2), repeat=n)]
PIECES = [(w, s) for w in WORDS for s in range(0, len(w), CHUNK_UNITS) if len(w) - s <= CHUNK_UNITS]
KINDS: list[tuple[GroupKind, ...]] = [
    ("full",), ("full", "full"), ("full", "window"), ("window", "full", "window"), ("window", "window"),
]  # fmt: skip
News = tuple[str, tuple[tuple[int, ...], int], int, str]
news = st.tuples(
    st.sampled_from(["store", "store", "remove", "remove tier"]),
    st.sampled_from(PIECES), st.integers(0, 2), st.sampled_from(["a", "b"]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), st.booleans(), st.lists(news, max_size=60))
def test_announcements_are_the_definition_applied_to_the_chunks(
    kinds: tuple[GroupKind, ...],
    closed: bool,
    script: list[tuple[str, tuple[tuple[int, ...], int], int, str]],
) -> None:
    view, naive = TierView(CPU, kinds, closed=closed), Naive(kinds, closed)
    told: set[bytes] = set()
    for what, (words, start), group, tier in script:
        piece = chunk(words, start, group % len(kinds))
        name = (tier, piece.group, piece.keys[-1])
        if what == "store":
            naive.chunks[name] = piece
            _take_stored(told, view.chunk_stored(tier, piece), closed)
        elif what == "remove":
            naive.chunks.pop(name, None)
            _take_removed(told, view.chunk_removed(tier, piece.group, piece.keys[-1]))
        else:
            naive.chunks = {n: c for n, c in naive.chunks.items() if n[0] != tier}
            _take_removed(told, view.tier_removed(tier))
        assert told == naive.announced()
        assert view.stats().announced == len(told)
        assert view.stats().chunks == len(naive.chunks)
        assert view.stats().units == len({key for piece in naive.chunks.values() for key in piece.keys})
    assert set(blocks(view.snapshot())) == told
    _take_stored(set(), list(view.snapshot()), closed)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(KINDS), st.lists(news, max_size=30),
    st.lists(st.one_of(st.just("tell"), news), max_size=40),
)  # fmt: skip
def test_a_snapshot_that_is_told_while_the_view_changes_and_what_came_meanwhile_are_the_present_state(
    kinds: tuple[GroupKind, ...], script: list[News], meanwhile: list[News | str]
) -> None:
    view, naive = TierView(CPU, kinds), Naive(kinds, closed=False)
    later: list[BlockStored | BlockRemoved] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.events.units._RUN_UNITS", 2)  # so that few units are several events
        for step in script:
            _step(view, naive, step)
        snapshot = view.snapshot()
        told: list[BlockStored] = []
        for step in meanwhile:
            if isinstance(step, str):
                told += itertools.islice(snapshot, 1)
            else:
                later += _step(view, naive, step)
        told += snapshot
    believed = set(blocks(told))
    for event in later:
        (believed.update if isinstance(event, BlockStored) else believed.difference_update)(blocks([event]))
    assert believed == naive.announced()


def test_a_chain_that_was_stored_from_its_end_and_loses_its_middle_while_it_is_told_is_told_without_it() -> None:
    words = tuple(range(1, 201))
    keys = path(*words)
    view = TierView(CPU, FULL)
    for start in range(190, -1, -10):
        view.chunk_stored("host", chunk(words[: start + 10], start))
    snapshot = view.snapshot()
    first = next(snapshot)
    view.chunk_removed("host", 0, keys[159])
    assert blocks([first, *snapshot]) == keys[:150] + keys[160:]


def _step(view: TierView, naive: Naive, step: News) -> Sequence[BlockStored | BlockRemoved]:
    what, (words, start), group, tier = step
    piece = chunk(words, start, group % len(naive.kinds))
    name = (tier, piece.group, piece.keys[-1])
    if what == "store":
        naive.chunks[name] = piece
        return view.chunk_stored(tier, piece)
    if what == "remove":
        naive.chunks.pop(name, None)
        return view.chunk_removed(tier, piece.group, piece.keys[-1])
    naive.chunks = {n: c for n, c in naive.chunks.items() if n[0] != tier}
    return view.tier_removed(tier)


def _take_stored(told: set[bytes], events: list[BlockStored], closed: bool) -> None:
    for event in events:
        assert len(event.token_ids) == 16 * len(event.block_hashes) and event.block_size == 16
        parent = event.parent_block_hash
        assert not closed or parent is None or parent in told, "a child was announced before its parent"
        assert isinstance(parent, bytes | None)
        for at, key in enumerate(event.block_hashes):
            assert isinstance(key, bytes)
            assert MEANING[key] == (parent, event.token_ids[16 * at]), "a hash goes with its parent and tokens"
            parent = key
        assert told.isdisjoint(blocks([event])), "a unit was stored twice without a removal between"
        told.update(blocks([event]))


def _take_removed(told: set[bytes], events: list[BlockRemoved]) -> None:
    gone = blocks(events)
    assert len(gone) == len(set(gone)) and told.issuperset(gone), "a removal of what wasn't announced"
    told.difference_update(gone)


def test_what_is_left_after_everything_went_is_nothing() -> None:
    for kinds, closed in itertools.product(KINDS, (False, True)):
        view = TierView(CPU, kinds, closed=closed)
        for group, (words, start) in itertools.product(range(len(kinds)), PIECES):
            view.chunk_stored("a", chunk(words, start, group))
        view.tier_removed("a")
        stats = view.stats()
        assert (stats.chunks, stats.units, stats.announced) == (0, 0, 0)
        assert not view._support and not view._children and not view._units


def test_a_chunk_that_contradicts_itself_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        UnitChunk(0, None, tuple(path(1)), b"too short")
