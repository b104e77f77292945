"""Kill -9 of the store under traffic, again and again: nothing wrong is served, nothing leaks.

    FOREBAY_KILLS=100 pytest tests/faults     the long form
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from forebay.errors import StoreError
from forebay.kvstore.client import StoreClient
from tests.kvstore.running import MEMORY, Store, get, put
from tests.kvstore.support import CHUNK, namespace

KILLS = int(os.environ.get("FOREBAY_KILLS", "6"))


def traffic(address: str, seed: int, hits: Any, stop: Any) -> None:
    """Store and read prompts that share prefixes; every byte that is read is compared. Reconnects for ever."""
    rng, spec = random.Random(seed), namespace()
    while not stop.is_set():
        try:
            with StoreClient(address) as client:
                client.register(spec)
                while not stop.is_set():
                    prompt = [rng.randrange(8)] * CHUNK + [rng.randrange(8)] * (CHUNK * rng.randrange(1, 6))
                    put(client, spec, prompt)
                    found = get(client, spec, prompt)
                    hits.value += found.hit > 0
                    client.release([found.lease])
        except StoreError:
            time.sleep(0.01)


def test_no_wrong_byte_and_no_leak_after_any_kill(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.start()
    context = multiprocessing.get_context("spawn")
    hits, stop = context.Value("l", 0), context.Event()
    clients = [context.Process(target=traffic, args=(store.address, seed, hits, stop)) for seed in range(2)]
    for client in clients:
        client.start()
    rng = random.Random(5)
    readopted = 0.0
    try:
        for _ in range(KILLS):
            before = hits.value
            while hits.value < before + 20:
                assert all(client.is_alive() for client in clients), "a client saw a wrong byte"
                time.sleep(0.01)
            time.sleep(rng.random() * 0.2)
            assert store.stop(signal.SIGKILL) == -signal.SIGKILL
            store.start()
            with StoreClient(store.address) as client:
                readopted += client.stats().values.get("host.readopted", 0)
    finally:
        stop.set()
        for client in clients:
            client.join(20)
    assert [client.exitcode for client in clients] == [0, 0]
    assert readopted > 0
    time.sleep(1.2)
    with StoreClient(store.address) as client:
        values = client.stats().values
        assert values["host.reserved_bytes"] == values["host.quarantined_slots"] == 0
        assert values["host.evictable"] == values["host.entries"]
        assert values["host.bytes_budget"] == MEMORY
        assert client.check().damaged == []
    assert store.stop() == 0
    assert not store.pool.exists()
