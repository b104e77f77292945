"""Finding room for a chunk: a free slot, an uncut extent, the victim whose loss is fairest, or a whole colder extent.

    the requester is at its quota      its own chunks go, or the store is refused
    there is free room                 taken, whoever it is meant for: idle bytes are lent
    a tenant is over its quota,        its chunks go, whoever asks
    or dormant
    else                               the tenant at the highest level (see `tenancy`), the requester counted with
                                       the new chunk; never one below its guarantee
    the requester stands highest and   it barters: it takes from others, and gives up as many bytes of its own
    has nothing of this slot size
    else                               the same once more with what is only kept softly, else refused

The byte budget is hard: extents are all there is. Full means evict, else refuse the store; never wait, never
grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.header import SlotState
from forebay.kvstore.policies.registry import Policies
from forebay.kvstore.residents import Page, Residents
from forebay.kvstore.slots import Extent, SlotAllocator
from forebay.kvstore.tenancy import ACCOUNTS_MAX, Account, Accounts, TenantRule


@dataclass(frozen=True, slots=True)
class Loss:
    """What would be evicted for a requester: one entry, or all of an extent. `price` bytes of its own the
    requester has to give up for it."""

    entry: Entry | None = None
    extent: Extent | None = None
    price: int = 0


@dataclass
class Placement:
    """Slots, and which of them may be taken from whom.

    `evict` is the core's: it must remove the entry everywhere and give its slot back. `cut` writes an
    extent's new slot size into the extent, before any of its slots is used.

    `kept` entries (soft pins, retention) are taken only when nothing else is left; what is `pinned` never.
    `held` are quarantined slots, and at whose expense.
    """

    evict: Callable[[Entry, str], None]
    cut: Callable[[int, int], None]
    policies: Policies = field(default_factory=Policies)
    rules: Mapping[str, TenantRule] = field(default_factory=dict)
    accounts_max: int = ACCOUNTS_MAX
    slots: SlotAllocator = field(default_factory=SlotAllocator)
    busy: dict[int, int] = field(default_factory=dict)
    kept: set[Entry] = field(default_factory=set)
    kept_in: dict[int, int] = field(default_factory=dict)
    held: dict[SlotRef, tuple[Account, int]] = field(default_factory=dict)
    stamp: int = 0

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.policies.new, self.rules, self.accounts_max)
        self.residents = Residents(self.slots)
        # Bytes by extent and account, so that the price of an extent is known without a walk over its entries.
        self._tenants_in: defaultdict[int, defaultdict[Account, int]] = defaultdict(lambda: defaultdict(int))

    def add_extent(self, extent: int, size: int) -> None:
        """Take an uncut extent into the budget."""
        self.slots.add_extent(extent, size)
        self.residents.add_extent(extent)
        self.busy[extent] = self.kept_in[extent] = 0

    def take(self, slot_bytes: int, tenant: str = "") -> SlotRef | None:
        """A slot of this size for a tenant, evicting if need be; None if nothing may be evicted. May call `evict`."""
        account = self.accounts.of(tenant)
        slot = None
        if self._fit_quota(account, slot_bytes):
            slot = self._free(slot_bytes)
            for kept in (False, True):
                if slot is None and self._make_room(account, slot_bytes, kept):
                    slot = self._free(slot_bytes)
        if slot is None:
            account.counts.refused += 1
        else:
            self.accounts.stored += slot_bytes
        return slot

    def _free(self, slot_bytes: int) -> SlotRef | None:
        slot = self.slots.take(slot_bytes)
        return self.slots.take(slot_bytes) if slot is None and self._cut_one(slot_bytes) else slot

    def _cut_one(self, slot_bytes: int) -> bool:
        extent = self.slots.any_uncut()
        if extent is None:
            return False
        self.cut(extent, slot_bytes)
        self.slots.cut(extent, slot_bytes)
        return True

    # --- whose chunk goes ------------------------------------------------------------------------------

    def _fit_quota(self, account: Account, slot_bytes: int) -> bool:
        """Make the requester fit into its own quota, by its own chunks alone."""
        if not account.over_quota(slot_bytes):
            return True
        quota = account.rule.quota
        if quota is None or account.used - account.evictable + slot_bytes > quota:
            return False
        while account.over_quota(slot_bytes):
            own = account.victim(slot_bytes) or account.coldest() or account.coldest(kept=True)
            if own is None:  # all of it is needed by chunks that are pinned
                return False
            self._evict(own, account, "quota")
        return True

    def _make_room(self, requester: Account, slot_bytes: int, kept: bool) -> bool:
        """Evict what is fairest to evict for a slot of this size; False if nothing is. `kept`: among what is only
        kept softly."""
        loss = self._entry_to_lose(requester, slot_bytes, kept)
        colder_than = self._coldness(loss.entry) if loss is not None and loss.entry is not None else None
        if not (kept and loss):
            loss = self._extent_to_lose(requester, slot_bytes, colder_than, kept) or loss
        if loss is None:
            return False
        if loss.extent is not None:
            for entry in self.residents.of(loss.extent.id):
                self._evict(entry, requester)
            assert loss.extent.used == 0, "an extent that nothing holds is empty once its entries are evicted"
        elif loss.entry is not None:
            self._evict(loss.entry, requester)
        self._pay(requester, loss.price)
        return True

    def _coldness(self, victim: Entry) -> int:
        """Sizes compete by recency, so capacity follows the traffic an extent at a time. Policies other than recency
        may choose a victim that was used just now: then its size is as cold as its coldest extent."""
        own = (e.last_used for e in self.slots.extents.values() if e.slot_bytes == victim.slot_bytes)
        return min(victim.stamp, *own)

    def _evict(self, entry: Entry, requester: Account, reason: str = "evicted") -> None:
        """Evict an entry, after what can't be served without it."""
        if entry.state is not SlotState.COMMITTED:
            return  # it went with another one
        assert entry.account is not None
        for dependent in list(self.policies.lineage.dependents(entry)):
            if self._goes_along(dependent, entry):
                self._evict(dependent, requester, reason)
        entry.account.policy.evicted(entry)
        entry.account.counts.evicted += 1
        if entry.account is not requester:
            entry.account.counts.suffered += 1
            requester.counts.caused += 1
        self.evict(entry, reason)

    def _goes_along(self, dependent: Entry, entry: Entry) -> bool:
        same = dependent.account is entry.account and (dependent in self.kept) <= (entry in self.kept)
        return same and dependent.pins == 0

    def _pay(self, requester: Account, price: int) -> None:
        """The requester gives up `price` bytes of its own: what it took from others must not make it grow."""
        until = requester.used - price
        while requester.used > until:
            own = requester.coldest() or requester.coldest(kept=True)
            if own is None:  # all that is left is needed by chunks that are pinned
                return
            self._evict(own, requester)

    def _entry_to_lose(self, requester: Account, slot_bytes: int, kept: bool) -> Loss | None:
        for account in (*self.accounts.beyond_quota(), *self.accounts.dormant(self.slots.total_bytes)):
            victim = account.victim(slot_bytes, kept) if account.can_lose(slot_bytes) else None
            if victim is not None:
                return Loss(victim)
        level = requester.level_with(slot_bytes)
        bartering = False
        for account in self.accounts.highest_first():
            if not bartering and (account is requester or account.level <= level):
                own = requester.victim(slot_bytes, kept)
                if own is not None:
                    return Loss(own)
                bartering = True
            if account is requester or not account.can_lose(slot_bytes):
                continue
            victim = account.victim(slot_bytes, kept)
            if victim is not None and bartering:
                return Loss(victim, price=slot_bytes) if requester.evictable >= slot_bytes else None
            if victim is not None:
                return Loss(victim)
        return None

    def _extent_to_lose(self, requester: Account, slot_bytes: int, colder_than: int | None, kept: bool) -> Loss | None:
        """The least recently used extent of another size that nothing holds and whose loss breaks no guarantee;
        walks extents, not entries. With `colder_than` it must be colder as a whole than that."""
        movable = [
            extent
            for extent in self.slots.extents.values()
            if extent.slot_bytes not in (0, slot_bytes)
            and not self.busy[extent.id]
            and (kept or not self.kept_in[extent.id])
            and (colder_than is None or extent.last_used < colder_than)
        ]
        for extent in sorted(movable, key=lambda extent: extent.last_used):
            price = self._price(requester, extent, slot_bytes)
            if price is not None:
                return Loss(extent=extent, price=price)
        return None

    def _price(self, requester: Account, extent: Extent, slot_bytes: int) -> int | None:
        """What the requester gives up for an extent: as much as it takes from tenants who stand no higher than it;
        None if it may not have the extent, or can't pay."""
        level = requester.level_with(slot_bytes)
        dormant = self.accounts.dormant(self.slots.total_bytes)
        price = own = 0
        for account, size in self._tenants_in[extent.id].items():
            if account is requester:
                own = size
            elif not account.can_lose(size):
                return None
            elif account.level <= level and account not in dormant:
                price += size
        return price if price <= requester.evictable - own else None

    # --- what lives where ------------------------------------------------------------------------------

    def settle(self, entry: Entry) -> None:
        """`entry` lives in its slot now, at its tenant's expense, and counts as busy until it is `released`."""
        entry.account = self.accounts.of(entry.tenant)
        self.residents.put(entry)
        self.busy[entry.slot.extent] += 1
        self._charge(entry.account, entry.slot.extent, entry.slot_bytes)

    def belongs_to(self, entry: Entry, tenant: str) -> None:
        """A pinned entry turns out to be another tenant's: who it is charged to changes."""
        assert entry.account is not None and entry.pins > 0
        entry.tenant = tenant
        if entry.account is not (account := self.accounts.of(tenant)):
            self._discharge(entry.account, entry.slot.extent, entry.slot_bytes)
            entry.account.policy.forget(entry)
            entry.account = account
            self._charge(account, entry.slot.extent, entry.slot_bytes)

    def hold_slot(self, slot: SlotRef, tenant: str = "") -> None:
        """A slot without an entry (quarantine) keeps its extent from being moved, and counts as its tenant's."""
        account, size = self.accounts.of(tenant), self.slots.extents[slot.extent].slot_bytes
        self.busy[slot.extent] += 1
        self.held[slot] = account, size
        self._charge(account, slot.extent, size)

    def drop_slot(self, slot: SlotRef) -> None:
        """A quarantined slot is free again."""
        account, size = self.held.pop(slot)
        self.busy[slot.extent] -= 1
        self._discharge(account, slot.extent, size)
        self.slots.give_back(slot)

    def released(self, entry: Entry) -> None:
        """Nobody pins `entry` any more: it may be evicted, and was just used."""
        self.busy[entry.slot.extent] -= 1
        self.stamp += 1
        entry.stamp = self.stamp
        self.slots.extents[entry.slot.extent].last_used = self.stamp
        account = self._account(entry)
        account.offer(entry, kept=entry in self.kept)
        self.accounts.active(account)

    def pinned(self, entry: Entry) -> None:
        """Somebody needs `entry`: it can't be evicted."""
        self.busy[entry.slot.extent] += 1
        self._account(entry).withhold(entry, kept=entry in self.kept)

    def pinned_all(self, entries: Sequence[Entry]) -> None:
        """`pinned` for many entries."""
        busy, kept = self.busy, self.kept
        for entry in entries:
            busy[entry.slot.extent] += 1
            account = entry.account
            assert account is not None
            account.withhold(entry, kept=entry in kept)

    def keep(self, entry: Entry) -> None:
        """From now on `entry` is taken only when nothing else is left. It must not be kept already."""
        if entry.pins == 0:
            self._account(entry).withhold(entry, kept=False)
            self._account(entry).offer(entry, kept=True)
        self.kept.add(entry)
        self.kept_in[entry.slot.extent] += 1

    def unkeep(self, entry: Entry) -> None:
        """`entry` is worth as much as any other again. It must be kept."""
        self.kept.remove(entry)
        self.kept_in[entry.slot.extent] -= 1
        if entry.pins == 0:
            self._account(entry).withhold(entry, kept=True)
            self._account(entry).offer(entry, kept=False)

    def demote(self, entry: Entry) -> None:
        """`entry` is the first to go, if it may go at all."""
        entry.stamp = 0
        self._account(entry).policy.demote(entry)

    def leave(self, entry: Entry, *, keep_slot: bool = False) -> None:
        """`entry` is gone. Its slot is free, or with `keep_slot` stays held (quarantine)."""
        slot, account = entry.slot, self._account(entry)
        self.residents.drop(entry)
        kept = entry in self.kept
        if entry.pins == 0:
            account.withhold(entry, kept=kept)
            self.busy[slot.extent] += 1
        account.policy.forget(entry)
        if kept:
            self.kept.remove(entry)
            self.kept_in[slot.extent] -= 1
        if keep_slot:
            self.held[slot] = account, entry.slot_bytes
            return
        self.busy[slot.extent] -= 1
        self._discharge(account, slot.extent, entry.slot_bytes)
        self.slots.give_back(slot)

    @staticmethod
    def _account(entry: Entry) -> Account:
        assert entry.account is not None, "whatever lives in the pool lives at somebody's expense"
        return entry.account

    def _charge(self, account: Account, extent: int, size: int) -> None:
        self.accounts.charge(account, size)
        self._tenants_in[extent][account] += size

    def _discharge(self, account: Account, extent: int, size: int) -> None:
        self.accounts.discharge(account, size)
        here = self._tenants_in[extent]
        here[account] -= size
        if not here[account]:
            del here[account]

    # --- walking ---------------------------------------------------------------------------------------

    def walk(self) -> Iterator[list[Entry]]:
        """See `Residents.walk`."""
        return self.residents.walk()

    def page(self, cursor: int, slots: int) -> Page:
        """See `Residents.page`."""
        return self.residents.page(cursor, slots)
