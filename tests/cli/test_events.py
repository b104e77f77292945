"""`forebay events` against a real store: what it shows, and that it finds a difference where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cli.endpoints import rules_of
from forebay.events.difference import HeldChunk, compare
from forebay.events.holdings import HeldIn, Holdings
from forebay.events.schema import CPU, LOCAL, STORAGE, low64
from forebay.events.sockets import CurveClient
from forebay.events.subscriber import EventSubscriber
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import Chain, root_key
from forebay.tiers.p2p.keys import own_pair
from tests.events.support import LOOPBACK, keys_of
from tests.events.test_holdings import gone, run
from tests.kvstore.running import put
from tests.kvstore.support import CHUNK, namespace
from tests.kvstore.test_daemon_events import TOKENS, TellingStore, believed, unit_hashes

HERE = HeldIn(CPU, LOCAL)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TellingStore]:
    running = TellingStore(tmp_path)
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        running.stop()


def forebay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "forebay", *arguments], capture_output=True, text=True, timeout=120)


def test_diff_says_that_the_stream_tells_what_memory_holds(store: TellingStore) -> None:
    spec = namespace()
    store.endpoints()
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, TOKENS)
        store.settled()
    found = forebay("events", "diff", "--socket", str(store.socket), "--settle", "100ms", "--json")
    assert found.returncode == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer["agreed"] == len(unit_hashes(spec)) > 0
    assert not answer["missing"] and not answer["stale"] and not answer["unseen_chunks"]


def test_tail_shows_what_is_held_and_why_it_goes(store: TellingStore) -> None:
    spec = namespace()
    store.endpoints()
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, TOKENS)
        store.settled()
        with subprocess.Popen(
            [sys.executable, "-m", "forebay", "events", "tail", "--socket", str(store.socket), "--from-start"],
            stdout=subprocess.PIPE, text=True,
        ) as tail:  # fmt: skip
            assert tail.stdout is not None
            first = tail.stdout.readline()
            client.clear()
            gone_line = next(line for line in tail.stdout if "removed" in line)
            tail.terminate()
    assert "stored   CPU/LOCAL" in first and "after the root" in first and "snapshot" in first
    assert "cleared" in gone_line


def test_tail_without_a_stream_says_what_to_do(tmp_path: Path) -> None:
    found = forebay("events", "tail", "--socket", str(tmp_path / "none.sock"))
    assert found.returncode == 3
    wrong = forebay("events", "watch")
    assert wrong.returncode == 2 and "tail" in wrong.stderr
    nowhere = forebay("events", "tail", "--events", "127.0.0.1:5557")
    assert nowhere.returncode == 2 and "tcp://ADDRESS:PORT" in nowhere.stderr and "Traceback" not in nowhere.stderr


def test_a_difference_is_what_is_held_and_not_believed_and_the_other_way_round() -> None:
    keys = keys_of(8)
    chunks = [HeldChunk(0, keys[3], 32), HeldChunk(0, keys[7], 32)]
    holdings = Holdings()
    holdings.apply_events([run(0, 8)])
    found = compare(holdings, HERE, chunks, ["full"])
    assert found.stale == {*keys[0:2], *keys[4:6]} and not found.missing and found.agreed == 4
    holdings.apply_events([run(0, 8, HeldIn("STORAGE", LOCAL)), gone(0, 8)])
    found = compare(holdings, HERE, chunks, ["full"])
    assert found.missing == {*keys[2:4], *keys[6:8]} and not found.stale
    nothing = compare(Holdings(), HERE, chunks, ["full"])
    assert nothing.unseen_chunks == {keys[3], keys[7]} and not nothing.is_none
    assert found.still(nothing).is_none, "what is only on its way is no difference"


def test_windows_make_a_chunk_believed_only_where_all_groups_can_serve_it() -> None:
    keys = keys_of(4)
    holdings = Holdings()
    holdings.apply_events([run(0, 2)])
    held = [HeldChunk(0, keys[1], 32), HeldChunk(1, keys[1], 32), HeldChunk(0, keys[3], 32)]
    assert compare(holdings, HERE, held, ["full", "window"]).is_none


def test_another_endpoint_speaks_to_its_own_kind_of_consumer(tmp_path: Path) -> None:
    running = TellingStore(tmp_path)
    (tmp_path / "store.toml").write_text(
        '[endpoints.router]\nendpoint = "tcp://127.0.0.1:0"\nreplay = "tcp://127.0.0.1:0"\nconsumer = "vllm-router"\n'
        '[endpoints.quiet]\nendpoint = "tcp://127.0.0.1:0"\nreplay = "tcp://127.0.0.1:0"\ntokens = false\n'
        f'[endpoints.far]\nendpoint = "tcp://127.0.0.1:0"\nreplay = "tcp://127.0.0.1:0"\nkeys = "{tmp_path}/store"\n'
    )
    ours, theirs = own_pair(tmp_path / "store"), own_pair(tmp_path / "client")
    (tmp_path / "store" / "client.pub").write_bytes(theirs.public)
    running.extra = ("--config", str(tmp_path / "store.toml"))
    running.start()
    spec = namespace()
    try:
        with StoreClient(running.address) as client:
            client.register(spec, "tiny")
            put(client, spec, TOKENS)
            running.settled()
            places = {name: told.split(", replay ") for name, told in client.stats().info.items() if "events " in name}
            units = unit_hashes(spec)
            router = next(place for name, place in places.items() if name.endswith("at router"))
            with EventSubscriber(router[0], replay=router[1], from_start=True) as subscriber:
                assert believed(subscriber) == {"CPU": units, "STORAGE": units}
                assert subscriber.epoch is None, "no keys that such a router doesn't know"
            quiet = next(place for name, place in places.items() if name.endswith("at quiet"))
            with EventSubscriber(quiet[0], replay=quiet[1], from_start=True) as subscriber:
                received = subscriber.receive(10)
                assert received is not None and received.batch.events[0].block_size == 16  # type: ignore[union-attr]
                assert not received.batch.events[0].token_ids  # type: ignore[union-attr]
            far = next(place for name, place in places.items() if name.endswith("at far"))
            friend = CurveClient(theirs.secret, ours.public)
            with EventSubscriber(far[0], replay=far[1], from_start=True, curve=friend) as subscriber:
                assert believed(subscriber) == {"CPU": units, "STORAGE": units}
            with EventSubscriber(far[0], replay=far[1], from_start=True, replay_timeout=0.3) as stranger:
                assert stranger.receive(0.3) is None and stranger.counters.failed_replays == 1
            figures = client.stats().values
            assert figures["events.streams"] == 4 and 0 < figures["events.units"] <= figures["events.units_max"]
            assert figures["events.anchored"] > 0 and figures["events.chunks_untold"] == 0
    finally:
        running.stop()


def test_a_relay_tells_every_worker_what_the_store_holds(store: TellingStore) -> None:
    spec = namespace()
    live, replay = store.endpoints()
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, TOKENS)
        store.settled()
        arguments = ["--events", live, "--replay", replay, "--publish", LOOPBACK, "--publish-replay", LOOPBACK]
        with subprocess.Popen(
            [sys.executable, "-m", "forebay", "events", "relay", *arguments, "--workers", "{ w0 = {}, w1 = {} }"],
            stderr=subprocess.PIPE, text=True,
        ) as relay:  # fmt: skip
            try:
                assert relay.stderr is not None
                places = dict(relay.stderr.readline().rstrip().split(": ") for _ in range(2))
                units = unit_hashes(spec)
                for worker, place in places.items():
                    events, _, again = place.partition(", replay ")
                    with EventSubscriber(events, replay=again, from_start=True) as subscriber:
                        holdings = Holdings()
                        until = time.monotonic() + 30
                        while len(holdings) < len(units) and time.monotonic() < until:
                            if (received := subscriber.receive(1.0)) is not None:
                                holdings.apply(received)
                                assert received.topic == f"kv@{worker}@model"
                        assert holdings.held(HERE) == holdings.held(HeldIn(STORAGE, LOCAL)) == units
                assert set(places) == {"w0", "w1"}
            finally:
                relay.terminate()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"a": {"endpoint": "tcp://10.0.0.1:5"}}, "CURVE"),
        ({"a": {"endpoint": "tcp://127.0.0.1:5", "consumer": "nobody"}}, "vllm-router"),
        ({"a": {"endpoint": "tcp://127.0.0.1:5", "hashes": "u64"}}, "takes a table of"),
        ({"events": {"endpoint": "tcp://127.0.0.1:5"}}, "isn't events"),
        ({f"a{n}": {"endpoint": "tcp://127.0.0.1:5"} for n in range(9)}, "at most 8"),
    ],
)  # fmt: skip
def test_endpoints_that_can_not_be_are_refused_by_name(table: dict[str, dict[str, str]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rules_of(table)


def test_the_keys_of_a_chunk_are_those_that_a_stream_names() -> None:
    spec = namespace()
    chain = Chain(root_key(spec.id), TOKENS, chunk_tokens=spec.chunk_tokens)
    assert {low64(key) for key in chain.keys} == unit_hashes(spec) and len(TOKENS) > CHUNK
