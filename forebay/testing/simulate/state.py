"""What the checkers look at inside of a daemon, in one place: where the store's parts keep what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.kvstore.core import StoreCore
from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.service import StoreService


@dataclass(frozen=True, slots=True)
class Evictable:
    """Entries that may be evicted, and how many the accounts say there are."""

    entries: list[Entry]
    counted: int


def residents(core: StoreCore) -> Iterator[Entry]:
    """Everything that lives in a slot, also what is out of sight and still read."""
    for page in core.place.walk():
        yield from page


def quarantined(core: StoreCore) -> list[SlotRef]:
    """Slots without an entry that somebody may still be writing."""
    return [slot for owner in core.quarantine for slot in core.quarantine.slots_of(owner)]


def set_aside(core: StoreCore) -> list[SlotRef]:
    """Slots without an entry that are somebody's for what isn't there yet."""
    return list(core.aside.slots)


def evictable(core: StoreCore) -> Evictable:
    """What may be evicted."""
    accounts = list(core.place.accounts)
    entries = [entry for account in accounts for policy in (account.policy, account.kept) for entry in policy]
    return Evictable(entries, core.place.accounts.evictable_entries)


def charged(core: StoreCore) -> int:
    """Bytes at all tenants' expense."""
    return sum(account.used for account in core.place.accounts)


def fingerprint(core: StoreCore) -> tuple[int, ...]:
    """Changes with every pin, lease, reservation and promotion; what moves a slot shows in the pool's writes."""
    place = core.place
    return (
        place.stamp, place.accounts.evictable_entries, len(core.leases), core.reserved_bytes, core.promoting_bytes,
        core.quarantined_bytes, len(core.pins), core.pins.hard_bytes, core.aside.moves,
    )  # fmt: skip


def leased(service: StoreService) -> Iterator[Entry]:
    """What the connections' leases hold, as often as they do."""
    for connection in service.connections:
        if connection.client is not None:
            for hold in connection.client.leases.values():
                yield from (entry for entry in hold.entries if entry is not None)
