"""The router's innermost loops, compiled by numba: what numpy does in many passes, in one.

The arrays are those of `KeyTable`, `PrefixMatch` and `Fleet`; each loop means what the numpy form beside its caller
means, and the tests hold them against each other. Compiled when this module is first imported (seconds, once a
machine: numba keeps the result), never at a request. Raises ImportError without numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types

_Loop = TypeVar("_Loop", bound=Callable[..., Any])

_I8, _U8, _U4 = types.int64, types.uint64, types.uint32
_I8S, _U8S, _U4S, _F8S = _I8[::1], _U8[::1], _U4[::1], types.float64[::1]


def _given(kind: Any, dimensions: int = 1) -> Any:
    """An array that is only read."""
    return types.Array(kind, dimensions, "C", readonly=True)


_KEYS, _NUMBERS, _MEMBERS = _given(_U8), _given(_I8), _given(types.uint16)
_TAKEN = types.Tuple((_I8S, _I8S, _I8S))
_MATCH = types.Tuple((_I8, _I8S, _I8S, _I8S, _I8S))
_SECONDS = _given(types.float64)
_COSTS = types.Tuple((_F8S, _F8S, _F8S, _F8S, _F8S, types.boolean[::1], _I8S))
_REACH = types.Tuple((_I8S, _I8S, _I8S, _F8S, _I8S))

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_ZERO = np.uint64(0xD6E8FEB86659FD93)
_BASE, _STEP = np.uint64(0xB5297A4D3F84D5B5), np.uint64(0xA0761D6478BD642F)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)
_TINY, _CLEARLY = 1e-12, 1 - 1e-9
_WAYS, _WAY_BITS = 8, 3
_TAKEN_SET = 0xFFFFFFFF
"""No set's number."""
_TIERS, _TIER_BITS = 4, 2
_NESTED_MAX = 1 << 12
"""Runs of nested sets that are told apart; there can't be more than workers, plus one."""
_KEPT = 0b0110
"""Tiers of a store that others can fetch from: its memory and its disk."""
_USUAL = 16
"""Tokens of a block, nearly always."""
_AHEAD = 32
"""Buckets whose first keys are read before any is searched, so that memory is waited for once and not each time."""


def _compiled(signature: Any) -> Callable[[_Loop], _Loop]:
    def made(loop: _Loop) -> _Loop:
        try:
            return cast("_Loop", numba.njit(signature, cache=True)(loop))
        except RuntimeError:  # there is no place to keep the result in: then at every start
            return cast("_Loop", numba.njit(signature)(loop))

    return made


def _inlined(loop: _Loop) -> _Loop:
    return cast("_Loop", numba.njit(loop, inline="always"))


# --- the table of keys (see `KeyTable`) ----------------------------------------------------------------------


@_inlined
def _home(key: Any, shift: Any) -> Any:
    return np.int64((key * _SPREAD) >> shift)


@_inlined
def _look(flat: Any, passed: Any, bucket: Any, key: Any) -> Any:
    last, slot = passed.size - 1, np.int64(-1)
    while slot < 0:
        base = bucket << _WAY_BITS
        for way in range(_WAYS):
            if flat[base + way] == key:
                slot = base + way
                break
        if passed[bucket] == 0:
            break
        bucket = (bucket + 1) & last
    return slot


@_inlined
def _put(flat: Any, passed: Any, bucket: Any, key: Any) -> Any:
    """Into the first free place behind its home. There is one."""
    last, slot = passed.size - 1, np.int64(-1)
    while slot < 0:
        base = bucket << _WAY_BITS
        for way in range(_WAYS):
            if flat[base + way] == 0:
                slot = base + way
                flat[slot] = key
                break
        if slot < 0:
            passed[bucket] += np.uint32(1)
            bucket = (bucket + 1) & last
    return slot


@_inlined
def _named(key: Any) -> Any:
    return _ZERO if key == 0 else key


@_inlined
def _read_ahead(flat: Any, shift: Any, keys: Any, begin: Any, count: Any, homes: Any, heads: Any) -> None:
    """Write the homes of `count` keys from `begin` on, and the first key of each: memory is asked for all at once."""
    for at in range(count):
        homes[at] = _home(_named(keys[begin + at]), shift)
        heads[at] = flat[homes[at] << _WAY_BITS]


@_inlined
def _slot(flat: Any, passed: Any, home: Any, head: Any, key: Any) -> Any:
    """The slot of `key`, -1 if there is none; `head` is the first key of its home, read before."""
    return home << _WAY_BITS if head == key else _look(flat, passed, home, key)


@_compiled(_I8S(_U8S, _U4S, _U8, _KEYS))
def find(flat: Any, passed: Any, shift: Any, keys: Any) -> Any:
    """The slot of each key, -1 where there is none."""
    slots, homes, heads = np.empty(keys.size, np.int64), np.empty(_AHEAD, np.int64), np.empty(_AHEAD, np.uint64)
    for begin in range(0, keys.size, _AHEAD):
        count = min(_AHEAD, keys.size - begin)
        _read_ahead(flat, shift, keys, begin, count, homes, heads)
        for at in range(count):
            key = _named(keys[begin + at])
            slots[begin + at] = _slot(flat, passed, homes[at], heads[at], key)
    return slots


@_compiled(_I8(_U8S, _U4S, _U8, _KEYS, _I8S))
def insert(flat: Any, passed: Any, shift: Any, keys: Any, slots: Any) -> Any:
    """Write the slot of each key into `slots`, made where there was none; returns how many were made. There is room."""
    homes, heads, made = np.empty(_AHEAD, np.int64), np.empty(_AHEAD, np.uint64), 0
    for begin in range(0, keys.size, _AHEAD):
        count = min(_AHEAD, keys.size - begin)
        _read_ahead(flat, shift, keys, begin, count, homes, heads)
        for at in range(count):
            key = _named(keys[begin + at])
            slot = _slot(flat, passed, homes[at], heads[at], key)
            if slot < 0:
                slot = _put(flat, passed, homes[at], key)
                made += 1
            slots[begin + at] = slot
    return made


@_compiled(types.void(_U8S, _U4S, _U8, _NUMBERS))
def free(flat: Any, passed: Any, shift: Any, slots: Any) -> None:
    """Free these slots, which are in use, each once."""
    last = passed.size - 1
    for slot in slots:
        bucket, end = _home(flat[slot], shift), slot >> _WAY_BITS
        while bucket != end:
            passed[bucket] -= np.uint32(1)
            bucket = (bucket + 1) & last
        flat[slot] = 0


# --- who holds a batch (see `PrefixIndex`) --------------------------------------------------------------------


@_compiled(_TAKEN(_U4S, _NUMBERS, _I8S))
def take_sets(sets: Any, slots: Any, kind_of: Any) -> Any:
    """The different sets of these slots, how many slots have each, and which one each slot has: -1 for a slot that
    comes again. The slots' sets are overwritten; `give_sets` has to follow. `kind_of` as in `match`."""
    olds, counts = np.empty(slots.size, np.int64), np.empty(slots.size, np.int64)
    kinds, number = np.empty(slots.size, np.int64), 0
    for at in range(slots.size):
        old = np.int64(sets[slots[at]])
        if old == _TAKEN_SET:
            kinds[at] = -1
            continue
        kind = kind_of[old]
        if kind < 0:
            kind_of[old] = number
            kind = np.int64(number)
            olds[kind], counts[kind] = old, 0
            number += 1
        kinds[at] = kind
        counts[kind] += 1
        sets[slots[at]] = _TAKEN_SET
    for kind in range(number):
        kind_of[olds[kind]] = -1
    return olds[:number], counts[:number], kinds


@_compiled(_I8S(_U4S, _NUMBERS, _NUMBERS, _NUMBERS))
def give_sets(sets: Any, slots: Any, kinds: Any, news: Any) -> Any:
    """Each slot gets the set that is new for its kind. Returns the slots, each once, that nobody holds now."""
    bare, number = np.empty(slots.size, np.int64), 0
    for at in range(slots.size):
        if kinds[at] >= 0:
            new = news[kinds[at]]
            sets[slots[at]] = np.uint32(new)
            if new == 0:
                bare[number] = slots[at]
                number += 1
    return bare[:number]


# --- prompts -------------------------------------------------------------------------------------------------


@_inlined
def _summed(tokens: Any, weights: Any, begin: Any, count: Any) -> Any:
    total = np.uint64(0)
    for place in range(count):
        total += np.uint64(tokens[begin + place]) * weights[place]
    return total


@_compiled(_U8S(_U8, _given(_U4), _KEYS, _U8, _KEYS))
def prefix_keys(parent: Any, tokens: Any, weights: Any, depth: Any, extras: Any) -> Any:
    """See `forebay.scheduler.prefix_keys`."""
    size = weights.size
    keys, key = np.empty(tokens.size // size, np.uint64), parent
    if size == _USUAL:  # a loop of known length becomes a few vector instructions
        for block in range(keys.size):
            keys[block] = _summed(tokens, weights, block * _USUAL, _USUAL)
    else:
        for block in range(keys.size):
            keys[block] = _summed(tokens, weights, block * size, size)
    for block in range(keys.size):
        own = keys[block] + (depth + np.uint64(block)) * _STEP
        if block < extras.size:
            own += extras[block]
        own ^= own >> _S1
        own *= _M1
        own ^= own >> _S2
        own *= _M2
        own ^= own >> _S3
        key = key * _BASE + own
        keys[block] = key
    return keys


@_compiled(_MATCH(_U8S, _U4S, _U4S, _U8, _KEYS, _I8S, _I8[:, ::1]))
def match(flat: Any, passed: Any, sets: Any, shift: Any, keys: Any, kind_of: Any, room: Any) -> Any:
    """Leading keys that are there, in runs of equal sets: their number, and `starts`, `which`, `first` of
    `PrefixMatch`, and the number of each different set.

    `kind_of` is scratch, one -1 a set number, and left so; `room` is four rows as long as `keys` at least, given since
    fresh memory is paged in anew at every call.
    """
    starts, which, first, distinct = room[0], room[1], room[2], room[3]
    homes, heads = np.empty(_AHEAD, np.int64), np.empty(_AHEAD, np.uint64)
    blocks, runs, kinds, before = 0, 0, 0, np.int64(-1)
    for begin in range(0, keys.size, _AHEAD):
        count = min(_AHEAD, keys.size - begin)
        _read_ahead(flat, shift, keys, begin, count, homes, heads)
        for at in range(count):
            key = _named(keys[begin + at])
            slot = _slot(flat, passed, homes[at], heads[at], key)
            if slot < 0:
                break
            number = np.int64(sets[slot])
            if number != before:
                before = number
                if kind_of[number] < 0:
                    kind_of[number] = kinds
                    distinct[kinds], first[kinds] = number, blocks
                    kinds += 1
                starts[runs], which[runs] = blocks, kind_of[number]
                runs += 1
            blocks += 1
        if blocks < begin + count:
            break
    for kind in range(kinds):
        kind_of[distinct[kind]] = -1
    return blocks, starts[:runs].copy(), which[:runs].copy(), first[:kinds].copy(), distinct[:kinds].copy()


@_inlined
def _set_at(flat: Any, passed: Any, sets: Any, shift: Any, keys: Any, at: Any) -> Any:
    """The set of one key, -1 where it isn't there or there is no such place."""
    number = np.int64(-1)
    if at < keys.size:
        key = _named(keys[at])
        slot = _look(flat, passed, _home(key, shift), key)
        if slot >= 0:
            number = np.int64(sets[slot])
    return number


@_compiled(_MATCH(_U8S, _U4S, _U4S, _U8, _KEYS))
def match_nested(flat: Any, passed: Any, sets: Any, shift: Any, keys: Any) -> Any:
    """As `match`, where each block's holders are among those of the block before it: two equal sets have no other one
    between them. So a run's end is found by doubling steps and halving them."""
    starts, which = np.empty(_NESTED_MAX, np.int64), np.empty(_NESTED_MAX, np.int64)
    first, distinct = np.empty(_NESTED_MAX, np.int64), np.empty(_NESTED_MAX, np.int64)
    runs, at = 0, np.int64(0)
    number = _set_at(flat, passed, sets, shift, keys, at)
    while number >= 0 and runs < _NESTED_MAX:
        starts[runs], which[runs], first[runs], distinct[runs] = at, runs, at, number
        runs += 1
        begin, step = at, np.int64(1)
        while _set_at(flat, passed, sets, shift, keys, begin + step) == number:
            begin += step
            step *= 2
        end = begin + step  # the run's last block is in [begin, end)
        while end - begin > 1:
            middle = (begin + end) // 2
            if _set_at(flat, passed, sets, shift, keys, middle) == number:
                begin = middle
            else:
                end = middle
        at = end
        number = _set_at(flat, passed, sets, shift, keys, at)
    return at, starts[:runs], which[:runs], first[:runs], distinct[:runs]


# --- who has how much (see `reach`) --------------------------------------------------------------------------


@_compiled(_I8S(_I8, _NUMBERS, _MEMBERS, _NUMBERS, _I8))
def leading(blocks: Any, first: Any, members: Any, offsets: Any, holders: Any) -> Any:
    """For each of the first so many holders: how many leading blocks it has."""
    kinds = np.zeros(holders, np.int64)
    for kind in range(first.size):
        for at in range(offsets[kind], offsets[kind + 1]):
            member = np.int64(members[at])
            if member < holders and kinds[member] == kind:
                kinds[member] = kind + 1
    for holder in range(holders):
        had = kinds[holder]
        kinds[holder] = blocks if had == first.size else first[had]
    return kinds


@_inlined
def _until(tiers: Any, first: Any, blocks: Any, one: Any, other: Any, wanted: Any) -> Any:
    """Blocks before the first one that neither of two owners has in a wanted tier."""
    found = blocks
    for kind in range(first.size):
        if (tiers[one, kind] | tiers[other, kind]) & wanted == 0:
            found = first[kind]
            break
    return found


@_compiled(
    _REACH(
        _I8, _NUMBERS, _NUMBERS, _NUMBERS, _MEMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _I8,
        _given(types.float64, 2), _NUMBERS, _I8, _I8,
    )
)  # fmt: skip
def reach(
    blocks: Any, starts: Any, which: Any, first: Any, members: Any, offsets: Any, own: Any, shared: Any, kept: Any,
    owners: Any, load_s: Any, store_of: Any, size: Any, most: Any,
) -> Any:  # fmt: skip
    """The arrays of `Reach`, in their order, of blocks of `size` tokens, at most `most` tokens of each.

    `own`, `shared` and `kept` number owners: a worker's own, its store (`owners`: none), each store; `store_of` is each
    worker's place in `kept`.
    """
    tiers = np.zeros((owners + 1, first.size), np.uint8)
    for kind in range(first.size):
        for at in range(offsets[kind], offsets[kind + 1]):
            owner = np.int64(members[at]) >> _TIER_BITS
            if owner < owners:
                tiers[owner, kind] |= np.uint8(1 << (np.int64(members[at]) & (_TIERS - 1)))
    device, near, load = np.empty(own.size, np.int64), np.empty(own.size, np.int64), np.zeros(own.size)
    for worker in range(own.size):
        one, other = own[worker], shared[worker]
        device[worker] = _until(tiers, first, blocks, one, other, 1)
        near[worker] = _until(tiers, first, blocks, one, other, (1 << _TIERS) - 1)
        for run in range(starts.size):
            begin = max(starts[run], device[worker])
            end = min(starts[run + 1] if run + 1 < starts.size else blocks, near[worker])
            if begin >= end:
                if end == near[worker]:
                    break
                continue
            has, tier = np.int64(tiers[one, which[run]] | tiers[other, which[run]]), 0
            while not has & (1 << tier):
                tier += 1
            load[worker] += (end - begin) * load_s[worker, tier]
    fetched, best, second = np.zeros(max(2, kept.size), np.int64), np.int64(-1), np.int64(-1)
    for store in range(kept.size):
        fetched[store] = _until(tiers, first, blocks, kept[store], kept[store], _KEPT)
        if best < 0 or fetched[store] > fetched[best]:
            best, second = np.int64(store), best
        elif second < 0 or fetched[store] > fetched[second]:
            second = np.int64(store)
    far, source = np.empty(own.size, np.int64), np.empty(own.size, np.int64)
    for worker in range(own.size):
        other = second if store_of[worker] == best else best
        source[worker] = other if second >= 0 and fetched[other] > near[worker] else -1
        far[worker] = min(most, size * max(near[worker], fetched[other] if second >= 0 else 0))
        device[worker], near[worker] = min(most, size * device[worker]), min(most, size * near[worker])
        load[worker] *= size
    return device, near, far, load, source


# --- what it costs there (see `cost`) ------------------------------------------------------------------------


@_inlined
def _prefill(begin: Any, end: Any, attention: Any, prefill_s: Any) -> Any:
    return (end - begin) * (1.0 + (end + begin) / (2.0 * attention)) * prefill_s


@_inlined
def _candidate(
    tokens: Any, device: Any, end: Any, load: Any, wait: Any, link: Any, attention: Any, prefill_s: Any,
    overlaps: Any,
) -> Any:  # fmt: skip
    """Of one worker and one end of what is loaded: cut, compute, work, and tokens that aren't computed."""
    prefix, rest = _prefill(device, end, attention, prefill_s), _prefill(end, tokens, attention, prefill_s)
    cut, share = 0.0, 0.0
    if end > device:
        left = max(link + load - wait, 0.0)
        if overlaps:
            stands_for = prefix * min(left / max(load, _TINY), 1.0)
            cut = stands_for * left / max(stands_for + left, _TINY)
            share = min(cut / max(prefix, _TINY), 1.0)
        else:
            cut = min(left, prefix)
            share = 0.0 if left < prefix else 1.0
    return cut, rest, rest + prefix * share, end - np.int64((end - device) * share)


@_compiled(_COSTS(_I8, *[_NUMBERS] * 3, *[_SECONDS] * 3, _NUMBERS, *[_SECONDS] * 5, _given(types.boolean)))
def estimate(
    tokens: Any, device: Any, near: Any, far: Any, load_s: Any, wait_s: Any, link_s: Any, decoding: Any,
    attention: Any, prefill_s: Any, move_s: Any, latency_s: Any, decode_slows: Any, overlaps: Any,
) -> Any:  # fmt: skip
    """For each worker the better of computing where the prefix is and moving the rest of it: load, cut, compute, time
    to first token, work, whether it is moved, tokens that aren't computed."""
    count = device.size
    load, cut, compute = np.empty(count), np.empty(count), np.empty(count)
    ttft, work, moves, cached = np.empty(count), np.empty(count), np.zeros(count, np.bool_), np.empty(count, np.int64)
    for at in range(count):
        rate = prefill_s[at] * (1.0 + decode_slows[at] * decoding[at])
        for moved in range(2):
            end = far[at] if moved else near[at]
            if moved and end <= near[at]:
                break
            loading = load_s[at] + latency_s[at] + (end - near[at]) * move_s[at] if end > device[at] else 0.0
            found = _candidate(
                tokens, device[at], end, loading, wait_s[at], link_s[at], attention[at], rate, overlaps[at]
            )
            total = wait_s[at] + found[0] + found[1]
            if not moved or total < ttft[at] * _CLEARLY:
                moves[at] = bool(moved)
                load[at], cut[at], compute[at], work[at], cached[at] = loading, found[0], found[1], found[2], found[3]
                ttft[at] = total
    return load, cut, compute, ttft, work, moves, cached
