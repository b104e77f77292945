"""One front end, two workers, one store and its peer, on which all cells of the matrix are played.

The store is started over one source after the other; workers, front end and peer are shared. What is asked under one
source's salt was never asked before, though prompts and answers are the same: transformers computes them once.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.testing.cluster import Cluster, Completion, wait_for
from forebay.workers.control import WorkerControl
from tests.e2e.backends import Backend, Bucket, Files, Peer
from tests.e2e.paced import Pace
from tests.e2e.reference import greedy_reference
from tests.e2e.streams import Stream
from tests.e2e.windowed import tiny_windowed

CHUNK, UNIT, VOCAB = 32, 16, 500
DEVICE_TOKENS = 384
"""What a worker's device holds: one of the crowd, and a part of another one."""
FRONT, WORKERS = "front", ("worker1", "worker2")
LONG, ANSWER, CROWD, CROWD_LONG, SHORT = 72, 240, 8, 110, 12
"""Tokens of prompts and answers, of the crowd's and of short ones; and how many are in the crowd."""
TIERS = ("fs", "s3", "p2p")
SOURCES = ("device", "host", *TIERS)


@dataclass(frozen=True)
class Asked:
    """A prompt and transformers' greedy answer."""

    prompt: list[int]
    answer: list[int]

    @property
    def stored(self) -> int:
        """Tokens of it that a cache can have."""
        return (len(self.prompt) - 1) // UNIT * UNIT


@dataclass
class Script:
    """What is asked: one prompt a cell for streams, three short ones around a dead peer, and a crowd that shares."""

    kill_worker: Asked
    kill_store: Asked
    cancel: Asked
    kill_peer: list[Asked]
    crowd: list[Asked]

    def all(self) -> list[Asked]:
        """Everything."""
        return [self.kill_worker, self.kill_store, self.cancel, *self.kill_peer, *self.crowd]


def write_script(model: Path) -> Script:
    """Draw prompts and have transformers answer them."""
    rng = random.Random(5)
    singles = [[rng.randrange(16, VOCAB) for _ in range(LONG)] for _ in range(6)]
    base = [rng.randrange(16, VOCAB) for _ in range(2 * CHUNK)]
    crowd = [base + [rng.randrange(16, VOCAB) for _ in range(CHUNK)] for _ in range(CROWD)]
    long, short = greedy_reference(model, singles[:3], ANSWER), greedy_reference(model, singles[3:], SHORT)
    many = greedy_reference(model, crowd, CROWD_LONG)
    asked = [Asked(*pair) for pair in zip(singles, [*long, *short], strict=True)]
    return Script(*asked[:3], asked[3:], [Asked(*pair) for pair in zip(crowd, many, strict=True)])


@dataclass
class Stage:
    """Everything that runs, and what is asked. `ranks` is the workers' tensor parallel size, of which `sharing` at a
    time share out positions."""

    cluster: Cluster
    script: Script
    ranks: int
    sharing: int
    peer: Peer
    salt: str = ""
    backends: dict[str, Backend] = field(default_factory=dict)
    _homes: dict[int, str] = field(default_factory=dict)

    # --- up and down -----------------------------------------------------------------------------------

    @classmethod
    def build(cls, folder: Path, ranks: int, sharing: int = 1) -> Stage:
        """Start what all sources share; the store comes with `play`."""
        tiny_windowed(folder / "model")
        module = Pace(folder / "pace").module
        cluster = Cluster(folder, folder / "model", chunk_tokens=CHUNK, module=module, lookup_deadline="20s")
        return cls(cluster, write_script(folder / "model"), ranks, sharing, Peer(folder / "peer"))

    def play(self, source: str) -> None:
        """Start the store over a source, have every prompt computed and stored, and leave it in that source alone."""
        self.salt = f"{source}-{self.ranks}"
        self._restart_store(source)
        for number, asked in enumerate(self.script.all()):
            before = self.figure("requests.received", WORKERS[0])
            self.ask(asked, 2)
            grown = self.figure("requests.received", WORKERS[0]) > before
            self._homes[number] = WORKERS[0] if grown else WORKERS[1]
        self.cluster.settle(FRONT)
        if source in TIERS:
            self._restart_store(source)
            values = self.cluster.store_values()
            assert values["host.bytes_used"] == 0 and values.get("host.readopted", 0) == 0, "nothing is in memory"

    @property
    def pace(self) -> Pace:
        """How fast both workers are."""
        return Pace(self.cluster.folder / "pace")

    def _restart_store(self, source: str) -> None:
        cluster, store = self.cluster, self.cluster.processes.get("store")
        if store is not None and store.running:
            assert store.end() == 0
        cluster.tiers = self._tiers(source)
        cluster.start_store()
        if FRONT not in cluster.processes:
            for name in WORKERS:
                self.start_worker(name)
            cluster.start_frontend(FRONT, *WORKERS)
        self.able()
        wait_for("the peer", lambda: cluster.store_values().get("tier.p2p.peers_up") == 1)

    def _tiers(self, source: str) -> str:
        """The source's tier and, whatever it is, a peer: one that is asked, and given copies only where it is it."""
        address = self.cluster.store_address
        push = 'push_to = "peer"\n' if source == "p2p" else 'copy = "never"\n'
        peer = (
            f'[tiers.p2p]\nkind = "p2p"\nstore = "{address}"\nlisten = "127.0.0.1:{self.peer.our_port}"\n'
            f'peers = "peer=127.0.0.1:{self.peer.port}"\nask_s = "5s"\n{push}'
        )
        kind = {"fs": Files, "s3": Bucket}.get(source)
        if kind is None:
            return peer
        if source not in self.backends:
            self.backends[source] = kind(self.cluster.folder / source)
        return self.backends[source].tiers(address) + peer

    def start_worker(self, name: str) -> None:
        """A worker; the front end finds it by itself. Prefixes are loaded as a whole, so that paths can be counted."""
        more = ("--tensor-parallel-size", str(self.ranks), "--decode-context-parallel-size", str(self.sharing))
        self.cluster.start_worker(
            name, extra=("--threads", "1", "--max-tokens", str(DEVICE_TOKENS), "--prefixes", "load", *more)
        )

    def able(self) -> None:
        """Wait until both workers can be used, and have their store."""

        def both() -> bool:
            for name in WORKERS:
                self.cluster.processes[name].must_run()
            workers = self.cluster.health(FRONT)["workers"].values()
            return all(worker["state"] == "ok" and worker["store"] == "connected" for worker in workers)

        wait_for("both workers", both)

    def close(self) -> None:
        """End everything."""
        self.cluster.stop()
        self.peer.close()
        for backend in self.backends.values():
            backend.close()

    # --- asking ----------------------------------------------------------------------------------------

    def ask(self, asked: Asked, length: int) -> Completion:
        """The answer, which must be transformers'."""
        got = self.cluster.complete(FRONT, asked.prompt, length, cache_salt=self.salt)
        assert got.token_ids == asked.answer[:length], f"{got.cached_tokens} cached: another answer"
        return got

    def stream(self, asked: Asked, **more: Any) -> Stream:
        """The answer as it comes."""
        return Stream(self.cluster, FRONT, asked.prompt, len(asked.answer), cache_salt=self.salt, **more)

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Inside, answers come no faster than they are read."""
        self.pace.flow()
        try:
            yield
        finally:
            self.pace.free()

    def mid_chunk(self, stream: Stream, asked: Asked) -> int:
        """Let a stream come to the next middle of a chunk, long after the chunk before that was full, and go on at a
        crawl; its tokens."""
        count = len(stream.ids) + 1
        while (len(asked.prompt) + count) % CHUNK != CHUNK // 2:
            count += 1
        stream.reach(count)
        self.pace.wait()
        return count

    @contextmanager
    def at_one_worker(self, source: str, asked: Asked) -> Iterator[str]:
        """Inside, all goes to one worker: for `device` to that which computed `asked` (and has it on its device, if it
        had lost it meanwhile), else to the other one."""
        name = self._homes[self.script.all().index(asked)]
        away = name if source != "device" else next(other for other in WORKERS if other != name)
        with self.only(next(other for other in WORKERS if other != away)) as there:
            if source == "device":
                self.ask(asked, 2)
            yield there

    @contextmanager
    def only(self, name: str) -> Iterator[str]:
        """Inside, all goes to this worker."""
        away = next(other for other in WORKERS if other != name)
        with WorkerControl(self.cluster.socket(away)) as control:
            control.drain(True)
            wait_for("the drain", lambda: self.state(away) == "draining")
            try:
                yield name
            finally:
                control.drain(False)
                wait_for("its end", lambda: self.state(away) == "ok")

    def state(self, name: str) -> str:
        """How the front end sees a worker."""
        return str(self.cluster.health(FRONT)["workers"][name]["state"])

    def figure(self, name: str, worker: str = "") -> int:
        """One of the workers' figures, of one or of both."""
        return int(self.cluster.figure(FRONT, name, worker))

    def link(self, name: str) -> int:
        """One of the front end's own figures of its workers."""
        return int(self.cluster.figures(FRONT)[f"forebay_link_{name}"])

    def idle(self) -> None:
        """Wait until no worker has a request or a block in use, and nothing of the pool is held for anybody."""

        def nothing() -> bool:
            states = ("requests.running", "requests.loading", "requests.waiting", "requests.settling")
            blocks = ("blocks.full.used", "blocks.window.used", "blocks.full.draining", "blocks.window.draining")
            values = self.cluster.store_values()
            return not any(self.figure(name) for name in (*states, *blocks)) and values["store.leases"] == 0

        wait_for("nothing to be held", nothing, 30)

    # --- deeds -----------------------------------------------------------------------------------------

    def kill(self, name: str) -> int:
        """SIGKILL one of the cluster's processes; its id."""
        process = self.cluster.processes[name]
        pid = process.pid
        process.end(signal.SIGKILL)
        return pid

    def kill_peer(self) -> None:
        """SIGKILL the peer's store."""
        os.kill(self.peer.process.pid, signal.SIGKILL)
        self.peer.process.wait(30)
        wait_for("the news", lambda: self.cluster.store_values().get("tier.p2p.peers_up") == 0)

    def restart_peer(self) -> None:
        """Another process on what is left of the peer's pool."""
        self.peer.start()
        wait_for("the peer", lambda: self.cluster.store_values().get("tier.p2p.peers_up") == 1)
