"""Who is evicted for whom, by streams of random operations against a dumb model, slot sizes and extents included.

The model keeps nothing but a set of (slot, tenant, size). What must hold after every step: accounts equal the sum of
what is there; no quota is exceeded; nobody is pushed below its guarantee by somebody else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.placement import Placement
from forebay.kvstore.policies.lru import Lru
from forebay.kvstore.policies.registry import POLICY_NAMES, Policies
from forebay.kvstore.slots import EXTENT_HEADER_BYTES
from forebay.kvstore.tenancy import OTHERS, Accounts, Claim, TenantRule, divide, shares
from tests.kvstore.support import bare_entry

SIZES = (1 << 12, 1 << 13, 3 << 12)
EXTENT = EXTENT_HEADER_BYTES + 12 * (1 << 12)  # 12, 6 or 4 slots, none wasted
NAMES = ("a", "b", "c", "d")


@dataclass
class Pool:
    """A placement, and the entries that live in it."""

    extents: int = 4
    rules: dict[str, TenantRule] = field(default_factory=dict)
    accounts_max: int = 64
    extent_bytes: int = EXTENT
    policy: str = "lru"

    def __post_init__(self) -> None:
        self.children: dict[Entry, list[Entry]] = {}
        self.evicted: list[tuple[Entry, str]] = []
        self.entries: list[Entry] = []
        self.serial = 0
        self.place = Placement(
            evict=self.evict, cut=lambda extent, size: None, rules=self.rules, accounts_max=self.accounts_max,
            policies=Policies(self.policy, self),
        )  # fmt: skip
        for extent in range(self.extents):
            self.place.add_extent(extent, self.extent_bytes)

    def dependents(self, entry: Entry) -> list[Entry]:
        return self.children.get(entry, [])

    def parent(self, entry: Entry) -> Entry | None:
        return next((parent for parent, children in self.children.items() if entry in children), None)

    def with_dependents(self, entry: Entry) -> set[Entry]:
        found = {entry}
        for child in self.dependents(entry):
            found |= self.with_dependents(child)
        return found

    def chain(self, tenant: str, sizes: list[int]) -> list[Entry]:
        """Chunks of which each needs the one before it."""
        entries: list[Entry] = []
        for size in sizes:
            entry = self.store(tenant, size, parent=entries[-1] if entries else None)
            assert entry is not None
            entries.append(entry)
        return entries

    def evict(self, entry: Entry, reason: str) -> None:
        assert entry.pins == 0, "what is pinned is never evicted"
        assert not self.dependents(entry), "what needs it went before"
        self.evicted.append((entry, reason))
        self.place.leave(entry)
        self.gone(entry)

    def gone(self, entry: Entry) -> None:
        self.entries.remove(entry)
        self.children.pop(entry, None)
        parent = self.parent(entry)
        if parent is not None:
            self.children[parent].remove(entry)

    def store(
        self, tenant: str, size: int = SIZES[0], *, pin: bool = False, parent: Entry | None = None
    ) -> Entry | None:
        self.evicted.clear()
        slot = self.place.take(size, tenant)
        if slot is None:
            return None
        self.serial += 1
        entry = bare_entry(key=self.serial.to_bytes(8, "big"), tenant=tenant, slot=slot, slot_bytes=size, pins=1)
        if parent is not None and parent in self.entries:
            entry.start, entry.parent = parent.start + 1, parent.key
            self.children.setdefault(parent, []).append(entry)
        self.entries.append(entry)
        self.place.settle(entry)
        if not pin:
            self.release(entry)
        return entry

    def release(self, entry: Entry) -> None:
        entry.pins = 0
        self.place.released(entry)

    def use(self, entry: Entry) -> None:
        self.place.pinned(entry)
        entry.pins = 1
        self.release(entry)

    def used(self, tenant: str) -> int:
        return sum(entry.slot_bytes for entry in self.entries if entry.tenant == tenant)

    def fill(self, tenant: str, count: int, size: int = SIZES[0]) -> int:
        return sum(self.store(tenant, size) is not None for _ in range(count))


# --- the rules, one at a time ---------------------------------------------------------------------------


def test_free_room_is_lent_to_whoever_asks() -> None:
    pool = Pool(rules={"a": TenantRule(guarantee=20 * SIZES[0])})
    assert pool.fill("b", 48) == 48 and not pool.evicted
    assert pool.used("b") == 48 * SIZES[0], "nobody else wants it now"


def test_what_was_lent_comes_back_up_to_the_guarantee_and_is_then_safe() -> None:
    pool = Pool(rules={"a": TenantRule(guarantee=20 * SIZES[0], weight=0.001)})
    pool.fill("b", 48)
    assert pool.fill("a", 40) == 40
    assert pool.used("a") == 20 * SIZES[0], "of so small a weight it gets its guarantee and no more"
    assert pool.fill("b", 100) == 100
    assert pool.used("a") == 20 * SIZES[0]


def test_a_tenant_at_its_quota_evicts_its_own() -> None:
    pool = Pool(rules={"a": TenantRule(quota=10 * SIZES[0])})
    pool.fill("b", 10)
    first = pool.store("a")
    pool.fill("a", 9)
    assert pool.store("a") is not None
    assert pool.evicted == [(first, "quota")], "though the pool has room"
    assert pool.used("a") == 10 * SIZES[0]


def test_a_chunk_larger_than_the_quota_is_refused_and_costs_nobody_anything() -> None:
    pool = Pool(rules={"a": TenantRule(quota=SIZES[1])})
    pool.fill("a", 2)
    assert pool.store("a", SIZES[2]) is None
    assert pool.used("a") == 2 * SIZES[0] and pool.place.accounts.of("a").counts.refused == 1


def test_a_tenant_beyond_its_quota_is_evicted_first_whoever_asks() -> None:
    pool = Pool(rules={"a": TenantRule(quota=4 * SIZES[0])})
    pool.fill("b", 44)
    pool.fill("a", 4)
    late = pool.entries[0]
    pool.place.pinned(late)
    late.pins = 1
    pool.place.belongs_to(late, "a")  # a tier's chunk turns out to be a's
    assert pool.place.accounts.of("a").over_quota()
    pool.store("b")
    assert [entry.tenant for entry, _ in pool.evicted] == ["a"], "b holds ten times as much"


def test_shares_of_those_who_want_more_follow_their_weights() -> None:
    pool = Pool(rules={"a": TenantRule(weight=3.0)})
    for _ in range(200):
        for tenant in "ab":
            pool.store(tenant)
    assert (pool.used("a"), pool.used("b")) == (36 * SIZES[0], 12 * SIZES[0])


def test_a_greedy_tenant_cannot_push_a_modest_one() -> None:
    pool = Pool()
    pool.fill("b", 10)
    pool.fill("a", 38)
    kept = {entry.key for entry in pool.entries if entry.tenant == "b"}
    for number in range(400):
        pool.store("a")
        if number % 20 == 0:
            pool.use(next(entry for entry in pool.entries if entry.tenant == "b"))
    assert {entry.key for entry in pool.entries if entry.tenant == "b"} == kept


def test_a_tenant_that_does_nothing_while_the_pool_is_used_over_gives_way() -> None:
    pool = Pool()
    pool.fill("b", 10)
    pool.fill("a", 100)
    assert pool.used("b") == 0 and pool.used("a") == 48 * SIZES[0]


def test_of_a_dormant_tenant_its_guarantee_stays() -> None:
    pool = Pool(rules={"b": TenantRule(guarantee=4 * SIZES[0])})
    pool.fill("b", 10)
    pool.fill("a", 300)
    assert pool.used("b") == 4 * SIZES[0]


def test_a_slot_that_no_extent_has_room_for_is_refused_and_nothing_goes_for_it() -> None:
    pool = Pool(extents=1)
    while pool.store("a", SIZES[0]) is not None and not pool.evicted:
        pass
    pool.evicted.clear()
    assert pool.place.take(EXTENT - EXTENT_HEADER_BYTES + 4096, "a") is None
    assert not pool.evicted and pool.place.accounts.of("a").counts.refused == 1


def test_that_nothing_can_go_is_found_out_once_until_something_changes() -> None:
    pool = Pool(extents=1)
    heads = []
    while (head := pool.store("a")) is not None and not pool.evicted:
        child = pool.store("a", parent=head, pin=True)
        assert child is not None
        heads.append((head, child))
    asked = 0

    def dependents(entry: Entry) -> list[Entry]:
        nonlocal asked
        asked += 1
        return Pool.dependents(pool, entry)

    pool.dependents = dependents  # type: ignore[method-assign]
    refused = pool.place.accounts.of("a").counts.refused
    for _ in range(100):
        assert pool.place.take(SIZES[0], "a") is None
    assert asked <= 4 * len(heads), "looked at once, not a hundred times"
    assert pool.place.accounts.of("a").counts.refused == refused + 100
    head, child = heads[-1]
    child.pins = 0
    pool.place.released(child)
    assert pool.place.take(SIZES[0], "a") is not None and pool.evicted == [(child, "evicted")]


def test_a_full_and_pinned_pool_refuses_and_counts() -> None:
    pool = Pool()
    for _ in range(48):
        pool.store("a", pin=True)
    assert pool.store("b") is None and pool.store("a") is None
    counts = {account.name: account.counts for account in pool.place.accounts}
    assert counts["b"].refused == counts["a"].refused == 1


def test_whoever_stands_highest_pays_for_a_new_slot_size_with_its_own() -> None:
    pool = Pool()
    for _ in range(12):  # both live in every extent, a with three quarters of each
        pool.fill("a", 3)
        pool.fill("b", 1)
    before = pool.used("b")
    assert pool.store("a", SIZES[1]) is not None
    lost = before - pool.used("b")
    (emptied,) = {entry.slot.extent for entry, _ in pool.evicted if entry.tenant == "b"}
    outside = [entry for entry, _ in pool.evicted if entry.slot.extent != emptied]
    assert lost > 0 and sum(entry.slot_bytes for entry in outside) == lost, "beside one extent, as much as b has lost"
    assert {entry.tenant for entry in outside} == {"a"}


def test_an_extent_is_not_moved_if_that_broke_a_guarantee() -> None:
    pool = Pool(rules={"b": TenantRule(guarantee=12 * SIZES[0])})
    for _ in range(12):
        pool.fill("b", 1)
        pool.fill("a", 3)
    assert pool.used("b") == 12 * SIZES[0]
    assert pool.store("a", SIZES[1]) is None, "b lives in every extent"
    assert pool.store("a") is not None, "an extent can't be had, a slot can"
    assert pool.used("b") == 12 * SIZES[0]


def test_quarantined_slots_are_their_tenants() -> None:
    pool = Pool()
    entry = pool.store("a", pin=True)
    assert entry is not None
    pool.gone(entry)
    pool.place.leave(entry, keep_slot=True)
    assert pool.place.accounts.of("a").used == SIZES[0]
    pool.place.drop_slot(entry.slot)
    assert pool.place.accounts.of("a").used == 0


def test_softly_kept_chunks_go_after_all_others() -> None:
    pool = Pool(extents=1)
    pool.fill("a", 12)
    kept = pool.entries[:3]
    for entry in kept:
        pool.place.keep(entry)
    pool.fill("a", 30)
    assert all(entry in pool.entries for entry in kept)
    for entry in pool.entries:
        if entry not in kept:
            pool.place.pinned(entry)
            entry.pins = 1
    assert pool.store("a") is not None and pool.evicted[0][0] in kept


def test_what_needs_a_chunk_goes_before_it() -> None:
    pool = Pool(extents=2)
    first, tail = pool.chain("a", [SIZES[0], SIZES[1]])
    pool.fill("a", 11)
    pool.fill("a", 5, SIZES[1])
    pool.use(tail)
    pool.store("a")
    assert [entry for entry, _ in pool.evicted] == [tail, first], "the victim is the least recently used of its size"


def test_a_prefix_of_what_is_pinned_or_kept_stays() -> None:
    pool = Pool(extents=1)
    pinned = pool.chain("a", [SIZES[0]] * 4)
    pool.place.pinned(pinned[-1])
    pinned[-1].pins = 1
    kept = pool.chain("a", [SIZES[0]] * 4)
    pool.place.keep(kept[-1])
    pool.fill("a", 40)
    assert all(entry in pool.entries for entry in pinned + kept)


def test_what_goes_along_breaks_no_guarantee() -> None:
    pool = Pool(extents=2, rules={"b": TenantRule(guarantee=SIZES[0] + SIZES[1])})
    pool.chain("b", [SIZES[0], SIZES[1]])
    pool.fill("b", 1)
    pool.fill("a", 10)
    pool.fill("a", 5, SIZES[1])
    for _ in range(30):
        pool.store("a")
        pool.store("a", SIZES[1])
        assert pool.used("b") >= SIZES[0] + SIZES[1]


def test_an_extent_goes_with_a_chain_of_thousands_behind_it() -> None:
    pool = Pool(extents=3, extent_bytes=EXTENT_HEADER_BYTES + 1500 * SIZES[0])
    chain = pool.chain("a", [SIZES[0]] * 4000)
    pool.fill("a", 500)
    for entry in pool.entries[-500:]:
        pool.use(entry)
    assert pool.store("a", SIZES[1]) is not None
    gone = {entry for entry, _ in pool.evicted}
    left = [entry not in gone for entry in chain]
    assert left == sorted(left, reverse=True), "what is left of the chain is its front"


# --- accounts -------------------------------------------------------------------------------------------


def test_accounts_are_capped_and_idle_ones_make_room() -> None:
    pool = Pool(accounts_max=8)
    for number in range(1000):
        entry = pool.store(f"t{number}")
        assert entry is not None
        pool.evict(entry, "cleared")
    assert len(pool.place.accounts) <= 8
    total = sum(account.counts.refused for account in pool.place.accounts)
    assert total == 0


def test_beyond_the_cap_tenants_share_one_account_and_nothing_is_miscounted() -> None:
    pool = Pool(accounts_max=4)
    for number in range(40):
        assert pool.store(f"t{number}") is not None
    accounts = {account.name: account.used for account in pool.place.accounts}
    assert accounts[OTHERS] == 36 * SIZES[0] and len(accounts) == 5
    for entry in list(pool.entries):
        pool.evict(entry, "cleared")
    assert all(account.used == 0 for account in pool.place.accounts)


def test_configured_tenants_are_never_forgotten() -> None:
    pool = Pool(rules={"a": TenantRule(quota=SIZES[0])}, accounts_max=2)
    for number in range(10):
        pool.place.accounts.of(f"t{number}")
    assert pool.place.accounts.of("a").rule.quota == SIZES[0]


def test_counts_of_forgotten_accounts_are_kept_in_one() -> None:
    accounts = Accounts(Lru, limit=1)
    accounts.of("a").counts.hit_tokens = 5
    accounts.of("b")
    assert accounts.forgotten.hit_tokens == 5


# --- dividing -------------------------------------------------------------------------------------------


claims = st.builds(Claim, st.none() | st.integers(0, 1000), st.integers(0, 100), st.sampled_from([0.5, 1.0, 2.0, 5.0]))


@given(total=st.integers(1, 5000), wanted=st.lists(claims, min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_division_is_fair(total: int, wanted: list[Claim]) -> None:
    total += sum(claim.guarantee for claim in wanted)
    got = divide(total, wanted)
    assert sum(got) <= total
    floors = [c.guarantee if c.demand is None else min(c.guarantee, c.demand) for c in wanted]
    assert all(bytes_ >= floor - 1 for bytes_, floor in zip(got, floors, strict=True))
    hungry = [
        (b - c.guarantee) / c.weight for b, c in zip(got, wanted, strict=True) if c.demand is None or b < c.demand
    ]
    if hungry and len(hungry) == len(wanted):
        assert sum(got) >= total - len(wanted), "nothing is left over while somebody wants it"
    for bytes_, claim in zip(got, wanted, strict=True):
        level = (bytes_ - claim.guarantee) / claim.weight
        assert all(level <= other + 2 / claim.weight + 4 for other in hungry), "nobody has more than the hungry"


def test_shares_add_up_to_the_pool() -> None:
    accounts = Accounts(Lru, {"a": TenantRule(quota=10), "b": TenantRule(weight=2.0)})
    told = shares(100, [accounts.of("a"), accounts.of("b"), accounts.of("c")])
    assert told["a"] == 10 and told["b"] == pytest.approx(60, abs=1) and told["c"] == pytest.approx(30, abs=1)


# --- everything at once ---------------------------------------------------------------------------------


rules = st.fixed_dictionaries(
    {
        name: st.builds(
            lambda own, more, weight: TenantRule(more and (own + more) * SIZES[0], own * SIZES[0], weight),
            st.integers(0, 10), st.none() | st.integers(1, 20), st.sampled_from([0.25, 1.0, 4.0]),
        )
        for name in NAMES[:3]
    }
)  # fmt: skip


class PlacementMachine(RuleBasedStateMachine):
    @initialize(rules=rules, policy=st.sampled_from(POLICY_NAMES))
    def start(self, rules: dict[str, TenantRule], policy: str) -> None:
        self.pool = Pool(rules=rules, policy=policy)
        self.held: list[tuple[SlotRef, str, int]] = []

    @rule(
        tenant=st.sampled_from(NAMES), size=st.sampled_from(SIZES), pin=st.booleans(), count=st.integers(1, 6),
        after=st.integers(0, 60),
    )  # fmt: skip
    def store(self, tenant: str, size: int, pin: bool, count: int, after: int) -> None:
        pool = self.pool
        for _ in range(count):
            mine = [entry for entry in pool.entries if entry.tenant == tenant]
            parent = mine[after % len(mine)] if mine and after < 40 else None
            before = {name: self.bytes_of(name) for name in NAMES}
            entry = pool.store(tenant, size, pin=pin and count < 3, parent=parent)
            for name in NAMES:
                if name == tenant:
                    continue
                guarantee = pool.rules[name].guarantee if name in pool.rules else 0
                assert self.bytes_of(name) >= min(before[name], guarantee), (
                    f"{tenant} pushed {name} below its guarantee"
                )
            if entry is None and not pin:
                assert not pool.evicted or all(e.tenant == tenant for e, _ in pool.evicted)
            own = [e for e, reason in pool.evicted if reason == "quota"]
            assert all(e.tenant == tenant for e in own), "quota pressure evicts one's own"

    @rule(tenant=st.sampled_from(NAMES), size=st.sampled_from(SIZES))
    def within_the_guarantee_nothing_refuses_but_pins_and_sizes(self, tenant: str, size: int) -> None:
        pool = self.pool
        mine = pool.rules.get(tenant, TenantRule())
        if self.held or any(entry.pins for entry in pool.entries) or self.bytes_of(tenant) + size > mine.guarantee:
            return
        others = [name for name in NAMES if name != tenant]
        spare = any(self.can_always_lose(name, size) for name in others)
        if spare:
            assert pool.store(tenant, size) is not None

    def can_always_lose(self, tenant: str, size: int) -> bool:
        """Whichever of its chunks of this size goes, with all that needs it: its guarantee is left."""
        chunks = [entry for entry in self.pool.entries if entry.tenant == tenant and entry.slot_bytes == size]
        costs = [sum(e.slot_bytes for e in self.pool.with_dependents(entry)) for entry in chunks]
        guarantee = self.pool.rules.get(tenant, TenantRule()).guarantee
        return bool(costs) and self.bytes_of(tenant) - max(costs) >= guarantee

    @rule(pick=st.randoms(use_true_random=False))
    def read(self, pick: object) -> None:
        idle = [entry for entry in self.pool.entries if not entry.pins]
        if idle:
            self.pool.use(idle[pick.randrange(len(idle))])  # type: ignore[attr-defined]

    @rule(pick=st.randoms(use_true_random=False))
    def let_go(self, pick: object) -> None:
        busy = [entry for entry in self.pool.entries if entry.pins]
        if busy:
            self.pool.release(busy[pick.randrange(len(busy))])  # type: ignore[attr-defined]

    @rule(pick=st.randoms(use_true_random=False), tenant=st.sampled_from(NAMES))
    def turn_out_to_be_anothers(self, pick: object, tenant: str) -> None:
        busy = [entry for entry in self.pool.entries if entry.pins]
        if busy:
            self.pool.place.belongs_to(busy[pick.randrange(len(busy))], tenant)  # type: ignore[attr-defined]

    @rule(pick=st.randoms(use_true_random=False))
    def keep_or_not(self, pick: object) -> None:
        if self.pool.entries:
            entry = self.pool.entries[pick.randrange(len(self.pool.entries))]  # type: ignore[attr-defined]
            (self.pool.place.unkeep if entry in self.pool.place.kept else self.pool.place.keep)(entry)

    @rule(pick=st.randoms(use_true_random=False))
    def quarantine(self, pick: object) -> None:
        busy = [entry for entry in self.pool.entries if entry.pins]
        if busy:
            entry = busy[pick.randrange(len(busy))]  # type: ignore[attr-defined]
            self.pool.gone(entry)
            self.pool.place.leave(entry, keep_slot=True)
            self.held.append((entry.slot, entry.tenant, entry.slot_bytes))

    @rule()
    def end_quarantine(self) -> None:
        for slot, _, _ in self.held:
            self.pool.place.drop_slot(slot)
        self.held.clear()

    def bytes_of(self, tenant: str) -> int:
        return self.pool.used(tenant) + sum(size for _, owner, size in self.held if owner == tenant)

    @invariant()
    def accounts_equal_what_is_there(self) -> None:
        if not hasattr(self, "pool"):
            return
        place = self.pool.place
        used: Counter[str] = Counter()
        idle: Counter[str] = Counter()
        for entry in self.pool.entries:
            used[entry.tenant] += entry.slot_bytes
            idle[entry.tenant] += 0 if entry.pins else entry.slot_bytes
        for _, tenant, size in self.held:
            used[tenant] += size
        for account in place.accounts:
            assert (account.used, account.evictable) == (used[account.name], idle[account.name]), account.name
            in_policies = sum(entry.slot_bytes for entry in (*account.policy, *account.kept))
            assert in_policies == account.evictable
        assert sum(used.values()) == place.slots.used_bytes
        levels = [account.level for account in place.accounts.highest_first()]
        assert levels == sorted(levels, reverse=True) and len(levels) == sum(1 for u in used.values() if u)

    @invariant()
    def quotas_hold(self) -> None:
        if not hasattr(self, "pool"):
            return
        for account in self.pool.place.accounts.beyond_quota():
            assert any(entry.tenant == account.name for entry in self.pool.entries)
        for name, given_rule in self.pool.rules.items():
            over = given_rule.quota is not None and self.bytes_of(name) > given_rule.quota
            assert over == any(a.name == name for a in self.pool.place.accounts.beyond_quota())


TestPlacement = PlacementMachine.TestCase
TestPlacement.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
