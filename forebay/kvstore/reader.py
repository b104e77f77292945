"""Lookups that take time: tiers are asked, promotions awaited, adopted chunks read before they are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forebay.kvstore.cascade import Cascade, Load
from forebay.kvstore.core import Client, StoreCore
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState
from forebay.kvstore.lookup import (
    Match,
    Pinned,
    Place,
    Promotions,
    Prompt,
    Room,
    match,
    offer,
    pin,
    pin_places,
    place_promotions,
    promotions,
    queries,
)
from forebay.kvstore.said import Said
from forebay.tiers.base import LoadJob, LookupResult, Query, StoreJob

TIER_ANSWER_S, TIER_ANSWER_SHARE = 1.0, 0.1
"""How long one tier may take to say what it has, or this share of the time that there is if that is more: whoever is
patient would rather wait for a slow answer than do without that tier."""

PLANS_MAX = 4
"""How often a lookup plans anew after loads that failed, within its deadline."""

VOUCHED_S, VOUCHED_MAX = 10.0, 4096
"""How long, and of how many chunks, it is remembered that an alarm about them was false."""


class TierHandle(Protocol):
    """What the daemon needs of a tier's process; `forebay.tiers.host.TierHost` is the real one."""

    async def lookup(self, queries: Sequence[Query], timeout_s: float) -> list[LookupResult]:
        """One result a query; `retry` for all where the tier doesn't answer in time."""

    def store(self, jobs: Sequence[StoreJob]) -> None:
        """Queue stores."""

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Queue loads."""


@dataclass(frozen=True, slots=True)
class Brought:
    """What came of a question to the tiers: what is `pinned` now, which tier brought which of it, whether more is still
    under way (`pending`), and which of the places that were asked for nobody has."""

    pinned: Pinned
    origins: Mapping[Entry, str]
    pending: bool = False
    gone: Sequence[Place] = ()


NOTHING = Brought(Pinned(0, 0, []), {})
"""For a client that has gone."""


class Reader:
    """Finds, promotes, verifies and pins. Lives on the daemon's loop; reading bytes happens on threads."""

    def __init__(
        self,
        core: StoreCore,
        cascade: Cascade,
        tiers: Mapping[str, TierHandle],
        intact: Callable[[Entry], bool],
    ) -> None:
        self._core, self._cascade, self._tiers, self._intact = core, cascade, tiers, intact
        self._arrivals: dict[Load, asyncio.Event] = {}
        self._checks: dict[Entry, asyncio.Task[None]] = {}
        # Until when: chunks that somebody called damaged, and that are not.
        self._vouched: dict[Entry, float] = {}

    def figures(self) -> dict[str, float]:
        """Gauges: chunks being read to be checked, at most those of the table; and those that were called damaged and
        are not, at most VOUCHED_MAX."""
        return {"host.checks_running": len(self._checks), "host.alarms_remembered": len(self._vouched)}

    def at_once(self, client: Client, prompt: Prompt, deadline_ms: int) -> Pinned | None:
        """The whole answer, if it needs neither a tier nor a check; else None. Or which tokens it takes first."""
        found = match(self._core, prompt)
        asks_tiers = deadline_ms > 0 and bool(self._tiers) and found.hit() < prompt.longest
        wants = found.wants(for_tiers=asks_tiers)
        if wants is not None:
            return Pinned(0, 0, [], wants)
        if asks_tiers:
            return None
        if self._unverified(found):
            return None
        return pin(self._core, client, found)

    async def lookup(
        self, client: Client, prompt: Prompt, deadline_ms: int, wanted: Callable[[], bool]
    ) -> Brought:
        """The answer after tiers and checks. `wanted` says whether the client is still there."""
        until = asyncio.get_running_loop().time() + deadline_ms / 1000
        found = match(self._core, prompt)
        loads: list[Load] = []
        held: list[Entry] = []
        try:
            if deadline_ms > 0 and self._tiers and found.hit() < prompt.longest:
                await self._promote_all(found, until, loads, held, Said())
            await self._verify(prompt)
            pending = any(not load.done for load in loads)
            if not wanted():
                return NOTHING
            pinned = pin(self._core, client, match(self._core, prompt))
            return Brought(pinned, _origins(loads), pending)
        finally:
            self._let_go(loads, held)

    async def survey(self, prompt: Prompt, deadline_ms: int) -> Match:
        """What memory has and tiers offer of a prompt. Nothing is brought, nothing promised."""
        found = match(self._core, prompt)
        if self._tiers and found.hit() < prompt.longest:
            await self._ask(found, asyncio.get_running_loop().time() + deadline_ms / 1000, Said())
        return found

    async def fetch(
        self, client: Client, prompt: Prompt, places: Sequence[Place], deadline_ms: int, wanted: Callable[[], bool],
        aside: int = 0,
    ) -> Brought:  # fmt: skip
        """As `lookup`, for single places, whether or not they add up to a hit; into what was set `aside`, if it is for
        them."""
        until = asyncio.get_running_loop().time() + deadline_ms / 1000
        found = match(self._core, prompt, places)
        loads: list[Load] = []
        held: list[Entry] = []
        said = Said()
        try:
            if deadline_ms > 0 and self._tiers and found.lacks_any():
                await self._promote_all(found, until, loads, held, said, Room(client, aside))
            for entry in self._there(match(self._core, prompt, places)):
                if not entry.verified:
                    await self.check(entry)
            pending = any(not load.done for load in loads)
            if not wanted():
                return NOTHING
            found = match(self._core, prompt, places)
            pinned = pin_places(self._core, client, found)
            if not all(entry.verified for entry in pinned.entries):  # doubted this very moment
                self._core.release(client, [pinned.lease])
                pinned = Pinned(0, 0, [])
            return Brought(pinned, _origins(loads), pending, said.gone(found, self._tiers))
        finally:
            self._let_go(loads, held)

    def _there(self, found: Match) -> list[Entry]:
        longest = found.prompt.longest
        entries = [found.entry(*place, longest) for place in found.only or () if found.has(*place, longest)]
        return [entry for entry in entries if entry is not None]

    async def _promote_all(
        self, found: Match, until: float, loads: list[Load], held: list[Entry], said: Said, room: Room | None = None
    ) -> None:
        """Start and await the loads of the best length; of the next best, if a tier can't keep what it said. What this
        pins is in `loads` and `held` at once, so that the caller lets go of it whatever happens."""
        for _ in range(PLANS_MAX):
            new = await self._promote(found, until, loads, held, said, room)
            if not said.loads_failed(new) or asyncio.get_running_loop().time() >= until:
                return
            found = match(self._core, found.prompt, found.only)
            served = found.hit() >= found.prompt.longest if found.only is None else not found.lacks_any()
            if served:
                return

    async def _promote(
        self, found: Match, until: float, loads: list[Load], held: list[Entry], said: Said, room: Room | None
    ) -> list[Load]:
        """One plan: ask the tiers, load, wait. Returns its loads; those that have not ended are still under way."""
        await self._ask(found, until, said)
        # The table may have changed while tiers answered.
        fresh = match(self._core, found.prompt, found.only)
        fresh.offers = found.offers
        owners = {name: traffic.owner for name, traffic in self._cascade.tiers.items()}
        if fresh.only is None:
            plan = promotions(self._core, fresh, owners)
        else:
            plan = place_promotions(self._core, fresh, owners, room)
        held.extend(plan.held)
        started = self._start(plan, until, loads)
        await self._wait(started, until)
        return started

    async def _ask(self, found: Match, until: float, said: Said) -> None:
        """Note what tiers offer, one after the other, of what is missing."""
        loop = asyncio.get_running_loop()
        for name, tier in self._tiers.items():
            asked = queries(found)
            missing = [(place, query) for place, query in asked if place not in found.offers]
            if not missing:
                break
            left = max(until - loop.time(), 0)
            timeout = min(left, max(TIER_ANSWER_S, TIER_ANSWER_SHARE * left))
            self._core.counters.add(f"tier.{name}.asked", len(missing))
            places = [place for place, _ in missing]
            answers = await tier.lookup([query for _, query in missing], timeout)
            results = [
                said.answered(found, name, place, answer) for place, answer in zip(places, answers, strict=True)
            ]
            nonsense = offer(found, name, places, results)
            if nonsense:
                self._core.counters.add(f"tier.{name}.impossible_answers", nonsense)

    def _start(self, plan: Promotions, until: float, loads: list[Load]) -> list[Load]:
        """Start what a plan needs; returns all loads that it waits for."""
        left_s = until - asyncio.get_running_loop().time()
        jobs = [self._cascade.load_job(new, left_s) for new in plan.new]
        wanted = [new.entry for new in plan.new] + plan.running
        started = [self._cascade.loading[entry] for entry in wanted if entry in self._cascade.loading]
        new_loads = [load for load in started if load not in loads]
        loads.extend(new_loads)
        for load in new_loads:
            load.waiters += 1
            self._arrivals.setdefault(load, asyncio.Event())
        for name, tier in self._tiers.items():
            batch = [job for job_tier, job in jobs if job_tier == name]
            if batch:
                tier.load(batch)
        return started

    async def _wait(self, loads: list[Load], until: float) -> None:
        for load in loads:
            left = until - asyncio.get_running_loop().time()
            if load.done or left <= 0:
                continue
            try:
                await asyncio.wait_for(self._arrivals[load].wait(), left)
            except TimeoutError:
                self._core.counters.add(f"tier.{load.tier}.late")

    def arrived(self, load: Load) -> None:
        """A promotion has ended, one way or the other."""
        event = self._arrivals.pop(load, None)
        if event is not None:
            event.set()

    def _let_go(self, loads: list[Load], held: list[Entry]) -> None:
        for load in loads:
            if load.ok:
                self._core.unpin(load.entry)
            elif not load.done:
                load.waiters -= 1
        for entry in held:
            self._core.unpin(entry)

    # --- adopted chunks --------------------------------------------------------------------------------

    def _unverified(self, found: Match) -> list[Entry]:
        return [entry for entry in found.serving(found.hit()) if not entry.verified]

    async def _verify(self, prompt: Prompt) -> None:
        """Read what the answer would serve unread, until nothing of it is."""
        while unread := self._unverified(match(self._core, prompt)):
            for entry in unread:
                await self.check(entry)

    async def check(self, entry: Entry) -> None:
        """Read an adopted chunk once, whoever asks; it is announced, or taken out."""
        await asyncio.shield(self.check_soon(entry))

    def doubt(self, entry: Entry) -> None:
        """A reader says that a chunk's bytes are wrong. It doesn't go on its word alone: it is read again before anyone
        sees it. A false alarm isn't heard again soon: others would wait for the reading each time."""
        if self._core.clock() < self._vouched.get(entry, 0.0):
            self._core.counters.add("host.alarms_unheard")
            return
        entry.verified = False
        self.check_soon(entry)

    def _vouch(self, entry: Entry) -> None:
        self._vouched.pop(entry, None)
        self._vouched[entry] = self._core.clock() + VOUCHED_S
        while len(self._vouched) > VOUCHED_MAX:
            del self._vouched[next(iter(self._vouched))]

    def check_soon(self, entry: Entry) -> asyncio.Task[None]:
        """Start reading a chunk, unless somebody has started already."""
        running = self._checks.get(entry)
        if running is None:
            running = asyncio.create_task(self._check(entry))
            self._checks[entry] = running
        return running

    async def _check(self, entry: Entry) -> None:
        try:
            if entry.state is SlotState.COMMITTED and not entry.verified:
                self._core.pin(entry)
                try:
                    intact = await asyncio.to_thread(self._intact, entry)
                finally:
                    self._core.unpin(entry)
                if intact and entry.announced:  # it had been read before: the alarm was a false one
                    self._vouch(entry)
                self._core.verified(entry, intact)
        finally:
            del self._checks[entry]


def _origins(loads: Sequence[Load]) -> dict[Entry, str]:
    """Which tier brought which chunk."""
    return {load.entry: load.tier for load in loads if load.ok}
