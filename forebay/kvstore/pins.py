"""What somebody wants kept: soft pins, hard pins, retention. Who, until when, and within which budget. Pure.

    soft       goes only when everything that nobody keeps is gone
    hard       doesn't go; all hard pins together have a budget
    retained   as soft; a request asked for it, and its tenant has a budget for all that it asked for

A chunk has as many keeps as there are owners who want it. These keeps live beside the entries: nearly none has one.
They end with their time, when their owner ends them, or with the chunk (cleared, found corrupt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from forebay.errors import RequestRefused
from forebay.kvstore.deadlines import Deadlines
from forebay.kvstore.entry import Entry
from forebay.kvstore.limits import Limits
from forebay.kvstore.placement import Placement

Kind = Literal["soft", "hard", "retained"]


class Owner(NamedTuple):
    """Who keeps, and how: budgets and totals go by this."""

    kind: Kind
    by: str


@dataclass(slots=True, eq=False)
class Keep:
    """One owner's wish for one chunk. `until` is the store's clock."""

    entry: Entry
    owner: Owner
    until: float
    bucket: int = 0


@dataclass(slots=True)
class Total:
    """What one owner keeps: chunks, the bytes of their slots, and the end of what was kept last."""

    chunks: int = 0
    bytes: int = 0
    until: float = 0.0


class Pins:
    """All keeps of a store. `pin` and `unpin` are the core's, for hard pins alone."""

    def __init__(
        self, place: Placement, limits: Limits, pin: Callable[[Entry], None], unpin: Callable[[Entry], None]
    ) -> None:
        self._place, self._limits = place, limits
        self._pin, self._unpin = pin, unpin
        self._keeps: dict[Entry, list[Keep]] = {}
        self._deadlines: Deadlines[Keep] = Deadlines(1.0)
        self.totals: dict[Owner, Total] = {}
        self.hard_bytes = 0

    def __len__(self) -> int:
        """How many keeps there are."""
        return len(self._deadlines)

    def of(self, entry: Entry) -> Sequence[Keep]:
        """Who keeps this chunk."""
        return self._keeps.get(entry, ())

    def is_hard(self, entry: Entry) -> bool:
        """Does somebody keep it whatever happens?"""
        return any(keep.owner.kind == "hard" for keep in self._keeps.get(entry, ()))

    # --- budgets ---------------------------------------------------------------------------------------

    @property
    def hard_budget(self) -> int:
        """Bytes that all hard pins together may keep."""
        return int(self._limits.pin_share * self._place.slots.total_bytes)

    @property
    def retain_budget(self) -> int:
        """Bytes that one tenant may retain."""
        return int(self._limits.retain_share * self._place.slots.total_bytes)

    def pin(self, entries: Sequence[Entry], owner: Owner, until: float) -> None:
        """Keep all of these for an owner until then, or none. Renews what the owner keeps already.

        Raises RequestRefused: `budget` for hard pins beyond theirs, `limits` for more keeps than the table holds.
        """
        new = [entry for entry in dict.fromkeys(entries) if self._find(entry, owner) is None]
        if len(self) + len(new) > self._limits.keeps or self._too_many_owners(owner):
            raise RequestRefused("limits", "too much is pinned already; unpin some of it, or wait until it ends")
        if owner.kind == "hard":
            wanted = sum(entry.slot_bytes for entry in new if not self.is_hard(entry))
            if self.hard_bytes + wanted > self.hard_budget:
                raise RequestRefused(
                    "budget",
                    f"hard pins hold {self.hard_bytes} of {self.hard_budget} bytes, these chunks take {wanted} more: "
                    "unpin others, pin softly, or start the store with a larger --pin-budget",
                )
        for entry in entries:
            self._set(entry, owner, until)

    def retain(self, entry: Entry, tenant: str, until: float) -> bool:
        """Keep a chunk for a tenant, within its budget; never for a shorter time than before."""
        owner = Owner("retained", tenant)
        known = self._find(entry, owner)
        if known is None:
            held = self.totals.get(owner, Total()).bytes
            full = len(self) >= self._limits.keeps or self._too_many_owners(owner)
            if full or held + entry.slot_bytes > self.retain_budget:
                return False
        self._set(entry, owner, max(until, known.until if known else 0.0))
        return True

    def _too_many_owners(self, owner: Owner) -> bool:
        return owner not in self.totals and len(self.totals) >= self._limits.keep_owners

    # --- one keep --------------------------------------------------------------------------------------

    def _find(self, entry: Entry, owner: Owner) -> Keep | None:
        return next((keep for keep in self._keeps.get(entry, ()) if keep.owner == owner), None)

    def _set(self, entry: Entry, owner: Owner, until: float) -> None:
        keep = self._find(entry, owner)
        if keep is None:
            keep = self._add(entry, owner)
        else:
            self._deadlines.drop(keep, keep.bucket)
        keep.until, keep.bucket = until, self._deadlines.set(keep, until)
        self.totals[owner].until = max(self.totals[owner].until, until)

    def _add(self, entry: Entry, owner: Owner) -> Keep:
        keeps = self._keeps.setdefault(entry, [])
        if owner.kind == "hard" and not self.is_hard(entry):
            self.hard_bytes += entry.slot_bytes
            self._pin(entry)
        if not keeps:
            self._place.keep(entry)
        keep = Keep(entry, owner, 0.0)
        keeps.append(keep)
        total = self.totals.setdefault(owner, Total())
        total.chunks += 1
        total.bytes += entry.slot_bytes
        return keep

    def _remove(self, keep: Keep) -> None:
        """Forget a keep whose deadline is forgotten already."""
        entry, total = keep.entry, self.totals[keep.owner]
        keeps = self._keeps[entry]
        keeps.remove(keep)
        total.chunks -= 1
        total.bytes -= entry.slot_bytes
        if not total.chunks:
            del self.totals[keep.owner]
        if not keeps:
            del self._keeps[entry]
            self._place.unkeep(entry)
        if keep.owner.kind == "hard" and not self.is_hard(entry):
            self.hard_bytes -= entry.slot_bytes
            self._unpin(entry)

    # --- ends ------------------------------------------------------------------------------------------

    def unpin(self, entries: Iterable[Entry], by: str) -> int:
        """End an owner's soft and hard pins of these chunks; how many chunks it had pinned."""
        count = 0
        for entry in entries:
            mine = [keep for keep in self.of(entry) if keep.owner.by == by and keep.owner.kind != "retained"]
            for keep in mine:
                self._deadlines.drop(keep, keep.bucket)
                self._remove(keep)
            count += bool(mine)
        return count

    def forget(self, entry: Entry) -> None:
        """The chunk is going."""
        for keep in list(self._keeps.get(entry, ())):
            self._deadlines.drop(keep, keep.bucket)
            self._remove(keep)

    def inherit(self, old: Entry, new: Entry) -> None:
        """`new` has all that `old` had and more: what was kept softly of `old` is kept of `new`."""
        for keep in list(self.of(old)):
            if keep.owner.kind == "soft":
                self._set(new, keep.owner, keep.until)
            elif keep.owner.kind == "retained":
                self._deadlines.drop(keep, keep.bucket)
                self._remove(keep)  # its bytes make room in the budget
                self.retain(new, keep.owner.by, keep.until)

    def expire_one(self, now: float) -> bool:
        """End a keep whose time is over; False if there is none."""
        keep = self._deadlines.take(now)
        if keep is None:
            return False
        self._remove(keep)
        return True
