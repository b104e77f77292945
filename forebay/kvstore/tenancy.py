"""Who holds how much of the pool: one account a tenant, with its quota, guarantee, weight and eviction policy. Pure.

A tenant's *level* is what it holds above its guarantee, for each unit of its weight:

    level = (used - guarantee) / weight

Taking from the highest level first leaves all who want more on one level, which is the weighted max-min fair
division of whatever is not guaranteed; nobody's share has to be known for that, nor who else there is.

A share is for those who use it. A tenant is *dormant* that has used nothing while as many bytes were stored as the
pool holds (recency alone would have evicted all of its chunks by then): what it has beyond its guarantee goes first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from forebay.kvstore.entry import Entry
from forebay.kvstore.policies.base import EvictionPolicy
from forebay.kvstore.policies.lru import Lru

ACCOUNTS_MAX = 1024
OTHERS = "(others)"
"""The account of tenants for whom there was no account left. They share one weight."""


@dataclass(frozen=True, slots=True)
class TenantRule:
    """What one tenant may have. `quota` caps its bytes (None: the pool does), `guarantee` are bytes that others
    can't take from it, `weight` is its share of what isn't guaranteed to anybody."""

    quota: int | None = None
    guarantee: int = 0
    weight: float = 1.0


@dataclass(slots=True)
class TenantCounts:
    """Monotonic counters of one tenant. `caused`: chunks of others that were evicted for its sake; `suffered`: its
    own that were evicted for others; `evicted`: all of its own that were. Tokens are those of lookups."""

    evicted: int = 0
    suffered: int = 0
    caused: int = 0
    refused: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0

    def add(self, other: TenantCounts) -> None:
        """Take another's counts in."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's books. Bytes are those of slots: `used` of all that it holds (reserved, promoting and
    quarantined ones too), `evictable` of those that may be evicted, whose entries `sizes` counts by slot size.
    `policy` orders those, but for what is `kept` softly. `serial` tells accounts apart in the ranking, `ranked` is
    the level at which it stands there, `active_at` when it was last active, in bytes stored until then."""

    name: str
    rule: TenantRule
    policy: EvictionPolicy
    serial: int = 0
    kept: EvictionPolicy = field(default_factory=Lru)
    used: int = 0
    evictable: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    counts: TenantCounts = field(default_factory=TenantCounts)
    ranked: float | None = None
    active_at: int = 0

    @property
    def level(self) -> float:
        return (self.used - self.rule.guarantee) / self.rule.weight

    def level_with(self, more: int) -> float:
        """Its level once it holds `more` bytes than now."""
        return (self.used + more - self.rule.guarantee) / self.rule.weight

    def can_lose(self, size: int) -> bool:
        """May somebody else take `size` bytes from it?"""
        return self.used - size >= self.rule.guarantee

    def over_quota(self, more: int = 0) -> bool:
        """Would it be over its quota with `more` bytes?"""
        return self.rule.quota is not None and self.used + more > self.rule.quota

    def victim(self, slot_bytes: int, kept: bool = False) -> Entry | None:
        """Its entry in a slot of this size that goes next; with `kept`, of those that are only kept softly."""
        return (self.kept if kept else self.policy).victim(slot_bytes)

    def coldest(self, kept: bool = False) -> Entry | None:
        """The least recently used of its victims, whatever their slot size."""
        victims = (self.victim(size, kept) for size in self.sizes)
        return min((v for v in victims if v is not None), key=lambda entry: entry.stamp, default=None)

    def offer(self, entry: Entry, *, kept: bool, used: bool = True) -> None:
        """`entry` may be evicted from now on, and was just used; or else is the first to go."""
        policy = self.kept if kept else self.policy
        if used:
            policy.add(entry)
        else:
            policy.put_back(entry)
        self.evictable += entry.slot_bytes
        self.sizes[entry.slot_bytes] = self.sizes.get(entry.slot_bytes, 0) + 1

    def withhold(self, entry: Entry, *, kept: bool) -> None:
        """`entry` is pinned or gone."""
        (self.kept if kept else self.policy).remove(entry)
        self.evictable -= entry.slot_bytes
        self.sizes[entry.slot_bytes] -= 1
        if not self.sizes[entry.slot_bytes]:
            del self.sizes[entry.slot_bytes]


class Accounts:
    """All accounts, ranked by level. `forgotten` has the counts of accounts that were given up, `stored` the bytes
    that were ever given out: the clock of dormancy."""

    def __init__(
        self,
        new_policy: Callable[[], EvictionPolicy],
        rules: Mapping[str, TenantRule] | None = None,
        limit: int = ACCOUNTS_MAX,
    ) -> None:
        self._new_policy = new_policy
        self._limit = limit
        self._accounts: dict[str, Account] = {}
        self._idle: OrderedDict[str, Account] = OrderedDict()
        self._ranking: list[tuple[float, int]] = []
        self._by_serial: dict[int, Account] = {}
        self._over_quota: dict[Account, None] = {}
        self._by_use: OrderedDict[Account, None] = OrderedDict()
        self._serial = 0
        self.stored = 0
        self.forgotten = TenantCounts()
        self.rules = dict(rules or {})
        for name, rule in self.rules.items():
            self._accounts[name] = self._open(name, rule)
        self.others = self._open(OTHERS, TenantRule())

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[Account]:
        """All accounts; that of the others only if it holds or has counted anything."""
        yield from list(self._accounts.values())
        if self.others.used or self.others.counts != TenantCounts():
            yield self.others

    @property
    def evictable_entries(self) -> int:
        return sum(sum(account.sizes.values()) for account in (*self._accounts.values(), self.others))

    def of(self, tenant: str) -> Account:
        """The tenant's account. A new one takes the place of one that has held nothing for longest, if there is no
        other; where all hold something it is the others'."""
        account = self._accounts.get(tenant)
        if account is not None:
            if not account.used and tenant in self._idle:
                self._idle.move_to_end(tenant)
            return account
        if len(self._accounts) >= self._limit and not self._forget_one():
            return self.others
        account = self._open(tenant, TenantRule())
        self._accounts[tenant] = self._idle[tenant] = account
        return account

    def _open(self, name: str, rule: TenantRule) -> Account:
        self._serial += 1
        account = self._by_serial[self._serial] = Account(name, rule, self._new_policy(), self._serial)
        return account

    def _forget_one(self) -> bool:
        if not self._idle:
            return False
        name, account = self._idle.popitem(last=False)
        del self._accounts[name], self._by_serial[account.serial]
        self.forgotten.add(account.counts)
        return True

    def charge(self, account: Account, size: int) -> None:
        """`account` holds `size` bytes more."""
        if not account.used:
            self._idle.pop(account.name, None)
        account.used += size
        self._rank(account)
        self.active(account)

    def active(self, account: Account) -> None:
        """`account` has stored or read something."""
        account.active_at = self.stored
        self._by_use[account] = None
        self._by_use.move_to_end(account)

    def discharge(self, account: Account, size: int) -> None:
        """`account` holds `size` bytes less."""
        account.used -= size
        assert account.used >= 0, account.name
        self._rank(account)
        if not account.used:
            self._by_use.pop(account, None)
        if not account.used and account is not self.others and account.name not in self.rules:
            self._idle[account.name] = account

    def _rank(self, account: Account) -> None:
        if account.ranked is not None:
            del self._ranking[bisect_left(self._ranking, (account.ranked, account.serial))]
        account.ranked = account.level if account.used else None
        if account.ranked is not None:
            insort(self._ranking, (account.ranked, account.serial))
        if account.over_quota():
            self._over_quota[account] = None
        elif self._over_quota:
            self._over_quota.pop(account, None)

    def highest_first(self) -> Iterator[Account]:
        """Accounts that hold something, from the highest level down. Don't charge while iterating."""
        return (self._by_serial[serial] for _, serial in reversed(self._ranking))

    def dormant(self, total: int) -> list[Account]:
        """Accounts that were not active while `total` bytes were stored, the longest first."""
        return list(takewhile(lambda account: self.stored - account.active_at > total, self._by_use))

    def beyond_quota(self) -> list[Account]:
        """Accounts that hold more than their quota, the furthest first. Usually none: a quota was made smaller, or
        a chunk that a tier brought turned out to be theirs."""
        return sorted(self._over_quota, key=lambda a: a.used - (a.rule.quota or 0), reverse=True)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one tenant would take if it could (`demand`, None: everything), and its guarantee and weight."""

    demand: int | None
    guarantee: int
    weight: float

    @property
    def saturation(self) -> float:
        """The level at which it has all that it wants."""
        return float("inf") if self.demand is None else (self.demand - self.guarantee) / self.weight

    def at(self, level: float) -> float:
        """Its bytes at a level."""
        wanted = self.guarantee + self.weight * level
        return max(0.0, wanted if self.demand is None else min(self.demand, wanted))


def divide(total: int, claims: Sequence[Claim]) -> list[int]:
    """The division of `total` bytes that evictions by level lead to: weighted max-min fair, guarantees first."""
    if not claims:
        return []
    if all(claim.demand is not None for claim in claims) and sum(claim.demand or 0 for claim in claims) <= total:
        return [claim.demand or 0 for claim in claims]
    low, high = -max(c.guarantee / c.weight for c in claims), total / min(c.weight for c in claims)
    for _ in range(100):  # the sum grows with the level: halve until it fits
        level = (low + high) / 2
        low, high = (level, high) if sum(claim.at(level) for claim in claims) <= total else (low, level)
    return [int(claim.at(low)) for claim in claims]


def shares(total: int, accounts: Sequence[Account]) -> dict[str, int]:
    """Each tenant's fair share of `total` bytes if all of `accounts` wanted as much as they could get."""
    claims = [Claim(account.rule.quota, account.rule.guarantee, account.rule.weight) for account in accounts]
    return {account.name: share for account, share in zip(accounts, divide(total, claims), strict=True)}
