"""The pool that a killed store leaves: extent headers, slot headers, payloads, remembered namespaces, the lock file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.errors import ForebayError
from forebay.kvstore.core import Client, StoreCore
from forebay.kvstore.extents import PoolFiles
from forebay.kvstore.header import SlotState, granule_checksums
from forebay.kvstore.identity import decode_namespace, encode_namespace
from forebay.kvstore.lookup import match
from forebay.kvstore.protocol import NewChunk
from forebay.kvstore.readopt import is_intact, readopt
from tests.formats.mutations import PATTERNS, cuts
from tests.kvstore.running import payload_of, prompt_of
from tests.kvstore.support import CHUNK, namespace

EXTENT_BYTES = 64 << 10
SPEC = namespace()
TOKENS = list(range(1, 2 * CHUNK + 17))
WRITER = b"w" * 16


@dataclass
class Left:
    """A dead store's pool: five committed chunks and one that a living process was writing."""

    folder: Path

    @property
    def extent(self) -> Path:
        return self.folder / "extent-000000"


def chunks() -> list[NewChunk]:
    prompt = prompt_of(SPEC, TOKENS)
    return [prompt.chunk(g, p) for p in range(prompt.positions) for g in range(len(SPEC.groups))]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    folder = tmp_path_factory.mktemp("pool") / "pool"
    pool = PoolFiles(folder, EXTENT_BYTES)
    pool.open()
    core = StoreCore(pool, tell=lambda fact: None, first_generation=1 << 60)
    pool.create(0)
    core.place.add_extent(0, len(pool.map(0)))
    client = Client(WRITER)
    core.register(SPEC)
    pool.save_namespace(SPEC.id, encode_namespace(SPEC))
    for number, chunk in enumerate(chunks()):
        slot = core.reserve(client, SPEC.id, "tenant", chunk)
        assert slot.status == "reserved"
        data = payload_of(SPEC, chunk.group, chunk.key, len(chunk.tokens) // 4)
        pool.views[0][slot.payload_offset : slot.payload_offset + len(data)] = data
        if number < 5:
            sums = granule_checksums(memoryview(data), SPEC.groups[chunk.group].granule_bytes)
            entry = core.commit(client, slot.reservation, sums)
            assert entry is not None
            core.unpin(entry)
    pool.close(remove=False)
    return Left(folder)


def adopt(left: Left) -> int:
    """Start on the pool as a store would; every chunk that is adopted and intact has the right bytes. How many."""
    pool = PoolFiles(left.folder, EXTENT_BYTES)
    try:
        pool.open()
        core = StoreCore(pool, tell=lambda fact: None, first_generation=1 << 60)
        for encoded in pool.saved_namespaces():
            core.remember(decode_namespace(encoded))
        readopt(core, pool, pool.existing(), lambda owner: [owner] if owner == WRITER else [])
        served = 0
        for entry in list(core.table):
            intact = is_intact(pool, entry)
            core.verified(entry, intact)
            if intact:
                memory = pool.views[entry.slot.extent]
                payload = bytes(memory[entry.payload_offset : entry.payload_offset + entry.payload_length])
                assert payload == payload_of(SPEC, entry.group, entry.key, entry.token_count), "wrong bytes"
                assert entry.key in {chunk.key for chunk in chunks()}
                served += 1
            else:
                assert entry.state is not SlotState.COMMITTED, "what isn't intact is not served"
        if SPEC.id in core.namespaces:
            match(core, prompt_of(SPEC, TOKENS))
            store_one_more(core, pool)
        return served
    finally:
        pool.close(remove=False)


def store_one_more(core: StoreCore, pool: PoolFiles) -> None:
    """Whatever it has adopted, the store takes new chunks where there is room."""
    chunk = prompt_of(SPEC, [999] * CHUNK).chunk(0, 0)
    slot = core.reserve(Client(b"n" * 16), SPEC.id, "", chunk)
    assert slot.status in ("reserved", "full")
    assert slot.generation < 1 << 64


class Patched:
    """A file with other contents, for the time of one look at it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.good = file.read_bytes()

    def __enter__(self) -> Patched:
        return self

    def put(self, data: bytes) -> None:
        self._file.write_bytes(data)

    def __exit__(self, *error: object) -> None:
        self._file.write_bytes(self.good)


def used_bytes(data: bytes) -> list[int]:
    """Places where something is, or a little behind: the first block of the extent, headers, some of each payload."""
    places: set[int] = set(range(0, 40))
    at = data.find(b"FOREBAY1")
    while at >= 0:
        header = data[at : at + 4096].rstrip(b"\0")
        places |= set(range(at, at + len(header) + 4))
        places |= set(range(at + 4096, at + 8192, 337))
        at = data.find(b"FOREBAY1", at + 1)
    return sorted(place for place in places if place < len(data))


def test_the_untouched_pool_is_adopted_whole(left: Left) -> None:
    with Patched(left.extent):
        assert adopt(left) == 5


def test_any_flipped_byte_of_an_extent_costs_at_most_what_it_describes(left: Left) -> None:
    counts = set()
    with Patched(left.extent) as file:
        for number, at in enumerate(used_bytes(file.good)):
            pattern = PATTERNS[number % len(PATTERNS)]
            file.put(file.good[:at] + bytes([file.good[at] ^ pattern]) + file.good[at + 1 :])
            try:
                counts.add(adopt(left))
            except ForebayError:
                assert at < 8, "only the extent's magic says that it is another version's"
    assert counts <= {0, 4, 5}, "the extent's header describes all of them, a slot's one"
    assert 4 in counts and 5 in counts


def test_the_worst_generation_is_no_generation(left: Left) -> None:
    with Patched(left.extent) as file:
        at = file.good.find(b"FOREBAY1")
        file.put(file.good[: at + 16] + b"\xff" * 8 + file.good[at + 24 :])
        assert adopt(left) == 4


def test_an_extent_cut_at_any_length_is_none(left: Left) -> None:
    with Patched(left.extent) as file:
        for beginning in cuts(file.good, step=1499):
            file.put(beginning)
            assert adopt(left) == 0


def test_a_remembered_namespace_with_a_flipped_byte_or_cut_short_is_forgotten(left: Left) -> None:
    (saved,) = (left.folder / "namespaces").iterdir()
    extent = Patched(left.extent)
    with Patched(saved) as file, extent:
        damaged = [*cuts(file.good)]
        damaged += [file.good[:i] + bytes([file.good[i] ^ 0x20]) + file.good[i + 1 :] for i in range(len(file.good))]
        for data in damaged:
            file.put(data)
            assert adopt(left) == 0
            extent.put(extent.good)
        file.put(file.good)
        assert adopt(left) == 5


def test_a_damaged_lock_file_says_nothing_or_another_version(left: Left) -> None:
    adopt(left)  # which notes the formats
    refused = []
    with Patched(left.folder / "lock") as file, Patched(left.extent) as extent:
        for at in range(len(file.good)):
            for data in (file.good[:at] + bytes([file.good[at] ^ 0x01]) + file.good[at + 1 :], file.good[:at]):
                file.put(data)
                extent.put(extent.good)
                try:
                    assert adopt(left) == 5
                except ForebayError as error:
                    refused.append(str(error))
    assert refused and all("another version" in reason for reason in refused)
