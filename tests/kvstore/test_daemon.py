"""A real daemon in a process of its own, driven by the blocking client."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from forebay.errors import RequestRefused
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import Namespace, pack_tokens, root_key
from tests.kvstore.running import MEMORY, SCRIPT, Store, flip_a_bit, get, prompt_of, put
from tests.kvstore.support import CHUNK, namespace


def test_stored_bytes_come_back_to_another_client(store: Store) -> None:
    spec, tokens = namespace(), list(range(4 * CHUNK))
    with StoreClient(store.address) as writer:
        writer.register(spec, "tiny")
        assert put(writer, spec, tokens) == 8
    with StoreClient(store.address) as reader:
        found = get(reader, spec, tokens)
        assert found.hit == 4 * CHUNK and found.lease
        assert reader.stats().namespaces[0]["label"] == "tiny"


def test_chunks_outlive_a_killed_daemon_and_each_is_read_before_it_is_served(store: Store) -> None:
    spec, tokens = namespace(), list(range(4 * CHUNK))
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, tokens)
        boot = client.boot
    assert store.stop(signal.SIGKILL) == -signal.SIGKILL
    store.start()
    with StoreClient(store.address) as client:
        assert client.boot != boot
        assert get(client, spec, tokens).hit == 4 * CHUNK
        assert client.stats().values["host.readopted"] == 8


def test_a_flipped_bit_in_a_readopted_pool_is_never_served_and_is_counted(store: Store) -> None:
    spec, tokens = namespace(), list(range(4 * CHUNK))
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, tokens)
        victim = next(c for c in get(client, spec, tokens).chunks if c.group == 0 and c.start == CHUNK)
    store.stop(signal.SIGKILL)
    flip_a_bit(store, victim)
    store.start()
    with StoreClient(store.address) as client:
        assert get(client, spec, tokens).hit == CHUNK
        assert client.stats().values["host.corrupt"] == 1


def test_check_finds_damage_and_repair_takes_it_out(store: Store) -> None:
    spec, tokens = namespace(), list(range(2 * CHUNK))
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, tokens)
        victim = get(client, spec, tokens).chunks[0]
        flip_a_bit(store, victim)
        assert len(client.check().damaged) == 1
        assert len(client.check(repair=True).damaged) == 1
        assert client.check().damaged == []


def test_a_killed_clients_pins_and_slots_are_free_within_a_tenth_of_a_second(store: Store) -> None:
    """At least when the machine has time for it: a busy one gets some tries, and each must end well."""
    tries = 20
    while freed_after_a_kill(store) > 0.1:
        assert (tries := tries - 1), "it always takes longer"


def freed_after_a_kill(store: Store) -> float:
    """How many seconds after a client's death nothing is left of what it held."""
    spec, tokens = namespace(), list(range(2 * CHUNK))
    child = os.fork()
    if child == 0:
        client = StoreClient(store.address).__enter__()
        client.register(spec)
        put(client, spec, tokens)
        get(client, spec, tokens)
        prompt = prompt_of(spec, [9] * CHUNK)
        client.reserve(spec.id, "", [prompt.chunk(0, 0)])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    died = time.monotonic()
    with StoreClient(store.address) as client:
        while True:
            values = client.stats().values
            left = values["host.reserved_bytes"], values["host.quarantined_slots"]
            if left == (0, 0) and values["host.evictable"] == values["host.entries"] == 4:
                return time.monotonic() - died
            assert time.monotonic() < died + 30, values


def test_garbage_and_giant_frames_cost_only_their_own_connection(store: Store) -> None:
    with StoreClient(store.address) as client:
        for data in (os.urandom(4096), struct.pack("<I", 1 << 30) + b"x" * 100, struct.pack("<I", 5) + b"hello"):
            with socket.socket(socket.AF_UNIX) as enemy:
                enemy.connect(str(store.socket))
                enemy.sendall(data)
                enemy.settimeout(5)
                assert enemy.recv(1) == b"", "the store hangs up"
        assert client.stats().values["store.connections"] == 1


def test_who_only_asks_maps_no_memory_before_it_is_promised_a_chunk(store: Store) -> None:
    spec, tokens = namespace(), list(range(2 * CHUNK))
    with StoreClient(store.address, maps=False) as client:
        assert client.stats().values["host.bytes_budget"] >= MEMORY
        client.register(spec)
        assert len(client._client.extents) == 0
        assert put(client, spec, tokens) == 4 and get(client, spec, tokens).hit == len(tokens)
        assert len(client._client.extents) > 0


def test_a_second_daemon_on_the_same_socket_is_refused_by_name(store: Store) -> None:
    second = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(store.socket), str(MEMORY)], capture_output=True, text=True, timeout=20
    )
    assert second.returncode == 4
    assert str(store.socket) in second.stderr and "Traceback" not in second.stderr
    with StoreClient(store.address) as client:
        assert client.stats().values["host.bytes_budget"] == MEMORY


def test_too_little_shared_memory_is_said_before_anything_is_taken(tmp_path: Path) -> None:
    free = os.statvfs("/dev/shm")
    wanted = free.f_blocks * free.f_frsize * 2
    socket_file = tmp_path / "s.sock"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(socket_file), str(wanted)], capture_output=True, text=True, timeout=20
    )
    assert run.returncode == 4 and "--memory" in run.stderr and "Traceback" not in run.stderr
    assert not socket_file.exists()


def test_an_unregistered_namespace_and_a_chunk_that_cannot_fit_are_refused(store: Store) -> None:
    spec = namespace()
    huge = Namespace(weights=b"x", groups=spec.groups, chunk_tokens=65536)
    with StoreClient(store.address) as client:
        with pytest.raises(RequestRefused, match="isn't registered"):
            get(client, spec, list(range(CHUNK)))
        with pytest.raises(RequestRefused, match="larger --extent"):
            client.register(huge)


def test_explain_names_the_reason(store: Store) -> None:
    spec, other = namespace(), namespace(weights=b"v" * 32)
    tokens = list(range(2 * CHUNK))
    with StoreClient(store.address) as client:
        client.register(spec)
        client.register(other)
        put(client, spec, tokens)
        prompt = prompt_of(other, tokens)
        told = client.explain(other.id, prompt.root, prompt.tokens)
        assert told.hit == 0 and {r.reason for r in told.reaches} == {"other namespace"}
        assert "weights" in told.reaches[0].detail
        told = client.explain(spec.id, root_key(spec.id, b"salt"), pack_tokens(tokens))
        assert {r.reason for r in told.reaches} == {"salt"}
        prompt = prompt_of(spec, tokens[:CHUNK] + [77] * CHUNK)
        told = client.explain(spec.id, prompt.root, prompt.tokens)
        assert told.reaches[0].tokens == CHUNK and told.reaches[0].reason == "diverges"
        told = client.explain(spec.id, prompt.root, prompt.tokens[:60])
        assert told.hit == 0 and {r.reason for r in told.reaches} == {"too short"}


def test_a_chunk_whose_key_is_not_its_own_is_refused(store: Store) -> None:
    spec = namespace()
    prompt = prompt_of(spec, list(range(CHUNK)))
    honest = prompt.chunk(0, 0)
    with StoreClient(store.address) as client:
        client.register(spec, "plain\x1b[31m\nlabel" + "x" * 500)
        for wrong in (
            msgspec.structs.replace(honest, key=b"k" * 32),
            msgspec.structs.replace(honest, extra=b"img"),
            msgspec.structs.replace(honest, group=7),
            msgspec.structs.replace(honest, start=16),
            msgspec.structs.replace(honest, tokens=honest.tokens[:60]),
        ):
            with pytest.raises(RequestRefused):
                client.reserve(spec.id, "", [wrong])
        assert client.reserve(spec.id, "", [honest]).slots[0].status == "reserved"
        label = client.stats().namespaces[0]["label"]
        assert label.isprintable() and len(label) == 128
        with pytest.raises(RequestRefused):
            client.list_chunks(cursor=-1)


def test_a_long_prompt_is_found_whatever_of_its_tokens_is_sent(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole chunks by their keys alone; where tokens have to be compared the client is asked for them."""
    monkeypatch.setattr("forebay.kvstore.client.session.SHORT_TOKENS", 0)
    spec = namespace()
    tokens = list(range(6 * CHUNK))
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, tokens)

        assert get(client, spec, tokens).hit == len(tokens)
        inside = tokens[: 2 * CHUNK + 16] + [7] * (3 * CHUNK)
        assert get(client, spec, inside).hit == 2 * CHUNK + 16, "the hit ends inside a chunk before the last"
        assert get(client, spec, [7] * (4 * CHUNK)).hit == 0
        assert client.stats().values["store.lookups"] == 3, "a question that is asked again counts once"
