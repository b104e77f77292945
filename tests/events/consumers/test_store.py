"""A real store under memory pressure, killed and started again: Dynamo believes what it holds, tier by tier."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.errors import StoreError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.geometry import GroupGeometry
from forebay.kvstore.identity import Namespace, pack_tokens, root_key
from forebay.testing.ports import free_port
from tests.events.consumers.environment import needs_consumers
from tests.events.consumers.test_dynamo import Dynamo, dynamo  # noqa: F401 - a fixture
from tests.kvstore.running import put
from tests.kvstore.test_daemon_files import FileStore

SPEC = Namespace(weights=b"w" * 32, groups=(GroupGeometry("full", "full", (0,), 1, 8, "float32"),), chunk_tokens=32)
CHUNKS = 24
PATIENCE_S = 60


class OpenStore(FileStore):
    """On ports that stay the same over a restart."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, memory="2MiB")
        self.endpoint, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forebay", "store", "--socket", str(self.socket), "--memory", self.memory,
             "--extent", "2MiB", "--fs", str(self.files), "--fs-quota", "64MiB", "--events", self.endpoint,
             "--replay", self.replay],
        )  # fmt: skip
        until = time.monotonic() + 30
        while True:
            assert self.process.poll() is None and time.monotonic() < until, "the store did not start"
            try:
                with StoreClient(self.address) as client:
                    client.register(SPEC, "tiny")
                    return
            except StoreError:
                time.sleep(0.02)


def reaches(client: StoreClient, prompts: list[list[int]]) -> list[list[int]]:
    """Of each prompt: blocks on the device, on in memory, and on in files, as the store explains it."""
    rows = []
    for prompt in prompts:
        told = client.explain(SPEC.id, root_key(SPEC.id), pack_tokens(prompt))
        memory = told.hit // 16
        files = max(reach.tokens for reach in told.reaches if reach.tier == "fs") // 16
        rows.append([0, memory, max(memory, files)])
    return rows


def agree(dynamo: Dynamo, store: OpenStore, prompts: list[list[int]], worker: int) -> list[list[int]]:  # noqa: F811
    """Wait until Dynamo believes of this worker what the store holds; fails with the difference."""
    until = time.monotonic() + PATIENCE_S
    while True:
        with StoreClient(store.address) as client:
            client.register(SPEC, "tiny")
            held = reaches(client, prompts)
        believed = [dynamo.ask(tokens=prompt).get(str(worker), [0, 0, 0]) for prompt in prompts]
        if believed == held or time.monotonic() > until:
            break
        time.sleep(0.2)
    assert believed == held
    return held


@needs_consumers
@pytest.mark.timeout(300)
def test_dynamo_believes_what_a_store_holds_that_evicts_and_is_killed(tmp_path: Path, dynamo: Dynamo) -> None:  # noqa: F811
    rng = random.Random(7)
    prompts = [[rng.randrange(1, 30_000) for _ in range(32 * CHUNKS)] for _ in range(30)]
    store = OpenStore(tmp_path)
    store.start()
    try:
        with StoreClient(store.address) as client:
            client.register(SPEC, "tiny")
            for prompt in prompts[:10]:
                put(client, SPEC, prompt)
            dynamo.ask(worker=1, events=store.endpoint, replay=store.replay)
            for prompt in prompts[10:]:
                put(client, SPEC, prompt)
        store.settled()
        # What was said before it subscribed it learns at the first heartbeat or batch after that.
        held = agree(dynamo, store, prompts, 1)
        assert any(memory < files for _, memory, files in held), "memory should have been too small"
        store.stop(signal.SIGKILL)
        store.start()
        agree(dynamo, store, prompts, 1)
        dynamo.ask(worker=2, events=store.endpoint, replay=store.replay)
        with StoreClient(store.address) as client:
            client.register(SPEC, "tiny")
            put(client, SPEC, prompts[0])
        agree(dynamo, store, prompts, 2)
    finally:
        store.stop()
