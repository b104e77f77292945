"""What the store tells routers is what it holds, tier by tier."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import StoreError
from forebay.events.schema import BlockRemoved, BlockStored, low64
from forebay.events.subscriber import EventSubscriber
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import Chain, Namespace, root_key
from tests.kvstore.running import get, put
from tests.kvstore.support import CHUNK, namespace
from tests.kvstore.test_daemon_files import FileStore

TOKENS = list(range(1, 3 * CHUNK + 17))


class TellingStore(FileStore):
    """A store with files and an event stream."""

    extra: tuple[str, ...] = ()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forebay", "store", "--socket", str(self.socket), "--memory", self.memory,
             "--extent", "2MiB", "--fs", str(self.files), "--fs-quota", "64MiB", "--events", "tcp://127.0.0.1:0",
             "--replay", "tcp://127.0.0.1:0", *self.extra],
        )  # fmt: skip
        until = time.monotonic() + 60
        while True:
            assert self.process.poll() is None and time.monotonic() < until
            try:
                with StoreClient(self.address, maps=False) as client:
                    client.stats()
                    return
            except StoreError:
                time.sleep(0.02)

    def endpoints(self) -> tuple[str, str]:
        with StoreClient(self.address) as client:
            client.register(namespace(), "tiny")
            (text,) = (value for name, value in client.stats().info.items() if name.startswith("events "))
        found = re.findall(r"tcp://[^, ]+", text)
        return found[0], found[1]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TellingStore]:
    running = TellingStore(tmp_path)
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        running.stop()


def believed(subscriber: EventSubscriber, until_quiet_s: float = 1.0) -> dict[str, set[int]]:
    """What a consumer believes after hearing everything, by medium: when it has heard something and then nothing for a
    while. Fails on a contradiction."""
    held: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < (until_quiet_s if any(held.values()) else 30):
        batch = subscriber.receive(0.1)
        if batch is None or not batch.batch.events:
            continue
        quiet_since = time.monotonic()
        for event in batch.batch.events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == 16 * len(event.block_hashes)
                fresh = set(event.block_hashes)
                assert not fresh & held[str(event.medium)], "stored twice without a removal"
                held[str(event.medium)] |= fresh
            elif isinstance(event, BlockRemoved):
                gone = set(event.block_hashes)
                assert gone <= held[str(event.medium)], "removed without having been stored"
                held[str(event.medium)] -= gone
    return held


def unit_hashes(spec: Namespace) -> set[int]:
    """What consumers get to see of the units of `TOKENS`."""
    chain = Chain(root_key(spec.id), TOKENS, chunk_tokens=spec.chunk_tokens)
    return {low64(key) for key in chain.keys}


def test_a_late_joiner_learns_both_tiers_and_later_removals(store: TellingStore) -> None:
    spec = namespace()
    live, replay = store.endpoints()
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, TOKENS)
        store.settled()
        units = unit_hashes(spec)
        with EventSubscriber(live, replay=replay, from_start=True) as subscriber:
            assert believed(subscriber) == {"CPU": units, "STORAGE": units}
            assert get(client, spec, TOKENS).hit == 16 * len(units)
            client.clear()
            assert removed(subscriber, units) == {"CPU": units, "STORAGE": units}


def removed(subscriber: EventSubscriber, units: set[int]) -> dict[str, set[int]]:
    """Which blocks were removed, by medium, as soon as these are among them."""
    gone: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
    until = time.monotonic() + 60
    while not all(found >= units for found in gone.values()) and time.monotonic() < until:
        batch = subscriber.receive(0.1)
        for event in batch.batch.events if batch else ():
            assert isinstance(event, BlockRemoved)
            gone[str(event.medium)] |= set(event.block_hashes)
    return gone


def test_a_restarted_store_opens_a_new_epoch_and_tells_what_it_readopted(store: TellingStore) -> None:
    spec = namespace()
    store.endpoints()
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, TOKENS)
    store.settled()
    store.stop(signal.SIGKILL)
    store.start()
    live, replay = store.endpoints()
    units = unit_hashes(spec)
    with EventSubscriber(live, replay=replay, from_start=True) as subscriber:
        held = believed(subscriber)
    assert held == {"CPU": units, "STORAGE": units}
