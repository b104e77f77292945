"""A table with very many chunks: nothing walks it at once, whatever ends, is listed or is cleared.

FOREBAY_CHUNKS=1000000 pytest tests/kvstore/test_large_table.py     the long form
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice

import pytest

from benchmarks.synthetic import LINKS, NAMESPACE, chain_keys, chain_tokens, filled_core, key
from forebay.kvstore.chores import STEP_CHUNKS
from forebay.kvstore.clearing import Scope
from forebay.kvstore.core import SLICE_STEPS, Client, StoreCore
from forebay.kvstore.entry import Entry
from forebay.kvstore.lookup import Prompt, match, pin

CHUNKS = int(os.environ.get("FOREBAY_CHUNKS", "50000"))
PINS = CHUNKS // 10
LIMIT = LINKS * NAMESPACE.chunk_tokens


@pytest.fixture(scope="module")
def core() -> StoreCore:
    return filled_core(CHUNKS)


def look_up(core: StoreCore, client: Client, chain: int) -> int:
    """Look one chain up; its lease."""
    prompt = Prompt(NAMESPACE.id, NAMESPACE, key(-1), chain_tokens(chain), chain_keys(chain), LIMIT)
    pinned = pin(core, client, match(core, prompt))
    assert pinned.hit == LIMIT
    return pinned.lease


class Counted:
    """How often the core lets go of an entry or takes one out, one slice after the other."""

    def __init__(self, core: StoreCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work = 0
        leave, released_all = core.place.leave, core.place.released_all

        def left(entry: Entry, **more: bool) -> None:
            self.work += 1
            leave(entry, **more)

        def released(entries: Sequence[Entry]) -> None:
            self.work += len(entries)
            released_all(entries)

        monkeypatch.setattr(core.place, "leave", left)
        monkeypatch.setattr(core.place, "released_all", released)


def test_a_client_that_held_very_many_pins_goes_in_slices_and_others_are_served_between(
    core: StoreCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, other = Client(b"h" * 16), Client(b"o" * 16)
    chains = PINS // LINKS
    for chain in range(chains):
        look_up(core, holder, chain)
    evictable = core.place.accounts.evictable_entries
    counted = Counted(core, monkeypatch)
    core.drop_client(holder, writing=False)
    assert counted.work == 0, "its end costs nobody anything"
    slices = 0
    while True:
        before, more = counted.work, core.tick()
        assert counted.work - before < SLICE_STEPS + STEP_CHUNKS
        if not more:
            break
        slices += 1
        core.release(other, [look_up(core, other, chains + slices % (CHUNKS // LINKS - chains))])
    assert slices >= PINS // (SLICE_STEPS + STEP_CHUNKS) - 1
    assert core.place.accounts.evictable_entries == evictable + PINS


def test_listing_goes_by_pages_and_sees_every_chunk_once(core: StoreCore) -> None:
    seen: set[int] = set()
    cursor, pages = 0, 0
    while True:
        page = core.place.page(cursor, 500)
        assert len(page.entries) <= 500
        seen.update(map(id, page.entries))
        pages, cursor = pages + 1, page.cursor
        if not cursor:
            break
    assert len(seen) == len(core.table) == CHUNKS and pages >= CHUNKS // 500


def test_a_walk_survives_whatever_comes_and_goes(core: StoreCore) -> None:
    steps = core.place.walk()
    first = [entry for some in islice(steps, 20) for entry in some]
    for entry in first[:50]:
        core.retire(entry, "evicted")
    rest = [entry for some in steps for entry in some]
    assert len(first) + len(rest) == CHUNKS and len({id(entry) for entry in (*first, *rest)}) == CHUNKS


def test_a_clear_of_everything_goes_in_slices(core: StoreCore, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, held = Counted(core, monkeypatch), len(core.table)
    clearing = core.clear(Scope(NAMESPACE.id))
    slices = 0
    while not clearing.done:
        before = counted.work
        core.tick()
        slices += 1
        assert counted.work - before < SLICE_STEPS + STEP_CHUNKS
    assert slices >= held // SLICE_STEPS
    assert clearing.chunks == held and len(core.table) == core.place.slots.used_bytes == 0
