"""From chunks to units: what a router may believe of one medium.

The store and its tiers speak of chunks, one for each cache group, which overlap (a tail [256, 288) and the
fuller chunk [256, 512) that grew out of it). Routers understand one flat set of 16-token blocks a medium.
`TierView` keeps that set and tells each change of it once: a unit is stored when it becomes servable and
removed when it stops being so, whatever chunks come and go underneath.

Which units are announced, as a function of the chunks that are held, and of nothing else:

    held(u)       every full-attention group has u in some chunk
    candidate(u)  held(u), and a resume point lies at u or beyond: every window group has u, or one of u's
                  children is a candidate. (Without window groups: held(u).)
    announced(u)  candidate(u); in a closed view also: u begins a chain, or its parent is announced

Why so. A hit of length P reads all of [0, P) from full groups, but only the window before P from window
groups: units in the middle of a chain are servable without window chunks, the end of a chain isn't. So
window chunks count as resume points: when the last one of a chain goes, the units behind it go too, since no
request could use them; when one comes back (a promotion loads just the last window), they all return. What
this can't say is that a prompt which *leaves* the chain in its middle may find no window there: such a hit is
shorter than a router expects. Saying it would need events by group, which routers take for plain ones. And a
resume point is judged by the unit itself, not by the whole window before it. A model without full groups is
treated as if all its groups were full.

Closed views are for device memory: Dynamo's device index drops a block whose parent it doesn't know, for
good, and forgets the children of a removed one. So a removal takes the whole subtree with it there, and it
is announced again when the hole is filled. Its indexes of lower tiers continue a match from any tier and
keep such blocks; views of CPU and STORAGE are open, so that a chain that lost its head to the file tier still
counts as being in memory.

Everything here is pure: no I/O, no clock. Not thread-safe.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from forebay.events.schema import GPU, BlockRemoved, BlockStored

UNIT = 16
_UNIT_BYTES = UNIT * 4
_RUN_UNITS = 64
_REMOVED_UNITS = 1024

GroupKind = Literal["full", "window"]
ExtraKeys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnitChunk:
    """A chunk as its units. `keys[i]` follows `keys[i - 1]`, the first follows `parent` (None if the chunk
    begins a chain: the root is no block). `tokens` are the ids as u32 LE. `extra_keys` tells routers what
    beside tokens makes these units (a tenant, a LoRA), so that they don't match plain prompts: one entry a
    unit, or empty for none.
    """

    group: int
    parent: bytes | None
    keys: tuple[bytes, ...]
    tokens: bytes
    extra_keys: tuple[ExtraKeys | None, ...] = ()

    def __post_init__(self) -> None:
        assert self.keys, "a chunk has at least one unit"
        assert len(self.tokens) == len(self.keys) * _UNIT_BYTES, (len(self.tokens), len(self.keys))
        assert len(self.extra_keys) in (0, len(self.keys)), len(self.extra_keys)


@dataclass(frozen=True, slots=True)
class ViewStats:
    """Gauges, and `refused`: chunks that came when the view was full and so are not announced."""

    chunks: int
    units: int
    announced: int
    max_units: int
    refused: int


class _ChunkId(NamedTuple):
    tier: str
    group: int
    key: bytes


@dataclass(slots=True, eq=False)
class _Unit:
    """One unit. `counts` has, for every group, how many held chunks contain it."""

    parent: bytes | None
    tokens: bytes
    extra: ExtraKeys | None
    counts: list[int]
    candidate: bool = False
    announced: bool = False


class TierView:
    """The announced units of one (medium, locality): one or more tiers, which are counted together.

    `kinds` are the kinds of the cache groups, by index. With `max_units` the memory is bounded (some 500
    bytes a unit): a chunk beyond it is not announced, which costs hits and never correctness.
    """

    def __init__(
        self,
        medium: str,
        kinds: Sequence[GroupKind],
        *,
        locality: str | None = None,
        closed: bool | None = None,
        max_units: int = 1 << 20,
    ) -> None:
        assert kinds and max_units > 0, (kinds, max_units)
        self.medium, self.locality = medium, locality
        self.max_units = max_units
        self.refused = 0
        everything = tuple(range(len(kinds)))
        self._groups = len(kinds)
        self._full = tuple(index for index, kind in enumerate(kinds) if kind == "full") or everything
        self._windows = tuple(index for index in everything if index not in self._full)
        self._closed = medium == GPU if closed is None else closed
        self._units: dict[bytes, _Unit] = {}
        self._chunks: dict[_ChunkId, tuple[bytes, ...]] = {}
        # How many children of a unit are candidates, and (closed views) which: also of units not held.
        self._support: dict[bytes, int] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._announced = 0

    def __contains__(self, key: bytes) -> bool:
        """Whether the unit is announced now."""
        unit = self._units.get(key)
        return unit is not None and unit.announced

    def stats(self) -> ViewStats:
        """Present figures."""
        return ViewStats(len(self._chunks), len(self._units), self._announced, self.max_units, self.refused)

    # --- changes -----------------------------------------------------------------------------------------

    def chunk_stored(self, tier: str, chunk: UnitChunk) -> list[BlockStored]:
        """`tier` has the chunk now; returns what became servable, parents first. Repeating it changes nothing."""
        assert 0 <= chunk.group < self._groups, f"no group {chunk.group} among {self._groups}"
        name = _ChunkId(tier, chunk.group, chunk.keys[-1])
        if name in self._chunks:
            return []
        fresh = sum(key not in self._units for key in chunk.keys)
        if len(self._units) + fresh > self.max_units:
            self.refused += 1
            return []
        self._chunks[name] = chunk.keys
        touched = [key for at, key in enumerate(chunk.keys) if self._add(chunk, at, key)]
        return list(self._stored(dict.fromkeys(self._settle(touched))))

    def chunk_removed(self, tier: str, group: int, key: bytes, reason: str | None = None) -> list[BlockRemoved]:
        """`tier` has lost the chunk that ends at `key`; returns what stopped being servable, in no order.

        A chunk that isn't known (never announced, or refused) changes nothing.
        """
        return self._remove([_ChunkId(tier, group, key)], reason)

    def tier_removed(self, tier: str, reason: str | None = None) -> list[BlockRemoved]:
        """`tier` has lost everything."""
        return self._remove([name for name in self._chunks if name.tier == tier], reason)

    def snapshot(self) -> Iterator[BlockStored]:
        """What is announced, as events, parents first. Lazy: the view may change between two of them. Units
        that go meanwhile are left out, units that come are not in it; their own events tell both."""
        return self._stored(dict.fromkeys(self._units))

    # --- counting ----------------------------------------------------------------------------------------

    def _add(self, chunk: UnitChunk, at: int, key: bytes) -> bool:
        """Count the unit in; True if the chunk's group didn't have it before."""
        unit = self._units.get(key)
        if unit is None:
            parent = chunk.keys[at - 1] if at else chunk.parent
            tokens = chunk.tokens[at * _UNIT_BYTES : (at + 1) * _UNIT_BYTES]
            extra = chunk.extra_keys[at] if chunk.extra_keys else None
            unit = self._units[key] = _Unit(parent, tokens, extra, [0] * self._groups)
        unit.counts[chunk.group] += 1
        return unit.counts[chunk.group] == 1

    def _remove(self, names: Iterable[_ChunkId], reason: str | None) -> list[BlockRemoved]:
        touched: list[bytes] = []
        for name in names:
            for key in self._chunks.pop(name, ()):
                counts = self._units[key].counts
                counts[name.group] -= 1
                assert counts[name.group] >= 0, "a unit was removed more often than stored"
                if counts[name.group] == 0:
                    touched.append(key)
        gone = self._settle(touched)
        for key in touched:
            if key in self._units and not any(self._units[key].counts):
                del self._units[key]
        return self._removed(gone, reason)

    # --- deciding ----------------------------------------------------------------------------------------

    def _settle(self, touched: Sequence[bytes]) -> list[bytes]:
        """Decide anew for units whose counts changed and all that follows; returns whose announcement changed."""
        changed = self._settle_candidates(touched)
        if self._closed:
            changed = self._settle_closed(changed)
        else:
            for key in changed:
                self._units[key].announced = self._units[key].candidate
        self._announced += sum(1 if self._units[key].announced else -1 for key in changed)
        return changed

    def _settle_candidates(self, touched: Sequence[bytes]) -> list[bytes]:
        """Upwards: a candidate supports its parent."""
        flipped: list[bytes] = []
        # The deepest first: most parents are then decided once.
        todo = list(touched)
        while todo:
            key = todo.pop()
            unit = self._units.get(key)
            if unit is None or unit.candidate == self._servable(key, unit):
                continue
            unit.candidate = not unit.candidate
            flipped.append(key)
            if unit.parent is not None:
                self._note_child(unit.parent, key, unit.candidate)
                if self._windows:
                    todo.append(unit.parent)
        return flipped

    def _servable(self, key: bytes, unit: _Unit) -> bool:
        if not all(unit.counts[group] for group in self._full):
            return False
        return all(unit.counts[group] for group in self._windows) or self._support.get(key, 0) > 0

    def _note_child(self, parent: bytes, key: bytes, candidate: bool) -> None:
        if self._windows:
            self._support[parent] = self._support.get(parent, 0) + (1 if candidate else -1)
            if not self._support[parent]:
                del self._support[parent]
        if self._closed and candidate:
            self._children.setdefault(parent, set()).add(key)
        elif self._closed:
            self._children[parent].discard(key)
            if not self._children[parent]:
                del self._children[parent]

    def _settle_closed(self, flipped: Sequence[bytes]) -> list[bytes]:
        """Downwards: a unit that isn't announced hides everything behind it."""
        changed: list[bytes] = []
        todo = list(flipped)
        while todo:
            key = todo.pop()
            unit = self._units[key]
            visible = unit.candidate and (unit.parent is None or unit.parent in self)
            if visible == unit.announced:
                continue
            unit.announced = visible
            changed.append(key)
            todo.extend(self._children.get(key, ()))
        return changed

    # --- telling -----------------------------------------------------------------------------------------

    def _stored(self, chosen: Mapping[bytes, object]) -> Iterator[BlockStored]:
        """Events for the announced ones of these units: runs along the chains, parents before children."""
        run: list[bytes] = []
        for key in self._parents_first(chosen):
            if run and (self._units[key].parent != run[-1] or len(run) == _RUN_UNITS):
                yield self._run(run)
                run = []
                if key not in self:
                    continue
            run.append(key)
        if run:
            yield self._run(run)

    def _parents_first(self, chosen: Mapping[bytes, object]) -> Iterator[bytes]:
        done: set[bytes] = set()
        for key in chosen:
            line: list[bytes] = []
            ahead: bytes | None = key
            while ahead is not None and ahead in chosen and ahead not in done and ahead in self:
                line.append(ahead)
                ahead = self._units[ahead].parent
            done.update(line)
            yield from (known for known in reversed(line) if known in self)

    def _run(self, keys: list[bytes]) -> BlockStored:
        units = [self._units[key] for key in keys]
        extra = [None if unit.extra is None else list(unit.extra) for unit in units]
        return BlockStored(
            block_hashes=list(keys),
            parent_block_hash=units[0].parent,
            token_ids=_token_ids(b"".join(unit.tokens for unit in units)),
            block_size=UNIT,
            medium=self.medium,
            extra_keys=None if all(entry is None for entry in extra) else list(extra),
            locality=self.locality,
        )

    def _removed(self, keys: Sequence[bytes], reason: str | None) -> list[BlockRemoved]:
        return [
            BlockRemoved(
                list(keys[at : at + _REMOVED_UNITS]),
                self.medium,
                locality=self.locality,
                reason=reason,
            )
            for at in range(0, len(keys), _REMOVED_UNITS)
        ]


def _token_ids(tokens: bytes) -> list[int]:
    ids = array.array("I", tokens)
    if sys.byteorder == "big":  # pragma: no cover - no such machine in the tests
        ids.byteswap()
    return ids.tolist()
