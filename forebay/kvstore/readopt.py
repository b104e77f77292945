"""After a crash: what the pool still holds.

Committed chunks come back from their headers, unverified: their bytes are checked before they are first
served. Slots that a living process may still be writing go to quarantine; all others are free.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forebay.errors import CorruptChunk, ForeignChunk
from forebay.kvstore.core import StoreCore
from forebay.kvstore.entry import Entry, SlotRef
from forebay.kvstore.extents import PoolFiles
from forebay.kvstore.header import (
    ChunkHeader,
    SlotState,
    decode_header,
    first_bad_granule,
    header_bytes,
    slot_generation,
    slot_state,
)
from forebay.kvstore.layout import granule_count, payload_bytes

GENERATION_MAX = 1 << 63
"""No clock gives such a number; one that did would be followed by numbers that don't fit into a slot."""


@dataclass
class Adopted:
    """What a scan of the pool found. `foreign` are committed slots with headers of another version, it seems."""

    chunks: int = 0
    freed: int = 0
    quarantined: int = 0
    corrupt: int = 0
    foreign: list[SlotRef] = field(default_factory=list)


def readopt(
    core: StoreCore, pool: PoolFiles, extents: list[int], writers: Callable[[bytes], Sequence[bytes]]
) -> Adopted:
    """Take the left extents into the core. Reads headers only. `writers` are the living processes that an owner stands
    for: they may still write.

    Raises OtherVersion if there are several chunks and all seem to be of another version; they stay as they are.
    """
    found = Adopted()
    with _no_garbage():
        for extent in extents:
            view = pool.map(extent)
            core.place.add_extent(extent, len(view))
            slot_bytes = pool.cut_of(extent)
            if slot_bytes == 0:
                continue
            core.place.slots.cut(extent, slot_bytes)
            for offset in list(core.place.slots.extents[extent].free):
                _adopt_slot(core, SlotRef(extent, offset), view[offset : offset + slot_bytes], writers, found)
            core.place.slots.uncut_if_empty(extent)
    if len(found.foreign) > 1 and not found.chunks:
        pool.refuse(f"{len(found.foreign)} chunks with other headers")
    for slot in found.foreign:  # one, or among good ones: damaged, rather
        _drop_corrupt(core, slot, found)
    return found


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Everything that is made here stays: looking for garbage among it costs a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _adopt_slot(
    core: StoreCore, slot: SlotRef, memory: memoryview, writers: Callable[[bytes], Sequence[bytes]], found: Adopted
) -> None:
    state, generation = slot_state(memory), slot_generation(memory)
    if generation >= GENERATION_MAX:
        _drop_corrupt(core, slot, found)
        return
    core.saw_generation(generation)
    if state is SlotState.FREE:
        return
    try:
        header = decode_header(memory)
    except CorruptChunk as error:
        if isinstance(error, ForeignChunk) and state is SlotState.COMMITTED:
            found.foreign.append(slot)
        else:
            _drop_corrupt(core, slot, found)
        return
    unfinished = state in (SlotState.RESERVED, SlotState.PROMOTING)
    if unfinished and (living := writers(header.owner)):
        core.place.slots.claim(slot)
        core.place.hold_slot(slot, header.tenant)
        for writer in living:
            core.hold_slot(writer, slot, len(memory))
        found.quarantined += 1
    elif state is SlotState.COMMITTED and _belongs(core, header, len(memory)):
        core.adopt(_entry(core, header, slot, memory))
        found.chunks += 1
    else:
        core.memory.mark(slot, SlotState.FREE, 0)
        found.freed += 1


def _drop_corrupt(core: StoreCore, slot: SlotRef, found: Adopted) -> None:
    found.corrupt += 1
    core.counters.add("host.corrupt")
    core.memory.mark(slot, SlotState.FREE, 0)


def _belongs(core: StoreCore, header: ChunkHeader, room: int) -> bool:
    namespace = core.namespaces.get(header.namespace)
    if namespace is None or not header.checksums or header.group >= len(namespace.groups):
        return False
    group = namespace.groups[header.group]
    expected = payload_bytes(group, header.token_count)
    return (
        header.payload_length == expected
        and len(header.checksums) == 8 * granule_count(group, header.token_count)
        and header_bytes(header.token_count, len(header.extra)) + expected <= room
        and core.table.get(header.group, header.key) is None
    )


def _entry(core: StoreCore, header: ChunkHeader, slot: SlotRef, memory: memoryview) -> Entry:
    return Entry(
        namespace=header.namespace, group=header.group, key=header.key, parent=header.parent, start=header.start,
        token_count=header.token_count, tenant=header.tenant, home=core.memory, slot=slot, slot_bytes=len(memory),
        header_bytes=header_bytes(header.token_count, len(header.extra)),
        payload_length=header.payload_length, generation=slot_generation(memory), state=SlotState.COMMITTED,
        verified=False,
    )  # fmt: skip


def is_intact(pool: PoolFiles, entry: Entry) -> bool:
    """Read the whole chunk and compare its checksums. The caller has it pinned; may run on any thread."""
    try:
        header = entry.header()
    except CorruptChunk:
        return False
    view = pool.views[entry.slot.extent]
    payload = view[entry.payload_offset : entry.payload_offset + entry.payload_length]
    return first_bad_granule(payload, header.granule_bytes, header.checksums) is None
