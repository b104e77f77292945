"""A reader that finds wrong bytes says so; the store believes its own eyes."""

from __future__ import annotations

import asyncio
import time

import pytest

from forebay.kvstore import reader
from forebay.kvstore.cascade import Cascade
from forebay.kvstore.client import StoreClient
from tests.kvstore.running import Store, flip_a_bit, get, put
from tests.kvstore.support import CHUNK, SmallStore, namespace


def settled(client: StoreClient, entries: int) -> dict[str, float]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        values = client.stats().values
        if values["host.entries"] == entries:
            return values
        time.sleep(0.02)
    raise AssertionError(f"{values['host.entries']} entries, not {entries}")


def test_a_damaged_chunk_goes_once_the_store_has_seen_it_itself(store: Store) -> None:
    spec, tokens = namespace(), list(range(2 * CHUNK))
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, tokens)
        found = get(client, spec, tokens)
        victim = found.chunks[0]
        flip_a_bit(store, victim)
        client.damaged([(victim.group, victim.key)])
        client.release([found.lease])
        values = settled(client, 3)
        assert values["host.corrupt"] == 1
        assert put(client, spec, tokens) == 1, "the damaged one can be stored again"
        assert get(client, spec, tokens).hit == 2 * CHUNK


def test_a_false_alarm_costs_nothing(store: Store) -> None:
    spec, tokens = namespace(), list(range(2 * CHUNK))
    with StoreClient(store.address) as client:
        client.register(spec)
        put(client, spec, tokens)
        victim = get(client, spec, tokens).chunks[0]
        client.damaged([(victim.group, victim.key), (victim.group, b"x" * 32), (99, b"")])
        assert get(client, spec, tokens).hit == 2 * CHUNK
        assert client.stats().values.get("host.corrupt", 0) == 0
        client.damaged([(victim.group, victim.key)])
        assert client.stats().values["host.alarms_unheard"] == 1, "who cries wolf makes nobody wait again and again"


def test_what_is_remembered_of_false_alarms_has_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "VOUCHED_MAX", 2)
    store = SmallStore()
    entries = [store.store(chunk) for chunk in store.chunks(list(range(4 * CHUNK)))]
    eyes = reader.Reader(store.core, Cascade(store.core), {}, lambda entry: True)

    async def alarms() -> None:
        for entry in entries:
            assert entry is not None
            eyes.doubt(entry)
            await eyes.check_soon(entry)

    asyncio.run(alarms())
    assert eyes.figures() == {"host.checks_running": 0, "host.alarms_remembered": 2}
    for entry in entries[-2:]:
        assert entry is not None
        eyes.doubt(entry)
    assert store.core.counters.values["host.alarms_unheard"] == 2, "the last ones are remembered"
