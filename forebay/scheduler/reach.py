"""How much of a prompt each worker has, and from where: holders of blocks, projected on workers.

    device   blocks that the worker has on its device, from the first one on
    near     blocks that it has in any of its own tiers or its store's, from the first one on, mixed as they are
    far      blocks that another store has from the first one on: they would have to be moved
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.scheduler.fleet import Fleet, Numbers, Seconds
from forebay.scheduler.holder_sets import Listed
from forebay.scheduler.index import PrefixMatch
from forebay.scheduler.loops import compiled_loops

Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Reach:
    """In tokens, one entry a worker. `load_s` is what loading [device, near) takes; `source` the store (its place
    in the fleet) that has [0, far), -1 where near is as much or no other store has any."""

    device: Numbers
    near: Numbers
    far: Numbers
    load_s: Seconds
    source: Numbers


def nothing(fleet: Fleet) -> Reach:
    """Nobody has anything."""
    count = len(fleet)
    zeros = np.zeros(count, np.int64)
    return Reach(zeros, zeros.copy(), zeros.copy(), np.zeros(count), np.full(count, -1))


def reach_of(match: PrefixMatch, fleet: Fleet, block_tokens: int, prompt_tokens: int) -> Reach:
    """What the fleet's workers, all with blocks of this size, have of a prompt."""
    if not match.blocks:
        return nothing(fleet)
    # The last token is always computed: it is what the first answer comes from.
    most = max(0, prompt_tokens - 1)
    if compiled_loops() is not None:
        return _compiled(match, fleet, block_tokens, most)
    device, near, load, fetched = _walked(match, fleet)
    far, source = _elsewhere(fetched, fleet)
    better = far > near
    far, source = np.where(better, far, near), np.where(better, source, -1)
    tokens = [np.minimum(blocks * block_tokens, most) for blocks in (device, near, far)]
    return Reach(tokens[0], tokens[1], tokens[2], load * block_tokens, source)


def leading_of(match: PrefixMatch, holders: int) -> Numbers:
    """For each of the first so many holders, how many of the prompt's first blocks it has."""
    if not match.blocks:
        return np.zeros(holders, np.int64)
    loops = compiled_loops()
    if loops is None:
        return _leading(_held(match.sets, holders)[:, :-1], match)
    found: Numbers = loops.leading(match.blocks, match.first, match.sets.members, match.sets.offsets, holders)
    return found


_Parts = tuple[Numbers, Numbers, Seconds, Numbers]
"""Blocks on the device and near, seconds a token of each block between; and what each store has for others."""


def _compiled(match: PrefixMatch, fleet: Fleet, block_tokens: int, most: int) -> Reach:
    return Reach(
        *compiled_loops().reach(
            match.blocks, match.starts, match.which, match.first, match.sets.members, match.sets.offsets,
            fleet.own_owner, fleet.store_owner, fleet.kept_owner, fleet.owners, fleet.load_s, fleet.store_of,
            block_tokens, most,
        )
    )  # fmt: skip


def _walked(match: PrefixMatch, fleet: Fleet) -> _Parts:
    held = _held(match.sets, fleet.nobody)
    here = held[:, fleet.own] | held[:, fleet.shared]
    device = _leading(here[:, :, 0], match)
    near = _leading(np.any(here, axis=2), match)
    every = np.arange(len(fleet))
    seconds = fleet.load_s[every, here.argmax(2)]
    spans = np.minimum(match.ends[:, None], near) - np.maximum(match.starts[:, None], device)
    load = (np.maximum(spans, 0) * seconds[match.which]).sum(0)
    return device, near, load, _leading(np.any(held[:, fleet.kept], axis=2), match)


def _held(sets: Listed, nobody: int) -> Flags:
    """Which holder has the blocks of which set; the last column is nobody's."""
    held = np.zeros((len(sets), nobody + 1), np.bool_)
    for number, members in enumerate(sets):
        # An owner that the fleet doesn't know yet has a higher number.
        held[number, members if not members.size or members[-1] < nobody else members[members < nobody]] = True
    return held


def _leading(has: Flags, match: PrefixMatch) -> Numbers:
    """Blocks before the first one of a set that isn't had."""
    ends: Numbers = np.where(has, match.blocks, match.first[:, None]).min(0)
    return ends


def _elsewhere(lengths: Numbers, fleet: Fleet) -> tuple[Numbers, Numbers]:
    """For each worker: blocks of the best other store, and which that is."""
    if len(fleet.stores) < 2:
        return np.zeros(len(fleet), np.int64), np.full(len(fleet), -1)
    best, second = np.argsort(-lengths, kind="stable")[:2]
    source = np.where(fleet.store_of == best, second, best)
    return lengths[source], source
