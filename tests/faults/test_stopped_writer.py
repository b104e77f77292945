"""Processes that are stopped (SIGSTOP) while they may write into the pool, given up on, and woken again.

Whatever they do then, nobody ever reads a byte that isn't the stored one: their slots stay theirs until they are
dead, or say that they have stopped. Real daemons, clients and tier processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.kvstore.header import granule_checksums
from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.protocol import Written
from forebay.testing.standstill import pause, resume
from tests.cli.commands import RunningStore
from tests.kvstore.running import get, payload_of, prompt_of, put

SPEC = Namespace(
    b"weights", (GroupGeometry("full", "full", (0, 1), 4, 64, "float32"),), chunk_tokens=32, compute="float32"
)
CONTEXT = multiprocessing.get_context("spawn")
VICTIM = list(range(96))
OTHERS = [[1000 + number] * 320 for number in range(28)]
"""More than the pool holds, so that every slot that may be given away is given away."""


def scribbler(socket: str, pipe: Connection) -> None:
    """Reserve the victim's chunks and write garbage into them, over and over, until told; then commit. After a lost
    store, connect again and say whether the prompt is right."""
    with StoreClient(socket) as client:
        client.register(SPEC)
        prompt = prompt_of(SPEC, VICTIM)
        chunks = [prompt.chunk(0, position) for position in range(prompt.positions)]
        slots = client.reserve(SPEC.id, "", chunks).slots
        assert all(slot.status == "reserved" for slot in slots)
        size = len(payload_of(SPEC, 0, chunks[0].key, 32))
        rooms = [client.room(slot, size) for slot in slots]
        pipe.send([slot.reservation for slot in slots])
        count = 0
        while not pipe.poll():
            count += 1
            for room in rooms:
                room[:] = bytes([count % 256]) * size
        pipe.recv()
        sums = granule_checksums(memoryview(bytes(rooms[0])), size // 2)
        try:
            pipe.send(client.commit([Written(slot.reservation, sums) for slot in slots]).committed)
        except StoreUnavailable:
            pipe.send("gone")
    while True:
        with suppress(StoreUnavailable), StoreClient(socket) as client:
            pipe.send(get(client, SPEC, VICTIM).hit)
            return
        time.sleep(0.05)


def reader(socket: str, pipe: Connection) -> None:
    """Look the victim up; when told, copy what was promised, and say how many chunks were not what they had been."""
    with StoreClient(socket) as client:
        found = get(client, SPEC, VICTIM)
        pipe.send(found.hit)
        pipe.recv()
        lost = 0
        for chunk in found.chunks:
            copy = bytes(client.payload(chunk))
            if not client.intact(chunk):
                lost += 1
            else:
                assert copy == payload_of(SPEC, chunk.group, chunk.key, chunk.tokens)
        pipe.send(lost)


@contextmanager
def helper(target: Any, store: RunningStore) -> Iterator[tuple[int, Connection]]:
    """A process that does this; its pid, and a pipe to it. Killed at the end."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(str(store.socket), theirs))
    process.start()
    assert process.pid is not None
    try:
        yield process.pid, ours
    finally:
        process.kill()
        process.join()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    running = RunningStore(tmp_path)
    yield running
    assert running.stop() == 0


def fill(store: RunningStore) -> None:
    """Write over every slot that may be given away, and read all that is left: nothing is wrong."""
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        for prompt in OTHERS:
            put(client, SPEC, prompt)
    read(store)


def read(store: RunningStore) -> None:
    with StoreClient(str(store.socket)) as client:
        for prompt in [*OTHERS, VICTIM]:
            client.release([get(client, SPEC, prompt).lease])
        assert client.check().damaged == []


def kill_store(store: RunningStore) -> None:
    assert store.process is not None
    store.process.kill()
    store.process.wait()


def test_a_stopped_writer_loses_its_chunk_but_not_its_slot(store: RunningStore) -> None:
    store.start("--reservation", "200ms")
    with helper(scribbler, store) as (pid, pipe):
        reserved = len(pipe.recv())
        pause(pid)
        store.wait_for(lambda values: values.get("store.reservations_expired", 0) == reserved)
        with StoreClient(str(store.socket)) as client:
            assert put(client, SPEC, VICTIM) == reserved, "its keys are free for others at once"
            assert client.stats().values["host.quarantined_slots"] == reserved
        fill(store)
        resume(pid)
        fill(store)
        pipe.send("enough")
        assert pipe.recv() == 0, "what was given up can't be committed"
        store.wait_for(lambda values: values["host.quarantined_slots"] == 0)
        pipe.recv()
    fill(store)


def test_a_stopped_writer_that_is_killed_leaves_nothing(store: RunningStore) -> None:
    store.start("--reservation", "200ms")
    with helper(scribbler, store) as (pid, pipe):
        reserved = len(pipe.recv())
        pause(pid)
        store.wait_for(lambda values: values["host.quarantined_slots"] == reserved)
        os.kill(pid, signal.SIGKILL)
        store.wait_for(lambda values: values["host.quarantined_slots"] == values["host.quarantined_bytes"] == 0)


def test_a_writer_that_sleeps_through_a_restart_of_the_store_spoils_nothing(store: RunningStore) -> None:
    store.start()
    with helper(scribbler, store) as (pid, pipe):
        reserved = len(pipe.recv())
        fill(store)
        pause(pid)
        kill_store(store)
        store.start()
        with StoreClient(str(store.socket)) as client:
            values = client.stats().values
            assert values["host.quarantined_slots"] == reserved and values["host.readopted"] > 0
        read(store)
        with StoreClient(str(store.socket)) as client:
            client.register(SPEC)
            assert put(client, SPEC, VICTIM) == reserved
        fill(store)
        resume(pid)
        fill(store)
        pipe.send("enough")
        assert pipe.recv() == "gone"
        pipe.recv()
        store.wait_for(lambda values: values["host.quarantined_slots"] == 0)
    fill(store)


def test_a_stopped_reader_finds_out_that_its_lease_has_ended(store: RunningStore) -> None:
    store.start("--lease", "200ms")
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        chunks = put(client, SPEC, VICTIM)
    with helper(reader, store) as (pid, pipe):
        assert pipe.recv() == len(VICTIM)
        pause(pid)
        store.wait_for(lambda values: values.get("store.leases_expired", 0) >= 1)
        fill(store)
        resume(pid)
        pipe.send("read")
        assert pipe.recv() == chunks, "every slot has been given away, and says so"


# --- the file tier's process -----------------------------------------------------------------------------


def prompts_in_files(store: RunningStore, *more: str) -> list[list[int]]:
    """Prompts that only the file tier has."""
    prompts = [[5000 + number] * (32 * 150) for number in range(3)]
    store.start(*more)
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        for prompt in prompts:
            put(client, SPEC, prompt)
            store.wait_for(lambda values: values["tier.fs.stores_running"] == 0)
    assert store.stop() == 0
    store.start(*more)
    return prompts


def stop_in_a_load(store: RunningStore, prompts: list[list[int]]) -> tuple[int, threading.Thread]:
    """Have a prompt loaded, and stop the tier's process in the middle of it; its pid, and the one who waits."""
    for prompt in prompts:

        def ask(wanted: list[int] = prompt) -> None:
            with suppress(StoreUnavailable), StoreClient(str(store.socket), timeout_s=60) as client:
                client.register(SPEC)
                found = prompt_of(SPEC, wanted)
                client.lookup(SPEC.id, found.root, found.tokens, found.keys, limit=len(wanted), deadline_ms=20_000)

        with StoreClient(str(store.socket)) as client:
            pid = int(client.stats().tiers[0]["pid"])
            asking = threading.Thread(target=ask)
            asking.start()
            while asking.is_alive() and client.stats().values["host.promoting_bytes"] == 0:
                pass
            pause(pid)
            if client.stats().values["host.promoting_bytes"] > 0:
                return pid, asking
            resume(pid)
            asking.join()
    raise AssertionError("every load was over before the tier's process could be stopped")


def test_a_tier_process_that_hangs_in_a_load_is_killed_before_its_slots_are_free(store: RunningStore) -> None:
    prompts = prompts_in_files(store, "--tier-hang", "2s")
    pid, asking = stop_in_a_load(store, prompts)
    fill(store)
    asking.join()
    store.wait_for(lambda values: values["tier.fs.host.restarts"] == 1 and values["tier.fs.host.up"] == 1)
    assert not Path(f"/proc/{pid}").exists()
    store.wait_for(lambda values: values["host.promoting_bytes"] == values["host.quarantined_slots"] == 0)
    fill(store)
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        found = prompt_of(SPEC, prompts[0])
        answer = client.lookup(SPEC.id, found.root, found.tokens, found.keys, limit=len(prompts[0]), deadline_ms=20_000)
        assert answer.hit > 0, "the next process serves"
        assert all(bytes(client.payload(c)) == payload_of(SPEC, 0, c.key, c.tokens) for c in answer.chunks)


def test_a_tier_process_that_was_stopped_when_its_store_died_spoils_nothing(store: RunningStore) -> None:
    prompts = prompts_in_files(store)
    pid, asking = stop_in_a_load(store, prompts)
    kill_store(store)
    asking.join()
    store.start()
    fill(store)
    with suppress(ProcessLookupError):
        resume(pid)  # it can't write any more: it ends with the store that started it
    store.wait_for(lambda values: values["host.promoting_bytes"] == values["host.quarantined_slots"] == 0)
    fill(store)
