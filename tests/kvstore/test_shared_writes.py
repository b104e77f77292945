"""One chunk that several connections of an engine write, each its part: visible once, when all have written."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forebay.errors import RequestRefused, StoreError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.core import Client
from forebay.kvstore.header import SlotState, granule_checksums
from forebay.kvstore.limits import Limits
from forebay.kvstore.protocol import NewChunk, Slot, Written
from forebay.testing.standstill import pause
from tests.kvstore.running import Store, get, payload_of, prompt_of
from tests.kvstore.support import CHUNK, SmallStore, namespace

TOKENS = [7] * CHUNK


@dataclass
class Engine:
    """Ranks of one engine over a small store; each writes every n-th byte."""

    store: SmallStore
    count: int = 3
    group: bytes = b"engine"
    ranks: list[Client] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [self.group.ljust(15, b".") + bytes([rank]) for rank in range(self.count)]
        self.ranks = [Client(name, group=self.group) for name in names]

    def reserve(self, rank: int, chunk: NewChunk) -> Slot:
        client = self.ranks[rank]
        return self.store.core.reserve(client, self.store.namespace_id, "", chunk, writers=self.count)

    def write(self, rank: int, slot: Slot, chunk: NewChunk) -> None:
        data = self.store.payload(chunk)
        memory = self.store.memory.extents[slot.extent]
        for at in range(rank, len(data), self.count):
            memory[slot.payload_offset + at] = data[at]

    def written(self, rank: int, slot: Slot) -> bool:
        return self.store.core.reservations.part_written(self.ranks[rank], slot.reservation)

    def sums(self, slot: Slot, chunk: NewChunk) -> bytes:
        granule = self.store.namespace.groups[chunk.group].granule_bytes
        length = len(self.store.payload(chunk))
        memory = memoryview(self.store.memory.extents[slot.extent])
        return granule_checksums(memory[slot.payload_offset : slot.payload_offset + length], granule)


def small(count: int = 3, **limits: float) -> tuple[SmallStore, Engine, NewChunk]:
    store = SmallStore(limits=Limits(**limits))  # type: ignore[arg-type]
    return store, Engine(store, count), store.chunks(TOKENS)[0]


def test_all_ranks_get_one_slot_and_the_last_one_commits_it_for_all() -> None:
    store, engine, chunk = small()
    slots = [engine.reserve(rank, chunk) for rank in range(3)]
    assert len({(slot.extent, slot.payload_offset) for slot in slots}) == 1
    assert len({slot.reservation for slot in slots}) == 3
    last = []
    for rank in (1, 0, 2):
        engine.write(rank, slots[rank], chunk)
        last.append(engine.written(rank, slots[rank]))
        assert store.core.table.get(0, chunk.key).state is SlotState.RESERVED  # type: ignore[union-attr]
    assert last == [False, False, True]
    entry = store.core.commit(engine.ranks[2], slots[2].reservation, engine.sums(slots[2], chunk))
    assert entry is not None and store.bytes_of(entry) == store.payload(chunk)
    assert store.core.reserved_bytes == 0 and not any(rank.reservations for rank in engine.ranks)
    assert len(store.facts) == 1, "announced once"


def test_a_rank_that_comes_when_the_chunk_is_there_is_told_so() -> None:
    store, engine, chunk = small(2)
    slots = [engine.reserve(rank, chunk) for rank in range(2)]
    for rank in range(2):
        engine.write(rank, slots[rank], chunk)
        engine.written(rank, slots[rank])
    assert store.core.commit(engine.ranks[0], slots[0].reservation, engine.sums(slots[0], chunk)) is not None
    assert engine.reserve(1, chunk).status == "exists"


def test_others_are_kept_out_of_a_shared_write() -> None:
    store, engine, chunk = small(2)
    assert engine.reserve(0, chunk).status == "reserved"
    assert engine.reserve(0, chunk).status == "busy", "a rank has one part"
    assert store.core.reserve(store.client, store.namespace_id, "", chunk).status == "busy"
    assert Engine(store, 2, b"another").reserve(1, chunk).status == "busy"
    assert Engine(store, 3).reserve(1, chunk).status == "busy", "how many write it must be agreed"
    assert engine.reserve(1, chunk).status == "reserved"
    late = Client(b"engine".ljust(16, b"!"), group=b"engine")
    assert store.core.reserve(late, store.namespace_id, "", chunk, writers=2).status == "busy"


def test_checksums_before_all_have_written_end_the_write_and_nothing_becomes_visible() -> None:
    store, engine, chunk = small(2)
    slots = [engine.reserve(rank, chunk) for rank in range(2)]
    engine.write(0, slots[0], chunk)
    assert store.core.commit(engine.ranks[0], slots[0].reservation, engine.sums(slots[0], chunk)) is None
    assert store.core.table.get(0, chunk.key) is None and not store.facts
    assert store.core.quarantined_slots == 1, "the other rank may be writing"
    assert not engine.written(1, slots[1]) and store.core.quarantined_slots == 0, "until it says that it isn't"
    assert store.core.quarantined_bytes == store.core.reserved_bytes == 0


@pytest.mark.parametrize("ends", ["abort", "dies", "times out", "leaves"])
def test_one_rank_that_gives_up_ends_it_for_all_and_the_slot_waits_for_those_who_write(ends: str) -> None:
    store, engine, chunk = small(3, reservation_s=10.0)
    slots = [engine.reserve(rank, chunk) for rank in range(3)]
    engine.written(1, slots[1])
    core, quitter = store.core, engine.ranks[0]
    if ends == "abort":
        core.abort(quitter, slots[0].reservation)
    elif ends == "times out":
        store.now = 11.0
        while core.tick():
            pass
    else:
        core.drop_client(quitter, writing=ends == "leaves")
        core.chores.finish()
    assert core.table.get(0, chunk.key) is None and core.reserved_bytes == 0
    assert core.quarantined_slots == 1
    assert not engine.written(2, slots[2])
    assert core.quarantined_slots == (1 if ends in ("times out", "leaves") else 0), "rank 1 had written already"
    core.end_quarantine(quitter.id)
    core.chores.finish()
    assert core.quarantined_slots == core.quarantined_bytes == 0
    assert engine.reserve(1, chunk).status == "reserved", "the next try finds the key free"


def test_books_are_right_whatever_ranks_do() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        store = SmallStore(extents=2, limits=Limits(reservation_s=5.0))
        engine = Engine(store, rng.choice((2, 3)))
        chunks = [store.chunks([serial] * CHUNK)[0] for serial in range(4)]
        held: list[tuple[int, Slot, NewChunk]] = []
        for _ in range(150):
            action, rank = rng.random(), rng.randrange(engine.count)
            if action < 0.45:
                chunk = rng.choice(chunks)
                slot = engine.reserve(rank, chunk)
                if slot.status == "reserved":
                    held.append((rank, slot, chunk))
            elif held and action < 0.85:
                rank, slot, chunk = held.pop(rng.randrange(len(held)))
                engine.write(rank, slot, chunk)
                if engine.written(rank, slot):
                    entry = store.core.commit(engine.ranks[rank], slot.reservation, engine.sums(slot, chunk))
                    if entry is not None:
                        assert store.bytes_of(entry) == store.payload(chunk)
                        store.core.unpin(entry)
            elif held and action < 0.92:
                rank, slot, chunk = held.pop(rng.randrange(len(held)))
                store.core.abort(engine.ranks[rank], slot.reservation)
            elif action < 0.96:
                store.now += rng.choice((1.0, 6.0))
                store.core.tick()
            else:
                chunk = rng.choice(chunks)
                entry = store.core.table.get(0, chunk.key)
                if entry is not None and entry.state is SlotState.COMMITTED:
                    store.core.retire(entry, "cleared")
            check(store)
        for client in engine.ranks:  # parts that wait for ranks that never came end with their connections
            store.core.drop_client(client, writing=False)
            store.core.end_quarantine(client.id)
            store.core.chores.finish()
        for client in engine.ranks:
            store.core.end_quarantine(client.id)
            store.core.chores.finish()
        check(store)
        assert store.core.reserved_bytes == store.core.quarantined_bytes == store.core.quarantined_slots == 0


def check(store: SmallStore) -> None:
    core = store.core
    reserved = [entry for entry in core.table if entry.state is SlotState.RESERVED]
    assert core.reserved_bytes == sum(entry.slot_bytes for entry in reserved)
    assert set(core.reservations.shared) == set(reserved)
    held = {slot for owner in core.quarantine for slot in core.quarantine.slots_of(owner)}
    assert core.quarantined_slots == len(held)
    assert not held & {entry.slot for entry in core.table}, "a slot that somebody may write is nobody else's"


# --- real processes ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    running = Store(tmp_path)
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0
    assert not running.pool.exists()


def chunk_of(tokens: list[int]) -> NewChunk:
    return prompt_of(namespace(), tokens).chunk(0, 0)


def test_two_processes_write_halves_and_the_store_serves_the_whole(store: Store) -> None:
    spec, chunk = namespace(), chunk_of(TOKENS)
    data = payload_of(spec, 0, chunk.key, CHUNK)
    with StoreClient(store.address, group=b"g" * 16) as one, StoreClient(store.address, group=b"g" * 16) as two:
        for client in (one, two):
            client.register(spec)
        [first] = one.reserve(spec.id, "", [chunk], writers=2).slots
        [second] = two.reserve(spec.id, "", [chunk], writers=2).slots
        half = len(data) // 2
        one.room(first, len(data))[:half] = data[:half]
        told = one.commit([Written(first.reservation, b"")])
        assert (told.committed, told.to_hash) == (0, [])
        two.room(second, len(data))[half:] = data[half:]
        told = two.commit([Written(second.reservation, b"")])
        assert (told.committed, told.to_hash) == (0, [second.reservation])
        sums = granule_checksums(two.room(second, len(data)), spec.groups[0].granule_bytes)
        assert two.commit([Written(second.reservation, sums)]).committed == 1
        full = prompt_of(spec, TOKENS).chunk(1, 0)
        [slot] = one.reserve(spec.id, "", [full]).slots
        window = payload_of(spec, 1, full.key, CHUNK)
        one.room(slot, len(window))[:] = window
        one.commit([Written(slot.reservation, granule_checksums(memoryview(window), spec.groups[1].granule_bytes))])
        assert get(one, spec, TOKENS).hit == CHUNK


def test_several_writers_without_a_group_are_refused(store: Store) -> None:
    with StoreClient(store.address) as client:
        client.register(namespace())
        with pytest.raises(RequestRefused, match="group"):
            client.reserve(namespace().id, "", [chunk_of(TOKENS)], writers=2)


RANK = """
import sys, time
from forebay.kvstore.client import StoreClient
from tests.kvstore.support import namespace
from tests.kvstore.test_shared_writes import TOKENS, chunk_of
client = StoreClient(sys.argv[1], group=b"g" * 16)
client.__enter__()
client.register(namespace())
print(client.reserve(namespace().id, "", [chunk_of(TOKENS)], writers=2).slots[0].status, flush=True)
time.sleep(600)
"""


def test_a_slot_stays_held_over_the_stores_death_while_any_of_its_ranks_may_write(store: Store) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, store.address], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["reserved\n"] * 2
        pause(ranks[1].pid)
        store.stop(signal.SIGKILL)
        ranks[0].kill()
        ranks[0].wait(10)
        store.start()
        assert held(store) == 1, "the one that is stopped may go on writing"
        store.stop(signal.SIGKILL)
        store.start()
        assert held(store) == 1, "also after the next death"
        ranks[1].kill()
        ranks[1].wait(10)
        until = time.monotonic() + 60
        while held(store) and time.monotonic() < until:
            time.sleep(0.05)
        assert held(store) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)


def held(store: Store) -> float:
    try:
        with StoreClient(store.address) as client:
            return client.stats().values["host.quarantined_slots"]
    except StoreError:
        return -1.0
