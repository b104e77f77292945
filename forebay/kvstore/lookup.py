"""Matching a prompt against the pool and against what tiers offer, and turning the result into pins.

match()      what host memory has, per group and chunk position
queries()    what tiers should be asked for
offer()      what a tier has, where it reaches further
promotions() the loads that the best length needs; entries reserved and pinned
pin()        match again, pin all of it under one lease

place_promotions() and pin_places() do the same for single places, whether or not they add up to a hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from forebay.kvstore.core import Client, StoreCore
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState, header_bytes
from forebay.kvstore.identity import KEY_BYTES, MATCH_UNIT, Namespace, chain, chunk_key
from forebay.kvstore.index import ChunkTable
from forebay.kvstore.layout import needs_all, payload_bytes, round_down
from forebay.kvstore.match import Front, longest_hit, needed_positions, state_bit
from forebay.kvstore.protocol import EXTRA_BYTES_MAX, NewChunk
from forebay.tiers.base import LookupResult, Query

CUTS_MAX = 16
"""At so many lengths a lookup looks for room for what tiers offer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One lookup's question. `keys` are those at the ends of the prompt's chunks, joined (`chunk_keys`); `tokens` are
    known from `tokens_from` on, a chunk's start. What it finds is promised for `lease_s` (0: as usual); what tiers
    bring is at the expense of `tenant`."""

    namespace_id: bytes
    namespace: Namespace
    root: bytes
    tokens: bytes
    keys: bytes
    limit: int
    extra: bytes = b""
    lease_s: float = 0.0
    tenant: str = ""
    tokens_from: int = 0

    @property
    def positions(self) -> int:
        """Chunk positions that the longest allowed hit touches."""
        return -(-self.longest // self.namespace.chunk_tokens)

    @property
    def longest(self) -> int:
        """The limit in whole units, and no longer than the tokens."""
        return min(round_down(max(self.limit, 0), MATCH_UNIT), self.whole)

    @property
    def whole(self) -> int:
        """Tokens in whole units."""
        return self.tokens_from + len(self.tokens) // (4 * MATCH_UNIT) * MATCH_UNIT

    def key_at(self, position: int) -> bytes:
        """Chain key at the token where a chunk of this prompt begins or ends."""
        at = -(-position // self.namespace.chunk_tokens) * KEY_BYTES
        return self.keys[at - KEY_BYTES : at] if position else self.root

    def chunk(self, group: int, position: int) -> NewChunk:
        """The fullest chunk of this prompt at a chunk position."""
        start, end = self.bounds(position)
        tokens = self.tokens_of(start, end)
        return NewChunk(group, self.key_at(end), self.key_at(start), start, tokens, self.extra)

    def tokens_of(self, start: int, end: int) -> bytes:
        """Token ids [start, end), which must be known."""
        assert start >= self.tokens_from, (start, self.tokens_from)
        return self.tokens[4 * (start - self.tokens_from) : 4 * (end - self.tokens_from)]

    def query(self, group: int, position: int) -> Query:
        """What to ask a tier for this position."""
        chunk = self.chunk(group, position)
        key, tokens, whole = chunk.key, chunk.tokens, self.namespace.groups[group].recurrent
        if whole and 4 * (self.longest - chunk.start) < len(tokens):
            # A state behind the longest allowed hit is of no use, one at it is.
            tokens = tokens[: 4 * (self.longest - chunk.start)]
            key = chunk_key(chunk.parent, tokens, self.extra)
        first = chain(chunk.parent, tokens[: 4 * MATCH_UNIT], self.extra)[0]
        return Query(group, key, chunk.parent, tokens, first, whole)

    def bounds(self, position: int) -> tuple[int, int]:
        """Tokens [start, end) of the fullest chunk at a chunk position."""
        start = position * self.namespace.chunk_tokens
        return start, min(start + self.namespace.chunk_tokens, self.whole)


@dataclass(frozen=True, slots=True)
class Offer:
    """A tier's chunk that reaches further than host memory does."""

    tier: str
    key: bytes
    matched: int
    tokens: int
    length: int


class HostRow(Front):
    """What host memory has of one prompt in one group: tokens by chunk position, found out when they are asked for.

    `wants` is the first position where the prompt's tokens would have told more. Valid as long as the table doesn't
    change.
    """

    def __init__(self, table: ChunkTable, prompt: Prompt, group: int) -> None:
        self._table, self._prompt, self._group = table, prompt, group
        self._have: list[int | None] = [None] * prompt.positions
        self.entries: list[Entry | None] = [None] * prompt.positions
        self.wants: int | None = None

    def fill_front(self) -> None:
        """Find whole chunks from the front, as far as they go: what a lookup that hits spends its time on."""
        by_key, keys, size = self._table.of_group(self._group), self._prompt.keys, self._prompt.namespace.chunk_tokens
        committed, entries, have = SlotState.COMMITTED, self.entries, self._have
        for position in range(len(entries)):
            entry = by_key.get(keys[KEY_BYTES * position : KEY_BYTES * position + KEY_BYTES])
            if entry is None or entry.state is not committed or entry.token_count != size:
                return
            entries[position], have[position], self.front = entry, size, position + 1

    def __len__(self) -> int:
        return len(self._have)

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            return [self[at] for at in range(*position.indices(len(self)))]
        tokens = self._have[position]
        if tokens is None:
            self.entries[position], tokens = self._find(position)
            self._have[position] = tokens
        return tokens

    def _find(self, position: int) -> tuple[Entry | None, int]:
        table, prompt, group = self._table, self._prompt, self._group
        start, end = prompt.bounds(position)
        exact = table.get(group, prompt.key_at(end))
        if exact is not None and exact.state is SlotState.COMMITTED:
            return exact, exact.token_count
        parent = prompt.key_at(start)
        if not table.has_children(group, parent):
            return None, 0
        if start < prompt.tokens_from:
            self.wants = position if self.wants is None else min(position, self.wants)
            return None, 0
        return table.best_child(group, parent, prompt.tokens_of(start, end), prompt.extra)

    def has(self, position: int, tokens: int) -> bool:
        """Are so many tokens of a chunk position here?"""
        return self[position] >= tokens

    def serving(self, position: int, hit: int) -> Entry | None:
        """The chunk that a hit of `hit` tokens reads at this position."""
        return self.entries[position] if self[position] else None


class HostStates(HostRow):
    """The same of a recurrent group: the units, as bits, at whose ends a state is stored."""

    def __init__(self, table: ChunkTable, prompt: Prompt, group: int) -> None:
        super().__init__(table, prompt, group)
        self._states: dict[int, Entry] = {}

    def _find(self, position: int) -> tuple[Entry | None, int]:
        prompt = self._prompt
        start, end = prompt.bounds(position)
        parent, states = prompt.key_at(start), 0
        if start < prompt.tokens_from:
            if self._table.has_children(self._group, parent):
                self.wants = position if self.wants is None else min(position, self.wants)
            return None, 0
        for entry in self._table.fronts(self._group, parent, prompt.tokens_of(start, end), prompt.extra):
            states |= state_bit(entry.token_count)
            self._states[entry.end] = entry
        return None, states

    def has(self, position: int, tokens: int) -> bool:
        """Is the state so many tokens behind a chunk's start here?"""
        return bool(self[position] & state_bit(tokens))

    def serving(self, position: int, hit: int) -> Entry | None:
        """The chunk whose state is that after `hit` tokens."""
        return self._states.get(hit) if self[position] else None


Place = tuple[int, int]
"""A group and a chunk position."""


@dataclass(slots=True)
class Match:
    """What host memory and tiers have of one prompt, by group and chunk position. With `only`, tiers are asked for
    these places and no others."""

    prompt: Prompt
    rows: list[HostRow]
    only: Sequence[Place] | None = None
    offers: dict[tuple[int, int], Offer] = field(default_factory=dict)
    _hit: int | None = None

    def hit(self) -> int:
        """The longest prefix from host memory alone."""
        if self._hit is None:
            self._hit = self._longest(self.rows)
        return self._hit

    def wants(self, *, for_tiers: bool) -> int | None:
        """From where on tokens are needed that weren't sent, to answer best; with `for_tiers`, to ask them too."""
        prompt = self.prompt
        if prompt.tokens_from == 0:
            return None
        self.hit()
        positions = [row.wants for row in self.rows if row.wants is not None]
        if for_tiers:
            positions += [place[1] for place in self.missing() if place[1] * self._size < prompt.tokens_from]
        return min(positions) * self._size if positions else None

    def missing(self) -> Iterator[tuple[int, int]]:
        """(group, position) of every place where host memory falls short of the prompt."""
        prompt = self.prompt
        everywhere = ((group, position) for group in range(len(self.rows)) for position in range(prompt.positions))
        for group, position in everywhere if self.only is None else self.only:
            if not self.has(group, position, prompt.longest):
                yield group, position

    def lacks_any(self) -> bool:
        """Is there any such place?"""
        return next(self.missing(), None) is not None

    def has(self, group: int, position: int, hit: int) -> bool:
        """Has memory what a hit of this length reads at a place?"""
        return self.rows[group].has(position, self.wanted_tokens(position, hit))

    @property
    def _size(self) -> int:
        return self.prompt.namespace.chunk_tokens

    def entry(self, group: int, position: int, hit: int) -> Entry | None:
        """The host's chunk at a place, if it has anything for a hit of this length."""
        return self.rows[group].serving(position, hit)

    def serving(self, hit: int) -> list[Entry]:
        """The host's chunks that a hit of this length reads."""
        namespace, found = self.prompt.namespace, []
        for row, geometry in zip(self.rows, namespace.groups, strict=True):
            needed = needed_positions(geometry, namespace.chunk_tokens, hit)
            found += row.entries[needed.start : min(needed.stop, row.front)]
            found += [row.serving(at, hit) for at in needed if at >= row.front]
        return [entry for entry in found if entry is not None]

    def hit_with_offers(self, limit: int | None = None) -> int:
        """The longest prefix if every offer were taken."""
        reach = [list(row) for row in self.rows]
        for (group, position), offer in self.offers.items():
            have = reach[group][position]
            states = self.prompt.namespace.groups[group].recurrent
            reach[group][position] = have | state_bit(offer.matched) if states else max(have, offer.matched)
        return self._longest(reach, limit)

    def _longest(self, reach: Sequence[Sequence[int]], limit: int | None = None) -> int:
        namespace = self.prompt.namespace
        longest = self.prompt.longest if limit is None else min(limit, self.prompt.longest)
        return longest_hit(namespace.groups, reach, namespace.chunk_tokens, longest)

    def needed(self, hit: int) -> list[tuple[int, int]]:
        """(group, position) of all chunks that a hit of this length reads."""
        namespace = self.prompt.namespace
        return [
            (group, position)
            for group, geometry in enumerate(namespace.groups)
            for position in needed_positions(geometry, namespace.chunk_tokens, hit)
        ]

    def wanted_tokens(self, position: int, hit: int) -> int:
        """Tokens of a chunk position that a hit of this length needs."""
        size = self.prompt.namespace.chunk_tokens
        return min(size, hit - position * size)


def match(core: StoreCore, prompt: Prompt, only: Sequence[Place] | None = None) -> Match:
    """What committed chunks serve. Mutates nothing."""
    rows = [
        (HostStates if geometry.recurrent else HostRow)(core.table, prompt, group)
        for group, geometry in enumerate(prompt.namespace.groups)
    ]
    for group, row in zip(prompt.namespace.groups, rows, strict=True):
        if needs_all(group):
            row.fill_front()
    return Match(prompt, rows, only)


def queries(found: Match) -> list[tuple[tuple[int, int], Query]]:
    """What to ask tiers for: every position where host memory falls short of the prompt."""
    return [(place, found.prompt.query(*place)) for place in found.missing()]


def offer(found: Match, tier: str, places: Sequence[tuple[int, int]], results: Sequence[LookupResult]) -> int:
    """Note what a tier has. The first tier that reaches furthest is kept; returns how many answers can't be true."""
    nonsense = 0
    for place, result in zip(places, results, strict=True):
        if result.outcome != "hit":
            continue
        if not _possible(found.prompt, place, result):
            nonsense += 1
            continue
        best, (group, position) = found.offers.get(place), place
        if found.prompt.namespace.groups[group].recurrent and result.matched != result.tokens:
            continue  # a tier that answers with a state at some other position
        if result.matched > (best.matched if best else 0) and not found.rows[group].has(position, result.matched):
            found.offers[place] = Offer(tier, result.key, result.matched, result.tokens, result.length)
    return nonsense


def _possible(prompt: Prompt, place: tuple[int, int], result: LookupResult) -> bool:
    """May there be such a chunk? Room is made by these numbers before the tier's header is seen, so a tier that is
    wrong about what it has must cost no more than that chunk."""
    group, position = place
    start, end = prompt.bounds(position)
    in_units = result.matched % MATCH_UNIT == 0 and result.tokens % MATCH_UNIT == 0
    in_order = 0 < result.matched <= min(result.tokens, end - start) and result.tokens <= prompt.namespace.chunk_tokens
    if len(result.key) != KEY_BYTES or not in_units or not in_order:
        return False
    payload = payload_bytes(prompt.namespace.groups[group], result.tokens)
    return result.length <= payload + header_bytes(result.tokens, EXTRA_BYTES_MAX)


@dataclass(slots=True)
class Promotion:
    """One load that a lookup waits for; several lookups may wait for one entry."""

    entry: Entry
    offer: Offer


@dataclass(slots=True)
class Promotions:
    """What a lookup needs from tiers. `held` host entries are pinned until the caller unpins them;
    `running` are loads that somebody else has started."""

    hit: int
    new: list[Promotion]
    running: list[Entry]
    held: list[Entry]


def promotions(core: StoreCore, found: Match, owners: dict[str, bytes]) -> Promotions:
    """Reserve slots for what the best length needs. Cuts the length where no room can be made, a few times: where there
    is no room at all, looking for it at every length would be a walk over all pairs of them."""
    plan = Promotions(found.hit_with_offers(), [], [], [])
    _hold(core, found, plan, plan.hit)
    planned: set[tuple[int, int]] = set()
    for _ in range(CUTS_MAX):
        failed = _promote_all(core, found, plan, planned, owners)
        if failed is None:
            return plan
        group, position = failed
        cut = position * found.prompt.namespace.chunk_tokens + found.rows[group][position]
        if found.prompt.namespace.groups[group].recurrent:
            cut = plan.hit - MATCH_UNIT
        plan.hit = found.hit_with_offers(min(cut, plan.hit))
    plan.hit = min(plan.hit, found.hit())
    return plan


@dataclass(frozen=True, slots=True)
class Room:
    """What `client` has set aside under `lease`, for what it has brought into memory."""

    client: Client
    lease: int


def place_promotions(
    core: StoreCore, found: Match, owners: dict[str, bytes], room: Room | None = None
) -> Promotions:
    """Reserve slots for the places that are asked for, in their order, up to the first that can't be had; those for
    which there is `room`, of that."""
    assert found.only is not None
    longest = found.prompt.longest
    plan = Promotions(longest, [], [], [])
    here = {place: found.entry(*place, longest) for place in found.only if found.has(*place, longest)}
    for entry in here.values():  # before anything makes room for the others
        if entry is not None:
            core.pin(entry)
            plan.held.append(entry)
    for place in found.only:
        if here.get(place) is None and not _promote(core, found, plan, place, owners, room):
            break
    return plan


def _promote_all(
    core: StoreCore, found: Match, plan: Promotions, planned: set[tuple[int, int]], owners: dict[str, bytes]
) -> tuple[int, int] | None:
    """Start what `plan.hit` still lacks, front to back; the first place for which that failed, or None."""
    for place in sorted(found.needed(plan.hit), key=lambda place: place[1]):
        group, position = place
        wanted = found.wanted_tokens(position, plan.hit)
        if place in planned or found.rows[group].has(position, wanted):
            continue
        if not _promote(core, found, plan, place, owners):
            return place
        planned.add(place)
    return None


def _hold(core: StoreCore, found: Match, plan: Promotions, hit: int) -> None:
    """Host entries that the length needs must not be evicted to make room for its own promotions."""
    for group, position in found.needed(hit):
        entry = found.entry(group, position, hit)
        if entry is not None:
            core.pin(entry)
            plan.held.append(entry)


def _promote(
    core: StoreCore, found: Match, plan: Promotions, place: tuple[int, int], owners: dict[str, bytes],
    room: Room | None = None,
) -> bool:  # fmt: skip
    chosen = found.offers.get(place)
    if chosen is None:
        return False
    wanted = found.prompt.chunk(*place)
    running = core.table.get(wanted.group, chosen.key)
    if running is not None:
        if running.state is SlotState.COMMITTED:
            return True
        plan.running.append(running)
        return running.state is SlotState.PROMOTING
    # Tokens of the stored chunk may go on otherwise than the prompt, and what its `extra` is isn't known yet:
    # placeholders of the right size make room, and the tier's header brings the true ones.
    tokens = wanted.tokens[: 4 * chosen.tokens].ljust(4 * chosen.tokens, b"\0")
    payload = payload_bytes(found.prompt.namespace.groups[wanted.group], chosen.tokens)
    extra = b"\0" * max(0, chosen.length - payload - header_bytes(chosen.tokens))
    chunk = NewChunk(wanted.group, chosen.key, wanted.parent, wanted.start, tokens, extra)
    about = found.prompt.namespace_id, found.prompt.tenant
    hold = None if room is None else core.aside.of(room.client, room.lease, *about, chunk)
    entry = core.reserve_promotion(about[0], chunk, owners[chosen.tier], about[1], hold)
    if entry is None:
        core.counters.add("tier.no_room")
        return False
    plan.new.append(Promotion(entry, chosen))
    return True


@dataclass(frozen=True, slots=True)
class Pinned:
    """A lookup's outcome: `entries` serve `hit` tokens and stay until the lease ends. Or there is none yet, since
    tokens from `wants` on are needed first."""

    lease: int
    hit: int
    entries: list[Entry]
    wants: int = -1


def pin(core: StoreCore, client: Client, found: Match) -> Pinned:
    """Pin what serves the longest hit. Nothing can be evicted between the match and this."""
    hit = found.hit()
    entries = found.serving(hit)
    assert all(entry.state is SlotState.COMMITTED for entry in entries)
    if len(entries) > core.limits.pins_per_lease:
        core.counters.add("store.refused_pins")
        return Pinned(0, 0, [])
    lease = core.lease(client, entries, hit=hit, lease_s=found.prompt.lease_s)
    return Pinned(lease, hit, entries) if lease else Pinned(0, 0, [])


def pin_places(core: StoreCore, client: Client, found: Match) -> Pinned:
    """Pin what memory has of the places that were asked for."""
    assert found.only is not None
    longest = found.prompt.longest
    there = [found.entry(*place, longest) for place in found.only if found.has(*place, longest)]
    entries = list(dict.fromkeys(entry for entry in there if entry is not None))
    if not entries or len(entries) > core.limits.pins_per_lease:
        return Pinned(0, 0, [])
    assert all(entry.state is SlotState.COMMITTED for entry in entries)
    lease = core.lease(client, entries, hit=0, lease_s=found.prompt.lease_s)
    return Pinned(lease, 0, entries) if lease else Pinned(0, 0, [])
