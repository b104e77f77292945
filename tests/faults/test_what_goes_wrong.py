"""What users of other stores have met in the open, tried on this one, with the answer that is right.

The numbers are of public threads. What another test states already is only named in docs/guarantees.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forebay.errors import RequestRefused, StoreUnavailable
from forebay.kvstore.client import AsyncStoreClient, StoreClient
from forebay.kvstore.header import granule_checksums
from forebay.kvstore.identity import Namespace
from forebay.kvstore.protocol import ChunkRead, Found, Written
from tests.faults.calls import Calls, Fault
from tests.faults.inprocess import SPEC, InProcessDaemon, ThreadChild, config, pull, push, settled, whole
from tests.kvstore.running import get, payload_of, prompt_of, put
from tests.kvstore.support import CHUNK, namespace
from tests.kvstore.test_daemon_files import FileStore, look

TOKENS = list(range(1, 4 * CHUNK + 1))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileStore]:
    """One store with files for all tests of this module; each begins with nothing in it."""
    running = FileStore(tmp_path_factory.mktemp("store"))
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0
    assert not running.pool.exists()


@pytest.fixture(autouse=True)
def emptied(request: pytest.FixtureRequest) -> None:
    if "store" in request.fixturenames:
        running = request.getfixturevalue("store")
        if running.process.poll() is not None:
            running.start()
        with StoreClient(running.address) as client:
            client.clear()


# --- silently wrong bytes ----------------------------------------------------------------------------------


def test_a_store_that_fails_half_way_is_a_miss_and_can_be_tried_again_at_once(store: FileStore) -> None:
    """LMCache#4991, Mooncake#849: the writer dies with half of its bytes written."""
    child = os.fork()
    if child == 0:
        client = StoreClient(store.address).__enter__()
        client.register(namespace())
        chunk = prompt_of(namespace(), TOKENS).chunk(0, 0)
        slot = client.reserve(namespace().id, "", [chunk]).slots[0]
        data = payload_of(namespace(), 0, chunk.key, CHUNK)
        client.room(slot, len(data))[: len(data) // 2] = data[: len(data) // 2]
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with StoreClient(store.address) as client:
        client.register(namespace())
        until = time.monotonic() + 60
        assert get(client, namespace(), TOKENS).hit == 0
        while put(client, namespace(), TOKENS) != 8:
            assert time.monotonic() < until, "the key is blocked by a writer that is dead"
        assert get(client, namespace(), TOKENS).hit == len(TOKENS)


def test_requests_that_page_each_other_out_read_back_their_own_bytes(store: FileStore) -> None:
    """LMCache#4385: distinct patterns under memory pressure, all read back and compared."""
    prompts = [[number] * CHUNK + [7000 + number] * (9 * CHUNK) for number in range(150)]
    with StoreClient(store.address) as client:
        client.register(namespace())
        for number, tokens in enumerate(prompts):
            put(client, namespace(), tokens)
            if number % 10 == 9:
                store.settled()
        assert store.settled()["host.removed_evicted"] > 0, "they don't all fit"
    origins = [look(store, tokens) for tokens in prompts]  # which compares every byte
    assert all(hit == 10 * CHUNK for hit, _ in origins)
    assert any("fs" in origin for _, origin in origins)


@pytest.mark.parametrize(
    "change",
    [
        dict(weights=b"v" * 32), dict(epoch=1), dict(compute="float32"), dict(quantisation="int8"),
        dict(positions=(("rope_theta", "5e5"),)), dict(window=64),
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_the_same_tokens_of_another_model_or_layout_are_a_miss(store: FileStore, change: dict[str, object]) -> None:
    """LMCache#4463, dynamo#14416, LMCache#4247: a key that doesn't tell layouts apart serves one for the other."""
    other = namespace(**change)  # type: ignore[arg-type]
    with StoreClient(store.address) as client:
        client.register(namespace())
        client.register(other)
        put(client, namespace(), TOKENS)
        store.settled()
        prompt = prompt_of(other, TOKENS)
        found = client.lookup(other.id, prompt.root, prompt.tokens, prompt.keys, limit=len(TOKENS), deadline_ms=1000)
        assert (found.hit, found.chunks) == (0, [])
        assert get(client, namespace(), TOKENS).hit == len(TOKENS)


def test_another_dtype_or_head_count_is_a_miss(store: FileStore) -> None:
    """The same, for what changes the size of a chunk."""
    full, window = namespace().groups
    others = [
        Namespace(weights=b"w" * 32, groups=(msgspec.structs.replace(full, **change), window), chunk_tokens=CHUNK)
        for change in (dict(dtype="bfloat16"), dict(kv_heads=2), dict(head_dim=16), dict(layers=(3,)), dict(name="f"))
    ]
    with StoreClient(store.address) as client:
        client.register(namespace())
        put(client, namespace(), TOKENS)
        for other in others:
            client.register(other)
            assert get(client, other, TOKENS).hit == 0


def test_a_hit_is_never_longer_than_what_could_be_loaded(store: FileStore) -> None:
    """LMCache#3388, LMCache PR#2898, dynamo#15079: a part that fails to load is no success of the whole."""
    with StoreClient(store.address) as client:
        client.register(namespace())
        put(client, namespace(), TOKENS)
    store.settled()
    store.stop()
    prompt = prompt_of(namespace(), TOKENS)
    (file,) = [file for file in store.chunk_files() if file.name == f"{prompt.chunk(0, 2).key.hex()}-00"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    store.start()
    # The window chunks that a shorter hit needs were not asked for at first: then it is a miss, and a hit next time.
    hits = [look(store, TOKENS)[0] for _ in range(2)]
    assert hits[0] <= 2 * CHUNK and hits[1] == 2 * CHUNK


def test_a_restarted_engine_reads_what_the_last_one_stored(store: FileStore) -> None:
    """LMCache#4492: the engine's process is new, the store isn't."""
    command = (
        "import sys; from forebay.kvstore.client import StoreClient; from tests.kvstore.running import get, put; "
        "from tests.kvstore.support import namespace; s = namespace(); c = StoreClient(sys.argv[1]).__enter__(); "
        "c.register(s); t = list(range(1, 129)); n = put(c, s, t); print(n, get(c, s, t).hit)"
    )
    arguments = [sys.executable, "-c", command, store.address]
    said = [subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    assert said == [["8", "128"], ["0", "128"]]


# --- reads against eviction, leases, cancelled transfers ----------------------------------------------------


def test_a_reader_that_outlives_its_lease_finds_out(store: FileStore) -> None:
    """Mooncake#3076, Mooncake#4239: bytes that were read after the lease's end are a miss, never another chunk's."""
    spec, number, until = namespace(), 90, time.monotonic() + 60
    with StoreClient(store.address) as reader, StoreClient(store.address) as writer:
        reader.register(spec)
        put(reader, spec, TOKENS)
        prompt = prompt_of(spec, TOKENS)
        found = reader.lookup(spec.id, prompt.root, prompt.tokens, prompt.keys, limit=len(TOKENS), lease_ms=50)
        assert found.hit == len(TOKENS)
        changed: list[ChunkRead] = []
        while not changed:  # the lease ends with some tick of the store, and then others get the slots
            assert time.monotonic() < until, "the slots were given to nobody"
            number += 1
            put(writer, spec, [number] * (8 * CHUNK))
            changed = [
                chunk for chunk in found.chunks
                if bytes(reader.payload(chunk)) != payload_of(spec, chunk.group, chunk.key, chunk.tokens)
            ]  # fmt: skip
        assert not any(reader.intact(chunk) for chunk in changed)


def test_a_slot_that_a_tier_may_still_be_writing_is_given_to_nobody(tmp_path: Path) -> None:
    """pegaflow#403: the request that wanted a load is gone, the load is not."""
    asyncio.run(_a_late_load(tmp_path))


async def _a_late_load(folder: Path) -> None:
    (folder / "pool").mkdir()
    daemon = InProcessDaemon(config(folder))
    ended = await whole(daemon)
    core, tokens = daemon.service.core, [5] * 64
    async with connected(folder) as client:
        await push(client, tokens)
        await settled(daemon.service)
        for entry in list(core.table):
            core.retire(entry, "evicted")
        with Calls((folder / "files",), Fault("preadv", 0, "hang")) as calls:
            ThreadChild.unhang = staticmethod(calls.release)
            found = await pull(client, tokens, 150)
            # Which of the two loads hangs is a matter of the tier's threads; what the other has brought is a hit.
            assert found.hit in (0, 32) and found.pending, "the deadline frees the request"
            held = {entry.slot for entry in core.table if entry.state.name == "PROMOTING"}
            assert held and core.promoting_bytes > 0, "and not the slot"
            for number in range(20):
                await push(client, [600 + number] * 64)
                assert held <= {entry.slot for entry in core.table if entry.state.name in ("PROMOTING", "COMMITTED")}
            calls.release()
            await settled(daemon.service)
        assert core.promoting_bytes == 0
    daemon.stop()
    assert await ended == 0


class connected:
    """A client of the store in this folder, for a while."""

    def __init__(self, folder: Path) -> None:
        self._client = AsyncStoreClient(str(folder / "store.sock"))

    async def __aenter__(self) -> AsyncStoreClient:
        await self._client.connect()
        await self._client.register(SPEC)
        return self._client

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()


# --- full memory, deadlock, queues --------------------------------------------------------------------------


def test_requests_that_hold_what_each_other_needs_all_get_answers(tmp_path: Path) -> None:
    """LMCache#3855, LMCache#2942, LMCache#2017: all memory is pinned by those who want more of it."""
    asyncio.run(_everybody_holds(tmp_path))


async def _everybody_holds(folder: Path) -> None:
    (folder / "pool").mkdir()
    daemon = InProcessDaemon(config(folder))
    ended = await whole(daemon)
    prompts = [[number] * 64 for number in range(10)]
    async with connected(folder) as first, connected(folder) as second:
        for tokens in prompts:
            assert await push(first, tokens) == 2
            await settled(daemon.service)
        core = daemon.service.core
        assert core.counters.values["tier.fs.stored"] == 20, "all of them are in files too"
        held = []
        for client, mine in ((first, prompts[:5]), (second, prompts[5:])):
            for tokens in mine:
                found = await lookup(client, tokens, 300)
                held.append((client, found.lease))
        assert sum(entry.pins > 0 for entry in core.table) > len(core.table) / 2, "most of the pool is pinned"
        asked = [lookup(client, tokens, 300) for client in (first, second) for tokens in prompts]
        answers = await asyncio.wait_for(asyncio.gather(*asked), 30)
        assert all(0 <= answer.hit <= 64 for answer in answers)
        assert await push(first, [77] * 64) <= 2, "a store is refused at once, or fits"
        for client, lease in held:
            client.release([lease])
        first.release([answer.lease for answer in answers[:10]])
        second.release([answer.lease for answer in answers[10:]])
        for _ in range(100):  # what the other connection let go of may come later than this question
            if (await pull(first, prompts[0], 5000)).hit == 64:
                break
        else:
            raise AssertionError("what was let go of can't be used again")
    daemon.stop()
    assert await ended == 0


async def lookup(client: AsyncStoreClient, tokens: list[int], deadline_ms: int) -> Found:
    prompt = prompt_of(SPEC, tokens)
    return await client.lookup(
        SPEC.id, prompt.root, prompt.tokens, prompt.keys, limit=len(tokens), deadline_ms=deadline_ms
    )


def test_lookups_that_wait_for_a_slow_tier_wait_side_by_side(tmp_path: Path) -> None:
    """LMCache#4983, sglang#12809: forty requests with a deadline take one deadline, and others take none."""
    asyncio.run(_waiting_together(tmp_path))


async def _waiting_together(folder: Path) -> None:
    (folder / "pool").mkdir()
    daemon = InProcessDaemon(config(folder))
    ended = await whole(daemon)
    async with connected(folder) as client:
        await push(client, [5] * 64)
        await settled(daemon.service)
        for entry in list(daemon.service.core.table):
            daemon.service.core.retire(entry, "evicted")
        await push(client, [6] * 64)
        loop = asyncio.get_running_loop()
        with Calls((folder / "files",), Fault("preadv", 0, "hang")) as calls:
            ThreadChild.unhang = staticmethod(calls.release)
            began = loop.time()
            waiting = [asyncio.create_task(lookup(client, [5] * 64, 3000)) for _ in range(40)]
            await asyncio.sleep(0.05)
            assert (await pull(client, [6] * 64)).hit == 64
            assert loop.time() - began < 2.7 and not any(task.done() for task in waiting)
            answers = await asyncio.wait_for(asyncio.gather(*waiting), 60)  # one after another would take 120 s
            assert {answer.hit for answer in answers} <= {0, 32}
            calls.release()
            client.release([answer.lease for answer in answers])
            await settled(daemon.service)
    daemon.stop()
    assert await ended == 0


# --- disk and restart, process death ------------------------------------------------------------------------


def test_what_is_evicted_is_in_files_by_then_or_was_counted_as_dropped(store: FileStore) -> None:
    """sglang#39444: write-through that loses to eviction."""
    before = store.settled()
    prompts = [[number] * CHUNK + [9000 + number] * (7 * CHUNK) for number in range(150)]
    with StoreClient(store.address) as client:
        client.register(namespace())
        stored = sum(put(client, namespace(), tokens) for tokens in prompts)
    values = store.settled()
    counts = [values.get(name, 0) - before.get(name, 0) for name in ("tier.fs.stored", "tier.fs.dropped")]
    assert sum(counts) == stored and counts[0] > 0


def test_a_client_that_outlives_its_store_sees_the_same_memory_as_new_ones(store: FileStore) -> None:
    """vllm#51579, #57303, #54002: after a restart one side had a second, disconnected mapping, full of zeros."""
    spec, more = namespace(), [50] * (2 * CHUNK)
    old = StoreClient(store.address).__enter__()
    old.register(spec)
    put(old, spec, TOKENS)
    boot = old.boot
    store.stop(signal.SIGKILL)
    store.start()
    with pytest.raises(StoreUnavailable):
        old.stats()
    old._run(old._client.connect())
    assert old.boot != boot, "LMCache#4642: every reply says whether the store is still the same"
    old.register(spec)
    assert get(old, spec, TOKENS).hit == len(TOKENS)
    with StoreClient(store.address) as new:
        new.register(spec)
        assert put(new, spec, more) == 4
        assert get(old, spec, more).hit == len(more)
        assert put(old, spec, [51] * CHUNK) == 2
        assert get(new, spec, [51] * CHUNK).hit == CHUNK
    old.close()


def test_clients_that_crash_leave_nothing_that_adds_up(store: FileStore) -> None:
    """LMCache#4980, #5265: gigabytes for each crash of a worker."""
    spec = namespace()
    crash = (
        "import os, sys; from forebay.kvstore.client import StoreClient; from tests.kvstore.running import prompt_of; "
        "from tests.kvstore.support import namespace\n"
        "for n in range(40):\n"
        "    if os.fork() == 0:\n"
        "        c = StoreClient(sys.argv[1]).__enter__(); c.register(namespace())\n"
        "        p = prompt_of(namespace(), [n] * 64); c.reserve(namespace().id, '', [p.chunk(0, 0)])\n"
        "        os.kill(os.getpid(), 9)\n"
        "    os.wait()\n"
    )
    before = store.settled()
    subprocess.run([sys.executable, "-c", crash, store.address], check=True, timeout=120)
    until = time.monotonic() + 60
    while True:
        values = store.settled()
        locks = len(list((store.pool / "clients").iterdir()))
        if not (values["host.reserved_bytes"] or values["host.quarantined_slots"]) and locks <= 2:
            break
        assert time.monotonic() < until, (values["host.reserved_bytes"], values["host.quarantined_slots"], locks)
    assert values["host.bytes_used"] == before["host.bytes_used"]
    with StoreClient(store.address) as client:
        client.register(spec)
        assert put(client, spec, TOKENS) == 8


def test_a_client_that_does_nothing_for_a_while_is_still_welcome(store: FileStore) -> None:
    """LMCache#4795: an idle worker was reaped before its first request."""
    with StoreClient(store.address) as client:
        client.register(namespace())
        time.sleep(2.5)  # more than two of the store's ticks
        assert put(client, namespace(), TOKENS) == 8
        assert get(client, namespace(), TOKENS).hit == len(TOKENS)


# --- keys and sharing ---------------------------------------------------------------------------------------


def test_keys_are_the_same_in_every_process() -> None:
    """LMCache#1139, #1095, #2136, #2511: keys that began at a random or per-process hash never hit again."""
    code = (
        "from tests.kvstore.running import prompt_of; from tests.kvstore.support import namespace; "
        "print(prompt_of(namespace(), list(range(100))).keys.hex())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }  # fmt: skip
    assert len(keys) == 1


def test_the_same_chunks_of_many_workers_are_stored_once_within_one_budget(store: FileStore) -> None:
    """LMCache#2901, DingoCache PR#233: a budget for each worker, a copy for each rank."""
    spec = namespace()
    with StoreClient(store.address) as first, StoreClient(store.address) as second:
        first.register(spec)
        second.register(spec)
        budget = first.stats().values["host.bytes_budget"]
        assert (put(first, spec, TOKENS), put(second, spec, TOKENS)) == (8, 0)
        values = second.stats().values
        assert values["host.entries"] == 8 and values["host.bytes_budget"] == budget
        assert get(second, spec, TOKENS).hit == len(TOKENS)
    assert store.settled()["tier.fs.chunks"] == 8


def test_ranks_that_write_one_chunk_at_once_make_one_chunk(store: FileStore) -> None:
    """A second writer of a chunk is told that somebody is at it, and gets no slot."""
    spec, chunk = namespace(), prompt_of(namespace(), TOKENS).chunk(0, 0)
    with StoreClient(store.address) as first, StoreClient(store.address) as second:
        first.register(spec)
        second.register(spec)
        slot = first.reserve(spec.id, "", [chunk]).slots[0]
        assert second.reserve(spec.id, "", [chunk]).slots[0].status == "busy"
        data = payload_of(spec, 0, chunk.key, CHUNK)
        first.room(slot, len(data))[:] = data
        sums = granule_checksums(memoryview(data), spec.groups[0].granule_bytes)
        assert first.commit([Written(slot.reservation, sums)]).committed == 1
        assert first.commit([Written(slot.reservation, sums)]).committed == 0, "and once only"
        assert second.reserve(spec.id, "", [chunk]).slots[0].status == "exists"


# --- security -----------------------------------------------------------------------------------------------


def test_socket_pool_and_files_are_their_users_alone(store: FileStore) -> None:
    """LMCache#5128: a door that was open to everybody."""
    for path, mode in (
        (store.socket, 0o600), (store.pool, 0o700), (store.pool / "extent-000000", 0o600), (store.pool / "lock", 0o600),
        (store.files, 0o700), (store.files / "chunks", 0o700),
    ):  # fmt: skip
        assert stat.S_IMODE(path.stat().st_mode) == mode, path


def test_figures_of_loads_are_those_of_what_was_loaded(store: FileStore) -> None:
    """dynamo#4549: the metric of onboarded blocks was always zero."""
    with StoreClient(store.address) as client:
        client.register(namespace())
        put(client, namespace(), TOKENS)
    store.settled()
    store.stop()
    store.start()
    assert look(store, TOKENS) == (len(TOKENS), {"fs": len(TOKENS)})
    values = store.settled()
    assert values["tier.fs.promoted"] == values["tier.fs.loads_ok"] == 6, "of the window group what is needed"
    assert values["tier.fs.promoted_bytes"] > 0


def test_a_namespace_that_is_not_registered_is_refused_by_name_and_not_guessed(store: FileStore) -> None:
    """LMCache#4642, pegaflow#225: who has not registered again is told so."""
    with StoreClient(store.address) as client, pytest.raises(RequestRefused, match="isn't registered"):
        get(client, namespace(weights=b"never seen"), TOKENS)
