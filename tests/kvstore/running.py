"""A store daemon in a process of its own, and a client's moves against it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from forebay.errors import StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.kvstore.extents import pool_path
from forebay.kvstore.header import first_bad_granule, granule_checksums
from forebay.kvstore.identity import Namespace, chunk_keys, pack_tokens, root_key
from forebay.kvstore.lookup import Prompt
from forebay.kvstore.protocol import ChunkRead, Found, Written

MEMORY = 16 << 20
SCRIPT = """
import sys
from pathlib import Path
from forebay.errors import ForebayError
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.daemon import run_store
try:
    raise SystemExit(run_store(StoreConfig(Path(sys.argv[1]), memory=int(sys.argv[2]), extent=2 << 20)))
except ForebayError as error:
    print(error, file=sys.stderr)
    raise SystemExit(error.exit_code)
"""


class Store:
    """One daemon on one socket; may be started again."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "store.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pool(self) -> Path:
        return pool_path(Path("/dev/shm"), self.socket)

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(self.socket), str(MEMORY)])
        until = time.monotonic() + 60
        while True:
            assert self.process.poll() is None and time.monotonic() < until, "the store did not start"
            try:
                with StoreClient(self.address, maps=False) as client:
                    if client.stats().values["host.bytes_budget"] >= MEMORY:
                        return
            except StoreUnavailable:
                pass
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)


def prompt_of(spec: Namespace, tokens: list[int]) -> Prompt:
    root, packed = root_key(spec.id), pack_tokens(tokens)
    keys = chunk_keys(root, packed, spec.chunk_tokens)
    return Prompt(spec.id, spec, root, packed, keys, len(tokens))


def payload_of(spec: Namespace, group: int, key: bytes, tokens: int) -> bytes:
    """The bytes that the tests store under this key."""
    return random.Random(bytes([group]) + key).randbytes(spec.groups[group].granule_bytes * (tokens // 16))


def put(client: StoreClient, spec: Namespace, tokens: list[int]) -> int:
    prompt = prompt_of(spec, tokens)
    chunks = [prompt.chunk(g, p) for p in range(prompt.positions) for g in range(len(spec.groups))]
    slots = client.reserve(spec.id, "", chunks).slots
    written = []
    for chunk, slot in zip(chunks, slots, strict=True):
        if slot.status == "reserved":
            data = payload_of(spec, chunk.group, chunk.key, len(chunk.tokens) // 4)
            client.room(slot, len(data))[:] = data
            checksums = granule_checksums(memoryview(data), spec.groups[chunk.group].granule_bytes)
            written.append(Written(slot.reservation, checksums))
    return client.commit(written).committed


def get(client: StoreClient, spec: Namespace, tokens: list[int]) -> Found:
    prompt = prompt_of(spec, tokens)
    found = client.lookup(spec.id, prompt.root, prompt.tokens, prompt.keys, limit=len(tokens))
    for chunk in found.chunks:
        # A hit may end inside a chunk of another prompt: its bytes are those of the chunk that is served.
        assert bytes(client.payload(chunk)) == payload_of(spec, chunk.group, chunk.key, chunk.tokens)
        granule = spec.groups[chunk.group].granule_bytes
        assert first_bad_granule(client.payload(chunk), granule, client.checksums(chunk)) is None
        assert client.intact(chunk)
    return found


def flip_a_bit(store: Store, chunk: ChunkRead) -> None:
    with open(store.pool / f"extent-{chunk.extent:06d}", "r+b") as extent:
        extent.seek(chunk.payload_offset + chunk.length // 2)
        byte = extent.read(1)[0]
        extent.seek(-1, os.SEEK_CUR)
        extent.write(bytes([byte ^ 4]))
