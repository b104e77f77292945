"""A daemon that dies inside of a commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.kvstore.core import StoreCore
from forebay.kvstore.entry import SlotRef
from forebay.kvstore.extents import ClientLocks, PoolFiles
from forebay.kvstore.header import SlotState, granule_checksums
from forebay.kvstore.readopt import readopt
from tests.kvstore.support import SmallStore

EXTENT_BYTES = 1 << 16


class Died(Exception):
    """The daemon's last moment."""


class DyingPool(PoolFiles):
    """Dies before it marks a slot as committed."""

    def mark(self, slot: SlotRef, state: SlotState, generation: int) -> None:
        if state is SlotState.COMMITTED:
            raise Died
        super().mark(slot, state, generation)


def test_a_commit_that_a_crash_cut_short_is_a_free_slot_after_the_restart(tmp_path: Path) -> None:
    pool = DyingPool(tmp_path / "pool", EXTENT_BYTES)
    pool.open()
    pool.create(0)
    small = SmallStore()
    core = StoreCore(pool, tell=small.facts.append)
    core.place.add_extent(0, len(pool.map(0)))
    core.register(small.namespace)
    chunk = small.chunks(list(range(32)))[0]
    slot = core.reserve(small.client, small.namespace_id, "", chunk)
    data = small.payload(chunk)
    granule = small.namespace.groups[chunk.group].granule_bytes
    with pytest.raises(Died):
        core.commit(small.client, slot.reservation, granule_checksums(memoryview(data), granule))
    pool.close(remove=False)

    again = PoolFiles(tmp_path / "pool", EXTENT_BYTES)
    again.open()
    core = StoreCore(again, tell=small.facts.append)
    core.namespaces[small.namespace_id] = small.namespace
    found = readopt(core, again, again.existing(), ClientLocks(again.path / "clients").writers_of)
    assert (found.chunks, found.freed, found.quarantined) == (0, 1, 0)
    assert core.place.slots.used_bytes == 0
    again.close(remove=True)
