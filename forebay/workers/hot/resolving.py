"""One step's answers to sparse layers: where the rows are that they have chosen, and whether what they read holds.

Rows of requests that have everything on the device are looked up in their tables. Those of hot ones go through the
resolver: all that feed one token together, those that feed more each for itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS, Batch
from forebay.kernels.chosen import Selection
from forebay.kernels.hot import Ask, Mirror, SwapPlan, replay, resolve_and_copy
from forebay.workers.counters import Counters
from forebay.workers.hot.buffers import Buffers
from forebay.workers.hot.naming import Named, Naming
from forebay.workers.hot.residency import Ints, joined
from forebay.workers.hot.telling import Changes, HotDone, HotStep


class HostRows(Protocol):
    """See `Places`."""

    def mirror(self) -> Mirror: ...

    def changed(self, pages: Iterable[int]) -> set[int]: ...


class RankBook(Protocol):
    """What one rank has: its hot buffers, and where the rows are that it copies into them."""

    @property
    def buffers(self) -> Buffers: ...

    @property
    def host(self) -> HostRows: ...

    @property
    def counters(self) -> Counters: ...


@dataclass(frozen=True, slots=True)
class Stay:
    """One request of the step, in the order of the batch: its region (-1: none), and where its pages are."""

    key: Hashable
    region: int
    resident: Ints
    host: Ints


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a step's requests: `lost` are those that have read what wasn't theirs any more, or what is
    nowhere; `parked` those that have chosen rows which only tiers have. What these and the others have `named`."""

    lost: list[Hashable]
    parked: list[Hashable]
    named: dict[Hashable, Named]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some rows int64 [r] of a selection, resolved together for `sequences`."""

    sequences: tuple[int, ...]
    plan: SwapPlan


class StepResolver:
    """A `RowResolver` for one forward pass over one pool. Mutates the book's regions, and the pool. `told` is what
    other ranks are to hear before they do the same, if there are any: it takes all `changes`. What is chosen is noted
    in `naming`."""

    def __init__(
        self, book: RankBook, stays: Sequence[Stay], pool: Tensor, changes: Changes | None = None,
        naming: Naming | None = None,
    ) -> None:  # fmt: skip
        self._book, self._stays, self._pool = book, tuple(stays), pool
        self.told = None if changes is None else tell(self._stays, changes)
        self._naming = naming
        self._elsewhere: set[int] = set()
        self._cold_elsewhere: set[int] = set()
        device = pool.device
        self._regions = torch.tensor([stay.region for stay in stays], dtype=torch.int64, device=device)
        self._resident = torch.from_numpy(joined([stay.resident for stay in stays])).to(device)
        self._host = torch.from_numpy(joined([stay.host for stay in stays])).to(device)
        self._mirror: Mirror = book.host.mirror()
        self._hot = [stay.region >= 0 for stay in stays]
        self._leader = -1
        self._behind: set[int] = set()
        self._parts: list[_Part] = []
        self._all: list[_Part] = []

    def resolve(self, leader: int, batch: Batch, selection: Selection) -> Tensor:
        """See `RowResolver`."""
        sequences, positions = selection.sequences, selection.positions
        page, offset = positions.clamp(min=0) // BLOCK_TOKENS, positions.clamp(min=0) % BLOCK_TOKENS
        block = self._resident[sequences[:, None], page]
        slots = torch.where((positions >= 0) & (block >= 0), block * BLOCK_TOKENS + offset, -1)
        self._catch_up()
        self._leader, self._parts = leader, []
        self._behind = set(self._book.buffers.sharers[leader]) - {leader}
        self._book.counters.add("hot.rows", int((positions >= 0).sum()))
        of_sequence = sequences.tolist()
        rows_of = {s: [r for r, owner in enumerate(of_sequence) if owner == s] for s in dict.fromkeys(of_sequence)}
        hot = {s: rows for s, rows in rows_of.items() if self._hot[s]}
        single = [s for s, rows in hot.items() if len(rows) == 1]
        groups = [single] if single else []
        groups += [[s] for s, rows in hot.items() if len(rows) > 1]
        for group in groups:
            rows = torch.tensor([row for s in group for row in hot[s]], device=slots.device)
            slots[rows] = self._resolve(leader, group, positions[rows])
        if self._naming is not None:
            for s, mine in hot.items():
                chosen = positions[torch.tensor(mine, device=slots.device)]
                self._naming.note(leader, s, chosen, self._resident[s], self._host[s])
        return slots

    def _resolve(self, leader: int, sequences: Sequence[int], positions: Tensor) -> Tensor:
        at = torch.tensor(sequences, device=positions.device)
        selected = positions.view(len(sequences), -1, positions.shape[1])
        ask = Ask(selected, self._regions[at], self._resident[at], self._host[at])
        plan = resolve_and_copy(self._book.buffers.of(leader), ask, self._mirror, self._pool, leader)
        part = _Part(tuple(sequences), plan)
        self._parts.append(part)
        self._all.append(part)
        return plan.rows.view(-1, positions.shape[1])

    def prepare(self, layer: int, batch: Batch, selection: Selection, slots: Tensor) -> None:
        """See `RowResolver`. The leader's rows were copied when they were resolved."""
        if layer in self._behind:
            self._behind.remove(layer)
            for part in self._parts:
                replay(part.plan, self._mirror, self._pool, layer)
                self._book.counters.add("hot.rows_replayed", int(part.plan.swaps.sum()))

    def _catch_up(self) -> None:
        """A layer that reads nothing in this step (the last one of a prompt's part) must have its rows all the same: in
        the next step they are hits."""
        for layer in tuple(self._behind):
            for part in self._parts:
                replay(part.plan, self._mirror, self._pool, layer)
        self._behind.clear()

    def end(self) -> Ended:
        """After the step, and after other ranks have been heard."""
        changed, cold = self.wrong()
        naming, lost = self._naming, self._elsewhere | set(changed)
        parked = {at for at in cold if at not in lost and naming is not None and naming.comes(at)}
        lost |= (self._cold_elsewhere | set(cold)) - parked
        named = {} if naming is None else {self._stays[at].key: it for at, it in naming.named.items() if at not in lost}
        lost_keys, parked_keys = ([self._stays[at].key for at in sorted(some)] for some in (lost, parked))
        return Ended(lost_keys, parked_keys, named)

    def wrong(self) -> tuple[list[int], list[int]]:
        """On this rank, by their places in the step: requests that have read what wasn't theirs any more; and others
        that have read what was nowhere. Once."""
        self._catch_up()
        changed: dict[int, None] = {}
        cold: dict[int, None] = {}
        for part in self._all:
            self._book.counters.add("hot.misses", int(part.plan.swaps.sum()))
            for place, sequence in enumerate(part.sequences):
                count = int(part.plan.swaps[place])
                pages = set((part.plan.sources[place, :count] // BLOCK_TOKENS).tolist())
                if int(part.plan.cold[place]):
                    self._book.counters.add("hot.rows_cold", int(part.plan.cold[place]))
                    cold[sequence] = None
                if self._book.host.changed(pages):
                    self._book.counters.add("hot.rows_changed")
                    changed[sequence] = None
        return list(changed), [at for at in cold if at not in changed]

    # --- with other ranks --------------------------------------------------------------------------------

    def misses(self) -> int:
        """Rows that were copied for the layers that chose."""
        return sum(int(part.plan.swaps.sum()) for part in self._all)

    def decisions(self) -> int:
        """What was copied from where to where, as a number: equal on ranks that have done the same."""
        digest = xxhash.xxh3_64()
        for part in self._all:
            for made in (part.plan.swaps, part.plan.cold, part.plan.sources, part.plan.targets):
                digest.update(made.cpu().numpy().tobytes())
        return digest.intdigest()

    def hear(self, everybody: Sequence[HotDone]) -> None:
        """The other ranks are through with the same step. Before `end`, which decides once for all of them."""
        counters, decisions = self._book.counters, self.decisions()
        for heard in everybody:
            counters.add("hot.misses_elsewhere", heard.misses)
            counters.add("hot.ranks_parted", heard.decisions != decisions)
            counters.add("hot.void_elsewhere", len(heard.void))
            self._elsewhere |= set(heard.void)
            self._cold_elsewhere |= set(heard.cold)


def tell(stays: Sequence[Stay], changes: Changes) -> HotStep:
    """What another rank has to know before it takes the same step. Takes all `changes`."""
    resident, host = (joined(rows) for rows in ([s.resident for s in stays], [s.host for s in stays]))
    assert max(resident.max(initial=0), host.max(initial=0)) < 2**31, "numbers of blocks and host pages have 32 bits"
    opened, gone, arrived = changes.take()
    regions = [stay.region for stay in stays]
    return HotStep(regions, resident.astype("<i4").tobytes(), host.astype("<i4").tobytes(), opened, gone, arrived)
