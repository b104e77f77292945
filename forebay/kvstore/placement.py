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
from itertools import islice

from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.policies.registry import Policies
from forebay.kvstore.residents import Page, Residents
from forebay.kvstore.slots import Extent, SlotAllocator
from forebay.kvstore.tenancy import ACCOUNTS_MAX, Account, Accounts, TenantRule

HOPELESS_MAX = 1024
"""For how many pairs of tenant and size it is remembered that they found no room."""

EXTENTS_TRIED = 4
"""Of how many of the coldest extents it is looked up what would go with them."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What would be evicted for a requester: `victim` and what goes with it, deepest chunks first. `price` bytes of its
    own the requester has to give up for that."""

    victim: Entry
    entries: Sequence[Entry]
    price: int


@dataclass(frozen=True, slots=True)
class Request:
    """Who needs a slot of which size, and the level at which it stands with that. Of `free` tenants everybody may take:
    they are over their quota, or dormant. `kept`: what is kept softly may go, too."""

    account: Account
    slot_bytes: int
    level: float
    free: Sequence[Account]
    kept: bool


@dataclass
class Placement:
    """Slots, and which of them may be taken from whom.

    `evict` is the core's: it must remove the entry everywhere and give its slot back. `cut` writes an
    extent's new slot size into the extent, before any of its slots is used.

    `kept` entries (soft pins, retention) are taken only when nothing else is left; what is `pinned` never.
    `held` are slots that are in quarantine or set aside, and at whose expense.

    `dependents` tells which chunks can't serve a hit without a chunk: they go with it, or it stays.
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
        # Who found no room for which size since anything last changed that might give some. Finding out may take a
        # walk over everything that can't go, which a batch of stores must not take for each of its chunks.
        self._hopeless: set[tuple[Account, int]] = set()

    def add_extent(self, extent: int, size: int) -> None:
        """Take an uncut extent into the budget."""
        self.may_have_room()
        self.slots.add_extent(extent, size)
        self.residents.add_extent(extent)
        self.busy[extent] = self.kept_in[extent] = 0

    def take(self, slot_bytes: int, tenant: str = "") -> SlotRef | None:
        """A slot of this size for a tenant, evicting if need be; None if nothing may be evicted. May call `evict`."""
        account = self.accounts.of(tenant)
        if (account, slot_bytes) in self._hopeless:
            account.counts.refused += 1
            return None
        slot = None
        # A chunk's `extra` may make its slot larger than any of its namespace's: then nothing goes for it.
        if self.slots.fits(slot_bytes) and self._fit_quota(account, slot_bytes):
            slot = self._free(slot_bytes)
            for kept in (False, True):
                if slot is None and self._make_room(account, slot_bytes, kept):
                    slot = self._free(slot_bytes)
        if slot is None:
            account.counts.refused += 1
            if len(self._hopeless) < HOPELESS_MAX:
                self._hopeless.add((account, slot_bytes))
        else:
            self.accounts.stored += slot_bytes
            self.may_have_room()  # for others: levels have changed
        return slot

    def may_have_room(self) -> None:
        """Something has changed that might let go what could not before."""
        self._hopeless.clear()

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
            victim = account.victim(slot_bytes) or account.coldest() or account.coldest(kept=True)
            if victim is None or not self._give_up(victim, account, "quota"):
                return False
        return True

    def _make_room(self, account: Account, slot_bytes: int, kept: bool) -> bool:
        """Evict what is fairest to evict for a slot of this size; False if nothing is. `kept`: among what is only
        kept softly."""
        free = [*self.accounts.beyond_quota(), *self.accounts.dormant(self.slots.total_bytes)]
        request = Request(account, slot_bytes, account.level_with(slot_bytes), free, kept)
        loss = self._entry_to_lose(request)
        if loss is None or not kept:
            loss = self._extent_to_lose(request, None if loss is None else self._coldness(loss.victim)) or loss
        if loss is None:
            return False
        for entry in loss.entries:
            self._evict(entry, account)
        self._pay(account, loss.price)
        return True

    def _coldness(self, victim: Entry) -> int:
        """Sizes compete by recency, so capacity follows the traffic an extent at a time. Policies other than recency
        may choose a victim that was used just now: then its size is as cold as its coldest extent."""
        own = (e.last_used for e in self.slots.extents.values() if e.slot_bytes == victim.slot_bytes)
        return min(victim.stamp, *own)

    def evict_own(self, entry: Entry) -> SlotRef:
        """`entry`, which nobody pins, makes room for another chunk of the same size. What needs it stays: it is read
        by its place. No quota counts here: that room was promised."""
        self._evict(entry, self._account(entry))
        slot = self._free(entry.slot_bytes)
        assert slot is not None, "one is free now"
        self.accounts.stored += entry.slot_bytes
        self.may_have_room()
        return slot

    def _evict(self, entry: Entry, requester: Account, reason: str = "evicted") -> None:
        account = self._account(entry)
        account.policy.evicted(entry)
        account.counts.evicted += 1
        if account is not requester:
            account.counts.suffered += 1
            requester.counts.caused += 1
        self.evict(entry, reason)

    def _give_up(self, victim: Entry, owner: Account, reason: str) -> bool:
        """A tenant's own chunk goes, with what needs it; False if something of that can't go."""
        entries = self._with_dependents([victim], kept=True)
        if entries is None or any(entry.account is not owner for entry in entries):
            return False
        for entry in entries:
            self._evict(entry, owner, reason)
        return True

    def _pay(self, account: Account, price: int) -> None:
        """The requester gives up `price` bytes of its own, as far as it can: what it took from others must not make
        it grow."""
        until = account.used - price
        while account.used > until:
            own = account.coldest() or account.coldest(kept=True)
            if own is None or not self._give_up(own, account, "evicted"):
                return  # all that is left is needed by chunks that are pinned

    def _entry_to_lose(self, request: Request) -> Loss | None:
        """The victim in a slot of this size whose loss is fairest."""
        for account in self._in_turn(request):
            if account is request.account or account.can_lose(request.slot_bytes):
                victim = account.victim(request.slot_bytes, request.kept)
                loss = None if victim is None else self._loss([victim], request)
                if loss is not None:
                    return loss
        return None

    def _in_turn(self, request: Request) -> Iterator[Account]:
        """Whom to take from: who is free to be taken from, who stands higher, oneself, others for a price."""
        yield from request.free
        own = False
        for account in self.accounts.highest_first():
            if not own and account.level <= request.level:
                own = True
                yield request.account
            if account is not request.account:
                yield account
        if not own:
            yield request.account

    def _extent_to_lose(self, request: Request, colder_than: int | None) -> Loss | None:
        """The least recently used extent of another size that nothing holds and whose loss breaks no guarantee;
        walks extents, not entries. With `colder_than` it must be colder as a whole than that."""
        movable = [
            extent
            for extent in self.slots.extents.values()
            if extent.slot_bytes not in (0, request.slot_bytes)
            and not self.busy[extent.id]
            and (request.kept or not self.kept_in[extent.id])
            and (colder_than is None or extent.last_used < colder_than)
        ]
        movable.sort(key=lambda extent: extent.last_used)
        for extent in islice((e for e in movable if self._may_lose(e, request.account)), EXTENTS_TRIED):
            loss = self._loss(self.residents.of(extent.id), request)
            if loss is not None:
                return loss
        return None

    def _may_lose(self, extent: Extent, requester: Account) -> bool:
        tenants = self._tenants_in[extent.id].items()
        return all(account is requester or account.can_lose(size) for account, size in tenants)

    def _loss(self, victims: Sequence[Entry], request: Request) -> Loss | None:
        """What goes with `victims`, and what the requester gives up for it: as much as it takes from tenants who stand
        no higher than it. None if a guarantee would break, if something of it can't go, or if that can't be paid."""
        entries = self._with_dependents(victims, kept=request.kept)
        if entries is None:
            return None
        sizes: defaultdict[Account, int] = defaultdict(int)
        for entry in entries:
            sizes[self._account(entry)] += entry.slot_bytes
        own, price = sizes.pop(request.account, 0), 0
        for account, size in sizes.items():
            if not account.can_lose(size):
                return None
            price += size if account.level <= request.level and account not in request.free else 0
        return Loss(victims[0], entries, price) if price <= request.account.evictable - own else None

    def _with_dependents(self, victims: Sequence[Entry], *, kept: bool) -> Sequence[Entry] | None:
        """`victims` and all that needs any of them, deepest first; None if something of that is pinned, or is kept
        softly and isn't to go."""
        found, waiting = dict.fromkeys(victims), list(victims)
        while waiting:
            for entry in self.policies.lineage.dependents(waiting.pop()):
                if entry.pins or (entry in self.kept and not kept):
                    return None
                if entry not in found:
                    found[entry] = None
                    waiting.append(entry)
        return sorted(found, key=lambda entry: -entry.start) if len(found) > 1 else list(found)

    # --- what lives where ------------------------------------------------------------------------------

    def settle(self, entry: Entry) -> None:
        """`entry` lives in its slot now, at its tenant's expense, and counts as busy until it is `released`."""
        entry.account = self.accounts.of(entry.tenant)
        self.residents.put(entry)
        self.busy[entry.slot.extent] += 1
        self._charge(entry.account, entry.slot.extent, entry.slot_bytes)

    def belongs_to(self, entry: Entry, tenant: str) -> None:
        """A pinned entry turns out to be another tenant's: who it is charged to changes."""
        self.may_have_room()
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
        """A slot without an entry is free again."""
        self.may_have_room()
        self.take_aside(slot)
        self.slots.give_back(slot)

    def set_aside(self, slot_bytes: int, tenant: str) -> SlotRef | None:
        """`take` for a chunk that isn't there yet."""
        slot = self.take(slot_bytes, tenant)
        if slot is not None:
            self.hold_slot(slot, tenant)
        return slot

    def take_aside(self, slot: SlotRef) -> None:
        """Whoever held a slot without an entry says what becomes of it now."""
        account, size = self.held.pop(slot)
        self.busy[slot.extent] -= 1
        self._discharge(account, slot.extent, size)

    def released(self, entry: Entry) -> None:
        """Nobody pins `entry` any more: it may be evicted, and was just used."""
        self.released_all((entry,))

    def released_all(self, entries: Sequence[Entry]) -> None:
        """`released` for many entries, in their order."""
        self.may_have_room()
        busy, kept, extents, stamp = self.busy, self.kept, self.slots.extents, self.stamp
        last: Account | None = None
        for entry in entries:
            extent = entry.slot.extent
            busy[extent] -= 1
            stamp += 1
            entry.stamp = extents[extent].last_used = stamp
            account = entry.account
            assert account is not None
            account.offer(entry, kept=entry in kept)
            if account is not last:
                self.accounts.active(account)
                last = account
        self.stamp = stamp

    def returned(self, entry: Entry) -> None:
        """Nobody pins `entry` any more, and nobody has used it: it is the first to go, if it may go at all."""
        self.may_have_room()
        self.busy[entry.slot.extent] -= 1
        self._account(entry).offer(entry, kept=entry in self.kept, used=False)

    def coldest(self) -> Entry | None:
        """What goes next if room is needed for no slot size and no tenant in particular, as far as that can be said."""
        free = [*self.accounts.beyond_quota(), *self.accounts.dormant(self.slots.total_bytes)]
        for account in (*free, *self.accounts.highest_first()):
            entry = account.coldest()
            if entry is not None:
                return entry
        return None

    def pinned(self, entry: Entry) -> None:
        """Somebody needs `entry`: it can't be evicted."""
        self.pinned_all((entry,))

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
        self.may_have_room()
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
        self.may_have_room()
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
