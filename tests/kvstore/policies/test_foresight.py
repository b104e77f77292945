"""Foresight's parts against dumb models, and what it does with sessions."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import LookedUp
from forebay.kvstore.policies.foresight.ages import BINS, EDGES, WIDTHS, bin_of, indices
from forebay.kvstore.policies.foresight.habits import HALVED_AFTER, LEAN, RARE, Habits
from forebay.kvstore.policies.foresight.policy import Foresight, RecomputeCost
from forebay.kvstore.policies.foresight.sessions import Session, Sessions
from forebay.kvstore.policies.foresight.shelves import Pool, Shelf
from tests.kvstore.policies.family import CHUNK, SIZES, Family, SmallStore, make_entry

HAZARD = st.lists(st.one_of(st.just(0.0), st.floats(0, 1)), min_size=BINS, max_size=BINS)


def best_bet(hazard: list[float], start: int) -> float:
    """Tries every later age to stop at."""
    best, surviving, time, chance = 0.0, 1.0, 0.0, 0.0
    for i in range(start, BINS):
        time += surviving * WIDTHS[i] * (1 - hazard[i] / 2)
        chance += surviving * hazard[i]
        surviving *= 1 - hazard[i]
        best = max(best, chance / time)
    return best


@settings(max_examples=40, deadline=None, derandomize=True)
@given(hazard=HAZARD)
def test_the_index_is_that_of_the_best_bet(hazard: list[float]) -> None:
    found = indices(hazard)
    surviving = 1.0
    for start in range(BINS):
        if surviving > 1e-6:  # nobody gets there, else
            assert found[start] == pytest.approx(best_bet(hazard, start), rel=1e-6, abs=1e-12)
        surviving *= 1 - hazard[start]


def test_every_age_has_the_bin_that_holds_it() -> None:
    for i, (low, high) in enumerate(pairwise(EDGES)):
        assert bin_of(low) == i and bin_of((low + high) / 2) == i
    assert bin_of(-1.0) == 0 and bin_of(1e9) == BINS - 1


class CountedHabits:
    """Remembers every single event, and counts them when asked."""

    def __init__(self) -> None:
        self.events: list[tuple[tuple[int, ...], int, bool]] = []

    def hazard(self, features: tuple[int, ...]) -> list[float]:
        result = [RARE] * BINS
        for depth in range(len(features) + 1):
            path, lean = features[:depth], LEAN if depth else 1.0
            mine = [(i, back) for kind, i, back in self.events if kind[:depth] == path]
            result = [
                (sum(back for i, back in mine if i == b) + lean * result[b]) / (sum(i == b for i, _ in mine) + lean)
                for b in range(BINS)
            ]
        return result


@pytest.mark.parametrize("seed", range(5))
def test_habits_are_what_counting_every_event_gives(seed: int) -> None:
    rng, habits, model = random.Random(seed), Habits(), CountedHabits()
    kinds = [(rng.randrange(2), rng.randrange(2), rng.randrange(2))[: rng.randrange(1, 4)] for _ in range(5)]
    for _ in range(60):
        features, age_bin, back = rng.choice(kinds), rng.randrange(4), rng.random() < 0.4
        (habits.returned if back else habits.waited)(habits.kind(features), age_bin)
        model.events.append((features, age_bin, back))
    for features in kinds:
        assert list(habits.hazard(habits.kind(features))) == pytest.approx(model.hazard(features))


def test_old_habits_count_half() -> None:
    habits = Habits()
    kind = habits.kind([1])
    habits.returned(kind, 3)
    for _ in range(HALVED_AFTER):
        habits.next_request()
    habits.hazard(kind)
    assert kind.returned[3] == 0.5 and kind.waited[3] == 0.5
    habits.returned(kind, 3)
    assert kind.returned[3] == 1.5


def test_kinds_beyond_the_limit_are_the_wider_ones() -> None:
    habits = Habits(limit=3)
    narrow = habits.kind([1, 2])
    assert len(habits) == 3 and narrow.parent is habits.kind([1])
    assert habits.kind([1, 5]) is habits.kind([1]) and habits.kind([7]).parent is None
    assert len(habits) == 3


# --- sessions ------------------------------------------------------------------------------------------


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def ask(sessions: Sessions, now: float, *names: str) -> Session:
    return sessions.observe(LookedUp(keys(*names), (), now, CHUNK))[0]


def test_a_prompt_that_goes_on_from_another_is_its_session() -> None:
    sessions = Sessions()
    first = ask(sessions, 0, "system", "a1", "a2")
    other = ask(sessions, 1, "system", "b1")
    assert other is not first
    assert ask(sessions, 2, "system", "a1", "a2", "a3", "a4") is first and first.turn == 1
    assert ask(sessions, 3, "system", "a1", "a2", "a3", "tail of a4", "a5") is first
    assert ask(sessions, 4, "system", "b1", "b2") is other and other.turn == 1
    assert ask(sessions, 5, "system") not in (first, other), "what all begin with tells nothing"
    short = ask(sessions, 6, "greeting", "c1")
    assert ask(sessions, 7, "greeting", "d1") is not short


def test_a_session_is_found_again_without_any_chunk_of_it_left() -> None:
    family = Family()
    policy = Foresight(family)
    store = SmallStore(family, [policy])
    policy.observe(LookedUp(keys("a", "b"), (), 0, CHUNK))
    entry = store.take_in(make_entry(b"a"))
    session = entry.note.session
    store.evict(entry)
    policy.observe(LookedUp(keys("a", "b", "c"), (), 9, CHUNK))
    assert session.turn == 1 and session.gaps == bytes([bin_of(9.0)])


def test_sessions_beyond_the_limit_are_forgotten_the_longest_idle_first() -> None:
    sessions = Sessions(limit=10)
    made = [ask(sessions, i, f"{i}a", f"{i}b") for i in range(25)]
    assert len(sessions) == 10 and list(sessions) == made[15:]
    assert len(sessions._marks) == 20
    assert ask(sessions, 30, "3a", "3b", "3c") is not made[3]
    assert ask(sessions, 31, "20a", "20b", "20c") is made[20]


def test_awaited_chunks_are_bounded() -> None:
    sessions = Sessions(expected_max=8)
    session = ask(sessions, 0, "a")
    awaited = [bytes([i]) for i in range(30)]
    sessions.expect(awaited, 0, session)
    assert sessions.expected == 8
    assert sessions.expecting(bytes([29])) is session and sessions.expecting(bytes([3])) is None
    sessions.expect(awaited, 28, session)
    assert sessions.expected == 2, "what is here isn't awaited"


def test_timers_don_t_pile_up() -> None:
    sessions = Sessions()
    for turn in range(3000):
        ask(sessions, turn * 0.5, *(f"{turn % 7}-{i}" for i in range(2 + turn // 7)))
    assert len(sessions) == 7 and len(sessions._timers) < 200


def test_a_session_that_is_overdue_by_hours_is_forgotten() -> None:
    sessions = Sessions()
    ask(sessions, 0, "a", "b")
    ask(sessions, 2.0**17, "x", "y")
    assert len(sessions) == 1


# --- shelves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_the_victim_is_the_deepest_of_the_session_that_is_worth_least(seed: int) -> None:
    rng, family = random.Random(seed), Family()
    pool = Pool(family, lambda entry: 1.0)
    sessions = [Session(0.0) for _ in range(6)]
    free: set[Entry] = set()
    for step in range(400):
        if rng.random() < 0.3 or not family.entries:
            parent = rng.choice(family.entries) if family.entries and rng.random() < 0.8 else None
            start = parent.end if parent else 0
            entry = make_entry(step.to_bytes(2, "big"), parent.key if parent else b"root", start)
            family.entries.append(entry)
            entry.note = pool.shelf(rng.choice(sessions))
            pool.put(entry.note, entry)
            free.add(entry)
        elif rng.random() < 0.3:
            entry = rng.choice(family.entries)
            shelf = entry.note
            assert isinstance(shelf, Shelf)
            if entry in free:
                pool.take(shelf, entry)
                free.remove(entry)
            else:
                entry.note = pool.shelf(shelf.session)
                pool.put(entry.note, entry)
                free.add(entry)
            for above in family.chain(entry)[1:2]:
                pool.wake(above.note)
        elif rng.random() < 0.4:
            rng.choice(sessions).changed(rng.random())
        else:
            victim = pool.victim()
            check_victim(family, free, sessions, victim)
            if victim is not None:
                pool.leave(victim.note, victim)
                free.remove(victim)
                family.entries.remove(victim)
                for above in family.chain(victim)[1:2]:
                    pool.wake(above.note)
        assert pool.evictable == len(free) == len(pool.in_order())


def check_victim(family: Family, free: set[Entry], sessions: list[Session], victim: Entry | None) -> None:
    """By looking at everything: of each session the deepest that may go, of these the one that is worth least."""
    leaves = [entry for entry in free if not family.dependents(entry)]
    if victim is None:
        assert not leaves
        return
    assert victim in leaves
    tops = []
    for session in sessions:
        mine = [entry for entry in free if entry.note.session is session]
        deepest = [entry for entry in mine if entry.start == max(e.start for e in mine)]
        if any(entry in leaves for entry in deepest):
            tops.append((session.worth, deepest))
    least = min((worth for worth, _ in tops), default=None)
    # A session whose deepest chunks are many (forks) may show one of them that is needed, and be passed over.
    if tops and all(len(deepest) == 1 for _, deepest in tops):
        assert victim.note.session.worth <= least


def test_a_chunk_that_another_session_needs_waits_for_it() -> None:
    family = Family()
    policy = Foresight(family)
    store = SmallStore(family, [policy])
    policy.observe(LookedUp(keys("s", "a"), (), 0, CHUNK))
    shared = store.take_in(make_entry(b"s"))
    mine = store.take_in(make_entry(b"a", b"s", CHUNK))
    policy.observe(LookedUp(keys("s", "b"), [shared], 1, CHUNK))
    theirs = store.take_in(make_entry(b"b", b"s", CHUNK))
    assert shared.note.session is theirs.note.session is not mine.note.session
    theirs.note.session.changed(0.0)
    store.evict(theirs)
    mine.note.session.changed(5.0)
    assert store.victims(SIZES[0]) == [mine], "the shared one is worth less, but needed"
    third = store.take_in(make_entry(b"c"))
    third.note.session.changed(1.0)
    store.evict(mine)
    assert store.victims(SIZES[0]) == [shared]


def test_a_tail_in_a_smaller_slot_holds_its_prefix_if_it_is_another_session_s() -> None:
    family = Family()
    policy = Foresight(family)
    store = SmallStore(family, [policy])
    policy.observe(LookedUp(keys("s", "a"), (), 0, CHUNK))
    shared = store.take_in(make_entry(b"s"))
    policy.observe(LookedUp(keys("s", "b"), [shared], 1, CHUNK))
    mine = store.take_in(make_entry(b"b", b"s", CHUNK, SIZES[1]))
    assert store.victims(SIZES[0]) == [shared], "its own tail goes along"
    theirs = store.take_in(make_entry(b"a", b"s", CHUNK, SIZES[1]))
    assert theirs.note.session is not mine.note.session
    assert store.victims(SIZES[0]) == [None]


def test_a_prefix_that_was_needed_while_it_was_pinned_is_weighed_anew_when_it_comes_back() -> None:
    family = Family()
    policy = Foresight(family)
    store = SmallStore(family, [policy])
    policy.observe(LookedUp(keys("s", "a"), (), 0, CHUNK))
    head, end = store.take_in(make_entry(b"s")), store.take_in(make_entry(b"a", b"s", CHUNK, SIZES[1]))
    other = store.take_in(make_entry(b"c"))
    other.note.session.changed(9.0)
    head.note.session.changed(0.1)
    store.pin(end)
    assert store.victims(SIZES[0]) == [other], "the head is needed"
    store.unpin(end)
    assert store.victims(SIZES[0]) == [head]


def test_the_rest_of_a_session_is_weighed_as_its_tail_goes() -> None:
    family = Family()
    pool = Pool(family, lambda entry: 1 / (1 + entry.start))
    sessions = Session(0.0), Session(1.0)
    for number, session in enumerate(sessions):
        session.worth = 1.0 + number / 5
        for depth in range(3):
            entry = make_entry(bytes([number, depth]), bytes([number, depth - 1]) if depth else b"root", depth)
            family.entries.append(entry)
            entry.note = pool.shelf(session)
            pool.put(entry.note, entry)
    order = []
    while (victim := pool.victim()) is not None:
        order.append(tuple(victim.key))
        pool.leave(victim.note, victim)
        family.entries.remove(victim)
    # Worth from the end: 1/3, 1/2, 1 and 1.2 times as much.
    assert order == [(0, 2), (1, 2), (0, 1), (1, 1), (0, 0), (1, 0)]


# --- the policy ----------------------------------------------------------------------------------------


class Talk:
    """Sessions that ask in turn, against one policy with room for `room` chunks."""

    def __init__(self, room: int, cost: RecomputeCost | None = None) -> None:
        self.family = Family()
        self.policy = Foresight(self.family, cost=cost)
        self.store = SmallStore(self.family, [self.policy])
        self.room = room

    def ask(self, now: float, name: str, length: int) -> int:
        """Chunks that hit. What missed is stored."""
        wanted = [f"{name}{i}".encode() for i in range(length)]
        here = {entry.key: entry for entry in self.family.entries}
        hit = next((i for i, key in enumerate(wanted) if key not in here), length)
        used = [here[key] for key in wanted[:hit]]
        for entry in used:
            self.store.pin(entry)
        self.policy.observe(LookedUp(wanted, used, now, CHUNK))
        for i in range(hit, length):
            while len(self.family.entries) >= self.room:
                self.store.evict(self.store.victims(SIZES[0])[0])
            self.store.take_in(make_entry(wanted[i], wanted[i - 1] if i else b"root", i * CHUNK))
        for entry in reversed(used):
            self.store.unpin(entry)
        return hit

    def held(self, name: str) -> int:
        return sum(entry.key.startswith(name.encode()) for entry in self.family.entries)


def test_in_a_loop_that_doesn_t_fit_some_sessions_are_kept_whole() -> None:
    talk = Talk(room=40)
    hits = [[talk.ask(10.0 * turn + i, name, 10) for i, name in enumerate("abcdefgh")] for turn in range(60)]
    last = [sum(turn) for turn in hits[-10:]]
    assert min(last) >= 28, "recency alone would hit nothing at all"


def test_a_session_that_has_stayed_away_longer_than_ever_gives_up_its_room() -> None:
    talk = Talk(room=30)
    for turn in range(60):
        for i, name in enumerate("abc"):
            talk.ask(10.0 * turn + i, name, 10)
    for turn in range(60, 90):
        for i, name in enumerate("bcd"):
            talk.ask(10.0 * turn + i, name, 10)
    assert talk.held("a") == 0 and talk.held("b") == talk.held("c") == talk.held("d") == 10


def test_chunks_beyond_the_point_where_a_prompt_turned_off_go_first() -> None:
    talk = Talk(room=100)
    talk.ask(0, "a", 8)
    store, policy = talk.store, talk.policy
    tail = store.take_in(make_entry(b"tail", b"a7", 8 * CHUNK))
    assert tail.note.session.depth == 8
    used = [entry for entry in talk.family.entries if entry is not tail]
    other = store.take_in(make_entry(b"other"))
    other.note.session.changed(1e-9)
    policy.observe(LookedUp([*(entry.key for entry in used), b"a8"], used, 5, CHUNK))
    assert store.victims(SIZES[0]) == [tail]


def test_where_attention_is_dear_deep_chunks_are_worth_more() -> None:
    entries = make_entry(b"a", start=0), make_entry(b"z", start=10_000)
    flat, dear = RecomputeCost(), RecomputeCost(attention_tokens=5_000)
    assert flat.saved_per_byte(entries[0]) == flat.saved_per_byte(entries[1]) == CHUNK / SIZES[0]
    assert dear.saved_per_byte(entries[1]) == pytest.approx(CHUNK / SIZES[0] * (1 + (10_000 + CHUNK / 2) / 5_000))


def test_of_equal_sessions_the_one_that_costs_less_to_compute_again_is_evicted() -> None:
    kept = {}
    for name, cost in (("flat", None), ("dear", RecomputeCost(attention_tokens=2 * CHUNK))):
        talk = Talk(room=60, cost=cost)
        for turn in range(40):
            talk.ask(10.0 * turn, "long", 40)
            talk.ask(10.0 * turn + 0.1, "short", 10)
            talk.ask(10.0 * turn + 0.2, "other", 40)
        kept[name] = talk.held("short")
    assert kept["dear"] < kept["flat"]


def test_chunks_of_an_earlier_boot_need_no_session_each() -> None:
    talk = Talk(room=1000)
    for i in range(300):
        entry = make_entry(i.to_bytes(2, "big"), b"unknown", CHUNK)
        entry.verified = False
        talk.store.take_in(entry)
    talk.ask(0, "a", 3)
    assert talk.policy.gauges()["sessions"] == 1
    assert talk.store.victims(SIZES[0])[0].verified is False, "who nobody has asked for goes first"


def test_one_seed_gives_one_result() -> None:
    def play() -> list[bytes]:
        rng, talk = random.Random(3), Talk(room=50)
        for turn in range(200):
            talk.ask(turn + rng.random(), rng.choice("abcdefgh"), rng.randrange(2, 14))
        return [entry.key for entry in talk.family.entries]

    assert play() == play()


def test_a_session_whose_chunks_come_late_is_weighed_from_then_on() -> None:
    family = Family()
    policy = Foresight(family)
    store = SmallStore(family, [policy])
    policy.observe(LookedUp(keys("a", "b"), (), 0, CHUNK))
    policy.observe(LookedUp(keys("x", "y"), (), 100, CHUNK))
    late = store.take_in(make_entry(b"a"))
    before = late.note.session.worth
    policy.observe(LookedUp(keys("x", "y", "z"), (), 5000, CHUNK))
    assert len(late.note.session.index) == BINS and late.note.session.worth != before


def test_chunks_of_all_groups_are_their_session_s() -> None:
    policy = Foresight(Family())
    policy.observe(LookedUp(keys("a", "b"), (), 0, CHUNK))
    entries = [make_entry(b"a"), make_entry(b"a"), make_entry(b"b", b"a", CHUNK), make_entry(b"b", b"a", CHUNK)]
    for number, entry in enumerate(entries):
        entry.group = number % 2
        policy.add(entry)
    assert len({entry.note.session for entry in entries}) == 1
    assert policy.gauges()["sessions"] == 1
