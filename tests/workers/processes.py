"""Real worker and store processes, and a blocking front end that speaks the worker's protocol."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import StoreError, StoreUnavailable
from forebay.ipc.framing import FrameBuffer
from forebay.ipc.sockets import connect
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import pack_tokens
from forebay.workers.protocol import (
    FROM_WORKER,
    TO_WORKER,
    Alive,
    Cancel,
    Describe,
    Description,
    Finished,
    FromWorker,
    Generate,
    GetWorkerStats,
    Outputs,
    Sampling,
    Started,
    WorkerStats,
)

PATIENCE_S = 60.0


@dataclass
class Running:
    """A started process; its output is shown when something fails."""

    popen: subprocess.Popen[bytes]
    log: Path

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(30)


def start(log: Path, *arguments: str) -> Running:
    """Run `python -m ARGUMENTS`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with open(log, "ab") as out:
        popen = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=out, stderr=out, env=environment, start_new_session=True
        )
    return Running(popen, log)


def start_store(folder: Path) -> Running:
    """A store with its file tier; returns once it answers."""
    address = f"{folder}/store.sock"
    store = start(
        folder / "store.log", "forebay", "store", "--socket", address, "--memory", "64MiB", "--fs", f"{folder}/files"
    )
    end = time.monotonic() + PATIENCE_S
    while not store_values(folder):
        assert store.popen.poll() is None and time.monotonic() < end, store.log.read_text()[-2000:]
        time.sleep(0.02)
    return store


def store_values(folder: Path) -> dict[str, float]:
    """The store's figures; empty while it doesn't answer."""
    try:
        with StoreClient(f"{folder}/store.sock", maps=False) as client:
            return client.stats().values
    except StoreError:
        return {}


def start_worker(folder: Path, name: str, *more: str, store: bool = True) -> tuple[Running, FrontEnd]:
    """A fake worker and a connection to it."""
    listen = f"{folder}/{name}.sock"
    process = start(
        folder / f"{name}.log", "tests.workers.fake_worker", listen, f"{folder}/store.sock" if store else "", *more
    )
    return process, FrontEnd.to(Path(listen), process)


@dataclass
class Heard:
    """What one request was told."""

    emitted: int = 0
    tokens: list[int] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None


class FrontEnd:
    """One connection to a worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.heard: dict[str, Heard] = {}
        self.alive: list[Alive] = []
        self.other: list[FromWorker] = []
        self._buffer: FrameBuffer[FromWorker] = FrameBuffer(FROM_WORKER)

    @classmethod
    def to(cls, path: Path, process: Running) -> FrontEnd:
        end = time.monotonic() + PATIENCE_S
        while True:
            assert process.popen.poll() is None and time.monotonic() < end, process.log.read_text()[-2000:]
            try:
                return cls(connect(path, PATIENCE_S))
            except StoreUnavailable:
                time.sleep(0.02)

    def send(self, message: Any) -> None:
        self.connection.sendall(TO_WORKER.encode(message))

    def generate(self, id: str, prompt: list[int], max_tokens: int, **more: Any) -> None:
        before: list[int] = more.pop("emitted", [])
        sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.heard[id] = Heard(len(before))
        emitted = pack_tokens(before)
        self.send(Generate(id=id, attempt=1, prompt=pack_tokens(prompt), sampling=sampling, emitted=emitted, **more))

    def cancel(self, id: str) -> None:
        self.send(Cancel(id=id, attempt=1))

    def receive(self) -> None:
        """Wait for some bytes and digest them. Raises ConnectionError when the worker is gone."""
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionError("the worker closed the connection")
        for message in self._buffer.feed(data):
            match message:
                case Started():
                    self.heard[message.id].started = message
                case Outputs():
                    for out in message.tokens:
                        heard = self.heard[out.id]
                        assert out.index == heard.emitted + len(heard.tokens)
                        heard.tokens.append(out.token)
                case Finished():
                    self.heard[message.id].finished = message
                case Alive():
                    self.alive.append(message)
                case _:
                    self.other.append(message)

    def receive_all(self) -> None:
        """Digest until the worker closes the connection, which raises ConnectionError."""
        while True:
            self.receive()

    def wait(self, id: str) -> Heard:
        while self.heard[id].finished is None:
            self.receive()
        return self.heard[id]

    def ask(self, id: str, prompt: list[int], max_tokens: int, **more: Any) -> Heard:
        self.generate(id, prompt, max_tokens, **more)
        return self.wait(id)

    def _asked(self, question: Any) -> Any:
        self.send(question)
        while not self.other:
            self.receive()
        return self.other.pop()

    def describe(self) -> Description:
        answer = self._asked(Describe())
        assert isinstance(answer, Description)
        return answer

    def stats(self) -> WorkerStats:
        answer = self._asked(GetWorkerStats())
        assert isinstance(answer, WorkerStats)
        return answer

    def settle(self) -> None:
        """Wait until the worker has a store and nothing left to push."""
        end = time.monotonic() + PATIENCE_S
        while True:
            stats = self.stats()
            quiet = stats.values["pushes.running"] == 0 and stats.values["push.queue.bytes"] == 0
            if stats.store == "connected" and quiet:
                return
            assert time.monotonic() < end, stats
            time.sleep(0.02)
