"""What a p2p tier pulls from a store on the same host, each way beside the bare one, in turns.

    python -m benchmarks.tiers.p2p [--megabytes 4] [--chunks 32] [--rounds 5]

A store holds the chunks; a tier in this process loads all of them, every byte verified. `peer` is what a bare TCP
socket moves from the same kind of memory into the same slots, and what NIXL alone reads by the same descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Measure, Report, median, parser
from forebay.errors import ForebayError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.header import granule_checksums
from forebay.kvstore.identity import GroupGeometry, Namespace, chunk_keys, encode_namespace, pack_tokens, root_key
from forebay.kvstore.lookup import Prompt
from forebay.kvstore.protocol import Written
from forebay.testing.ports import free_port
from forebay.tiers.base import ChunkId, LoadJob, Query
from forebay.tiers.p2p.keys import own_pair
from forebay.tiers.p2p.nixl import NixlAgent
from forebay.tiers.p2p.tier import P2pTier
from forebay.tiers.p2p.tls import dialling_context, new_identity
from forebay.tiers.p2p.wire import PIECE_BYTES

TOKENS = 256
PATIENCE_S = 60.0
AT_ONCE = 2
"""Loads under way, and bare connections: one a core here."""


def namespace(chunk_bytes: int) -> Namespace:
    """One group whose chunks have this many bytes."""
    layers = chunk_bytes // (2 * 4 * TOKENS * 64 * 2)
    return Namespace(
        weights=b"b" * 32, groups=(GroupGeometry("full", "full", tuple(range(layers)), 4, 64, "bfloat16"),),
        chunk_tokens=TOKENS,
    )  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A running store, the tiers it listens with by name, and what it holds."""

    ports: dict[str, int]
    keys: Path
    spec: Namespace
    chunks: list[ChunkId]
    chunk_bytes: int


def fill(address: str, spec: Namespace, count: int) -> list[ChunkId]:
    """Store a chain of random chunks."""
    tokens = pack_tokens(range(1, count * TOKENS + 1))
    root = root_key(spec.id)
    prompt = Prompt(spec.id, spec, root, tokens, chunk_keys(root, tokens, TOKENS), count * TOKENS)
    with StoreClient(address) as client:
        client.register(spec)
        chunks = [prompt.chunk(0, position) for position in range(count)]
        for _, slot in zip(chunks, client.reserve(spec.id, "", chunks).slots, strict=True):
            payload = memoryview(os.urandom(spec.groups[0].granule_bytes * (TOKENS // 16)))
            client.room(slot, len(payload))[:] = payload
            sums = granule_checksums(payload, spec.groups[0].granule_bytes)
            assert client.commit([Written(slot.reservation, sums)]).committed == 1
    return [ChunkId(0, chunk.key) for chunk in chunks]


@contextmanager
def running(folder: Path, chunk_bytes: int, count: int, ways: dict[str, str]) -> Iterator[Source]:
    """A store with one p2p tier for each way, filled."""
    ports = {name: free_port() for name in ways}
    address, config, keys = f"unix://{folder}/s", folder / "forebay.toml", folder / "keys"
    own_pair(keys)
    (keys / "source.pub").write_bytes((keys / "public.key").read_bytes())
    config.write_text(
        "".join(
            f'[tiers.{name}]\nkind = "p2p"\ncopy = "never"\nstore = "{address}"\nlisten = "127.0.0.1:{ports[name]}"\n'
            + more.format(keys=keys) + "\n"
            for name, more in ways.items()
        )
    )  # fmt: skip
    memory = 2 * chunk_bytes * count + (64 << 20)
    command = [sys.executable, "-m", "forebay", "store", "--config", str(config), "--socket", f"{folder}/s"]
    process = subprocess.Popen([*command, "--memory", str(memory), "--extent", "64MiB"], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None and time.monotonic() < until, "the store did not start"
            with suppress(ForebayError), StoreClient(address) as client:
                values = client.stats().values
                full = values["host.bytes_budget"] >= memory // (64 << 20) * (64 << 20)
                if full and all(values.get(f"tier.{name}.source.connected") for name in ways):
                    break
            time.sleep(0.05)
        spec = namespace(chunk_bytes)
        yield Source(ports, keys, spec, fill(address, spec, count), chunk_bytes)
    finally:
        process.terminate()
        process.wait(30)


class Pool:
    """One extent to load into, of memory that has been touched."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create("pool")
        os.ftruncate(self.descriptor, size)
        self.map = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memory = memoryview(self.map)


def puller(source: Source, pool: Pool, name: str, **options: object) -> P2pTier:
    """A tier of this process that sees the source by one of its ways."""
    peer = f"source=127.0.0.1:{source.ports[name]}"
    tier = P2pTier("p2p", {
        "store": "unix:///nowhere", "peers": peer, "stall_s": 10.0, "ask_s": 5.0,
        "load_queue_bytes": 1 << 40, **options,
    })  # fmt: skip
    tier.attach_extent(0, pool.memory)
    tier.note_namespace(source.spec.id, encode_namespace(source.spec))
    until = time.monotonic() + PATIENCE_S
    needs = {"nixl": "nixl_peers", "tls": "streams_usable"}.get(str(options.get("bulk")), "peers_up")
    while tier.statistics().values["peers_up"] < 1 or tier.statistics().values[needs] < 1:
        assert time.monotonic() < until, tier.statistics().info
        time.sleep(0.01)
    return tier


def pull(tier: P2pTier, source: Source) -> float:
    """Load every chunk; seconds. The lookup that a daemon makes before isn't counted."""
    look_up(tier, source)
    awake = threading.Event()
    tier.set_waker(awake.set)
    began = time.perf_counter()
    for number, chunk in enumerate(source.chunks):
        tier.submit_load(LoadJob(number, chunk, 0, number * source.chunk_bytes, source.chunk_bytes, PATIENCE_S))
    left = set(range(len(source.chunks)))
    while left:
        awake.wait(1.0)
        awake.clear()
        for result in tier.get_finished_jobs():
            assert result.ok, result
            left.remove(result.id)
    return time.perf_counter() - began


def look_up(tier: P2pTier, source: Source) -> float:
    """Ask for every chunk until all are known; seconds."""
    queries = [Query(0, chunk.key, bytes(32), b"", bytes(32)) for chunk in source.chunks]
    began = time.perf_counter()
    while any(result.outcome == "retry" for result in tier.lookup(queries)):
        time.sleep(0.0001)
    took = time.perf_counter() - began
    assert all(result.outcome == "hit" for result in tier.lookup(queries))
    return took


# --- bare ------------------------------------------------------------------------------------------------


def _send(port: Any, size: int, chunk_bytes: int, tls: bool) -> None:
    """Another process: whoever connects and sends a number gets that chunk, again and again."""
    memory = Pool(size).memory
    identity = new_identity() if tls else None

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if identity is not None:
            connection = identity.context.wrap_socket(connection, server_side=True)
        while number := connection.recv(4):
            at = int.from_bytes(number, "little") * chunk_bytes
            connection.sendall(memory[at : at + chunk_bytes])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.send(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


class BareSockets:
    """`AT_ONCE` connections that fetch chunks into the pool, and check nothing; through TLS or not."""

    def __init__(self, source: Source, pool: Pool, *, tls: bool = False) -> None:
        here, there = multiprocessing.Pipe()
        size = source.chunk_bytes * len(source.chunks)
        self._process = multiprocessing.get_context("spawn").Process(
            target=_send, args=(there, size, source.chunk_bytes, tls), daemon=True
        )
        self._process.start()
        port = here.recv()
        self._source, self._pool = source, pool
        self._connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(AT_ONCE)]
        for connection in self._connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            context = dialling_context()
            self._connections = [context.wrap_socket(connection) for connection in self._connections]

    def pull(self) -> float:
        """Fetch every chunk; seconds."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(AT_ONCE) as threads:
            began = time.perf_counter()
            list(threads.map(self._fetch_every, range(AT_ONCE)))
            return time.perf_counter() - began

    def _fetch_every(self, first: int) -> None:
        connection, size = self._connections[first], self._source.chunk_bytes
        for number in range(first, len(self._source.chunks), AT_ONCE):
            connection.sendall(number.to_bytes(4, "little"))
            at, end = number * size, (number + 1) * size
            while at < end:
                at += connection.recv_into(self._pool.memory[at : min(at + (4 << 20), end)])

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._process.kill()
        self._process.join()


def _be_read(pipe: Any, size: int) -> None:
    """Another process, whose memory NIXL reads."""
    memory = Pool(size).memory
    agent = NixlAgent("bare source", loopback=True)
    agent.thread.submit(agent._attach, 0, memory).result()
    pipe.send((agent.metadata(), agent.address(0, 0)))
    while not pipe.poll(0.0005):
        agent.thread.submit(agent.progress).result()


class BareNixl:
    """Reads chunks by the same descriptors, one after the other, and checks nothing."""

    def __init__(self, source: Source, pool: Pool) -> None:
        self._pipe, there = multiprocessing.Pipe()
        size = source.chunk_bytes * len(source.chunks)
        self._process = multiprocessing.get_context("spawn").Process(target=_be_read, args=(there, size), daemon=True)
        self._process.start()
        metadata, self._address = self._pipe.recv()
        self._source, self._pool = source, pool
        self._agent = NixlAgent("bare reader", loopback=True)
        self._agent.thread.submit(self._agent._attach, 0, pool.memory).result()
        self._peer = self._agent.thread.submit(self._agent.meet, metadata).result()

    def pull(self) -> float:
        """Read every chunk; seconds."""
        return self._agent.thread.submit(self._read_all).result()

    def _read_all(self) -> float:
        size, bare = self._source.chunk_bytes, self._agent._agent
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._pool.memory))
        began = time.perf_counter()
        for number in range(len(self._source.chunks)):
            at = number * size
            pieces = [(at + piece, min(PIECE_BYTES, size - piece), 0) for piece in range(0, size, PIECE_BYTES)]
            ours = bare.get_xfer_descs([(base + here, length, 0) for here, length, _ in pieces], "DRAM")
            theirs = bare.get_xfer_descs([(self._address + there, length, 0) for there, length, _ in pieces], "DRAM")
            handle = bare.initialize_xfer("READ", ours, theirs, self._peer)
            state = bare.transfer(handle)
            while state == "PROC":
                state = bare.check_xfer_state(handle)
            assert state == "DONE", state
            bare.release_xfer_handle(handle)
        return time.perf_counter() - began

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(5)
        self._process.kill()
        self._agent.close()


# --- all of it -------------------------------------------------------------------------------------------


def in_turns(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each, measured in turns; a first round isn't counted."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            seconds = call()
            if turn:
                took[name].append(seconds)
    return {name: median(values) for name, values in took.items()}


WAYS = {
    "stream": "", "tls": 'bulk = "tls"\nkeys = "{keys}"', "frames": 'bulk = "frames"',
    "curve": 'bulk = "frames"\nkeys = "{keys}"', "nixl": 'bulk = "nixl"',
}  # fmt: skip


def has_nixl() -> bool:
    """Is NIXL installed?"""
    import importlib.util

    return importlib.util.find_spec("nixl_cu12") is not None


def measure(report: Report, chunk_bytes: int, count: int, rounds: int) -> None:
    """Every way, with chunks of one size."""
    total = chunk_bytes * count
    ways = {name: more for name, more in WAYS.items() if name != "nixl" or has_nixl()}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pool = Pool(total)
        source = stack.enter_context(running(Path(folder), chunk_bytes, count, ways))
        options: dict[str, dict[str, object]] = {
            "stream": {}, "tls": {"bulk": "tls", "keys": str(source.keys)}, "frames": {"bulk": "frames"},
            "curve": {"bulk": "frames", "keys": str(source.keys)}, "nixl": {"bulk": "nixl"},
        }  # fmt: skip
        tiers = {name: stack.enter_context(closing(puller(source, pool, name, **options[name]))) for name in ways}
        calls: dict[str, Callable[[], float]] = {name: partial(pull, tier, source) for name, tier in tiers.items()}
        calls["bare TCP"] = stack.enter_context(closing(BareSockets(source, pool))).pull
        calls["bare TLS"] = stack.enter_context(closing(BareSockets(source, pool, tls=True))).pull
        if "nixl" in ways:
            calls["bare NIXL"] = stack.enter_context(closing(BareNixl(source, pool))).pull
        seconds = in_turns(calls, rounds)
        for name, tier in tiers.items():
            assert tier.statistics().values[f"loads_by_{'frames' if name == 'curve' else name}"] > 0
        rates = {name: total / took / 1e9 for name, took in seconds.items()}
        _tell(report, rates, f"{chunk_bytes / (1 << 20):g} MiB")
        asks = []
        for _ in range(rounds):
            time.sleep(1.1)  # what was answered before is forgotten by then
            asks.append(look_up(tiers["stream"], source))
        report.add(Measure(f"lookup of {count} keys, a key", median(asks) / count * 1e6, "us"))


def _tell(report: Report, rates: dict[str, float], size: str) -> None:
    tcp = rates["bare TCP"]
    ratio = rates["stream"] / tcp
    report.add(Measure(f"stream, {size}", rates["stream"], "GB/s", tcp, None, ratio, "0.8 of bare TCP", ratio >= 0.8))
    bare = rates["bare TLS"]
    report.add(Measure(f"tls, {size}", rates["tls"], "GB/s", bare, None, rates["tls"] / bare, "", True))
    if "nixl" in rates:
        bare = rates["bare NIXL"]
        ratio = rates["nixl"] / bare
        report.add(Measure(f"nixl, {size}", rates["nixl"], "GB/s", bare, None, ratio, "0.8 of bare NIXL", ratio >= 0.8))
    report.add(Measure(f"frames, plain, {size}", rates["frames"], "GB/s", tcp, None, rates["frames"] / tcp))
    report.add(Measure(f"frames, CURVE, {size}", rates["curve"], "GB/s", tcp, None, rates["curve"] / tcp))


def main() -> int:
    """Run it; exit code 1 if a target is missed."""
    arguments = parser((__doc__ or "").split("\n", maxsplit=1)[0])
    arguments.add_argument("--megabytes", type=int, nargs="*", default=[4, 1], help="sizes of chunks, in MiB")
    arguments.add_argument("--chunks", type=int, default=32)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    report = Report("p2p: a store on this host pulled from, beside bare TCP and NIXL")
    for megabytes in options.megabytes:
        measure(report, megabytes << 20, options.chunks, options.rounds)
    return report.print(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
