"""The store with its file tier: what memory has lost comes back from files, or is a miss; never anything else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import StoreError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.extents import pool_path
from tests.kvstore.running import Store, get, prompt_of, put
from tests.kvstore.support import CHUNK, namespace

TOKENS = list(range(1, 4 * CHUNK + 17))
WHOLE = 4 * CHUNK + 16


class FileStore(Store):
    """A store with files, by the public command."""

    def __init__(self, folder: Path, memory: str = "16MiB") -> None:
        super().__init__(folder)
        self.files = folder / "files"
        self.memory = memory

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forebay", "store", "--socket", str(self.socket), "--memory", self.memory,
             "--extent", "2MiB", "--fs", str(self.files), "--fs-quota", "64MiB"],
        )  # fmt: skip
        until = time.monotonic() + 60
        while True:
            assert self.process.poll() is None and time.monotonic() < until, "the store did not start"
            try:
                with StoreClient(self.address, maps=False) as client:
                    client.stats()
                    return
            except StoreError:
                time.sleep(0.02)

    def settled(self) -> dict[str, float]:
        """Figures once every copy to the files has ended."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with StoreClient(self.address, maps=False) as client:
                values = client.stats().values
            if values["tier.fs.stores_running"] == 0:
                return values
            time.sleep(0.02)
        raise AssertionError("the file tier did not come to rest")

    def chunk_files(self) -> list[Path]:
        """Every published chunk."""
        return [file for file in (self.files / "chunks").rglob("*") if file.is_file()]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    running = FileStore(tmp_path)
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0
    assert not running.pool.exists()


def look(store: FileStore, tokens: list[int], deadline_ms: int = 5000) -> tuple[int, dict[str, int]]:
    """Hit and its tiers; every byte that is served is compared."""
    spec = namespace()
    with StoreClient(store.address) as client:
        client.register(spec)
        prompt = prompt_of(spec, tokens)
        found = client.lookup(
            spec.id, prompt.root, prompt.tokens, prompt.keys, limit=len(tokens), deadline_ms=deadline_ms
        )
        client.release([found.lease])
        assert get(client, spec, tokens).hit == found.hit
        return found.hit, found.from_tier


def fill(store: FileStore) -> dict[str, float]:
    with StoreClient(store.address) as client:
        client.register(namespace())
        put(client, namespace(), TOKENS)
    return store.settled()


def test_everything_is_in_files_and_serves_after_a_clean_restart(store: FileStore) -> None:
    values = fill(store)
    assert values["tier.fs.chunks"] == 10
    assert store.stop() == 0
    store.start()
    hit, origin = look(store, TOKENS)
    assert hit == WHOLE and origin == {"fs": WHOLE}
    assert look(store, TOKENS) == (WHOLE, {}), "the second time it is in memory"


def test_a_hit_from_files_goes_to_the_unit_inside_a_chunk(store: FileStore) -> None:
    fill(store)
    store.stop()
    store.start()
    hit, origin = look(store, TOKENS[: CHUNK + 20] + [9999] * 30)
    assert hit == CHUNK + 16 and origin == {"fs": CHUNK + 16}


def test_files_serve_when_the_pool_is_gone_too(store: FileStore) -> None:
    fill(store)
    store.stop(signal.SIGKILL)
    pool = pool_path(Path("/dev/shm"), store.socket)
    time.sleep(0.2)
    for file in sorted(pool.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    store.start()
    assert look(store, TOKENS) == (WHOLE, {"fs": WHOLE})


def test_a_flipped_bit_in_any_file_is_a_miss_that_is_counted_and_moved_aside(store: FileStore) -> None:
    fill(store)
    store.stop()
    files = store.chunk_files()
    assert len(files) == 10
    for file in files:
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(bytes(data))
    store.start()
    for _ in range(12):
        hit, _ = look(store, TOKENS)
        assert hit == 0
    with StoreClient(store.address) as client:
        values = client.stats().values
    assert values["tier.fs.corrupt"] >= 1
    assert len(store.chunk_files()) < 10


def test_a_pool_too_small_for_a_prompt_serves_what_fits(tmp_path: Path) -> None:
    store = FileStore(tmp_path, memory="2MiB")
    store.start()
    try:
        spec, prompts = namespace(), [[seed] * (40 * CHUNK) for seed in range(1, 9)]
        with StoreClient(store.address) as client:
            client.register(spec)
            for tokens in prompts:
                put(client, spec, tokens)
                store.settled()
        for tokens in prompts:
            hit, origin = look(store, tokens)
            assert hit > 0
        assert any(origin) or origin == {}
    finally:
        assert store.stop() == 0


def test_a_killed_tier_process_costs_misses_and_comes_back(store: FileStore) -> None:
    fill(store)
    store.stop()
    store.start()
    assert store.process is not None
    pid = store.process.pid
    (child,) = (int(found) for found in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    os.kill(child, signal.SIGKILL)
    until = time.monotonic() + 60
    while look(store, TOKENS)[0] != WHOLE:
        assert time.monotonic() < until, "the file tier did not come back"
        time.sleep(0.1)


def test_what_was_cleared_stays_cleared_even_if_it_was_on_its_way_to_the_files(store: FileStore) -> None:
    spec = namespace()
    prompts = [[seed] * (4 * CHUNK) for seed in range(1, 40)]
    with StoreClient(store.address) as client:
        client.register(spec)
        for tokens in prompts:
            put(client, spec, tokens)
        assert client.clear().chunks > 100
    store.settled()
    time.sleep(0.5)
    assert [look(store, tokens)[0] for tokens in prompts] == [0] * len(prompts)
    assert store.settled()["tier.fs.chunks"] == 0
