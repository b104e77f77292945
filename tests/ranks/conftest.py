"""Real workers with any number of ranks, started by the public command; a store that they share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.workers.processes import PATIENCE_S, FrontEnd, Running, start, start_store

CHUNK = 32

START_S = 200.0
"""Up to fifteen ranks import torch and load their parts at the same time."""


@dataclass
class Worker:
    """One worker's process and a connection to it."""

    running: Running
    front: FrontEnd
    listen: Path

    @property
    def pid(self) -> int:
        return self.running.popen.pid

    def end(self) -> None:
        self.front.connection.close()
        assert self.running.end() == 0, self.running.log.read_text()[-2000:]


@dataclass
class Crowd:
    """One store, and the workers of a test. `stop` ends them and checks that they left nothing behind."""

    folder: Path
    store: Running
    workers: dict[str, Worker] = field(default_factory=dict)
    started: dict[str, tuple[Running, Path]] = field(default_factory=dict)

    def start(self, name: str, model: Path, size: int, *more: str) -> None:
        """Begin to start a worker; `worker` waits for it."""
        listen = self.folder / f"{name}.sock"
        running = start(
            self.folder / f"{name}.log", "forebay", "worker", str(model), "--listen", str(listen),
            "--store", f"{self.folder}/store.sock", "--dtype", "float64", "--chunk-tokens", str(CHUNK),
            "--max-tokens", "2048", "--tensor-parallel-size", str(size), "--threads", "1", *more,
        )  # fmt: skip
        self.started[name] = running, listen

    def worker(self, name: str) -> Worker:
        """A worker that was started, once it serves and has its store."""
        if name not in self.workers:
            running, listen = self.started.pop(name)
            front = FrontEnd.to(listen, running)
            front.connection.settimeout(START_S)
            front.describe()
            front.connection.settimeout(PATIENCE_S)
            front.settle()
            self.workers[name] = Worker(running, front, listen)
        return self.workers[name]

    def stop(self) -> None:
        """End all that still runs."""
        for name in list(self.started):
            running, _ = self.started.pop(name)
            running.end()
        for worker in self.workers.values():
            if worker.running.popen.poll() is None:
                worker.end()
        assert self.store.end() == 0
        left = [path for path in self.folder.iterdir() if path.suffix in (".sock", ".ranks")]
        assert left == [], "sockets and places to meet are gone"


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    folder = tmp_path_factory.mktemp("ranks")
    made = Crowd(folder, start_store(folder))
    yield made
    made.stop()


def children(pid: int) -> list[int]:
    """Processes that this one has started and that still live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return sorted(found)


def wait_gone(pids: list[int]) -> None:
    """Until none of these processes lives any more."""
    until = time.monotonic() + PATIENCE_S
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < until, pids
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pid: int) -> list[str]:
    """Addresses, in hexadecimal, on which this process accepts TCP connections."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].rpartition(":")[0])
    return found
