"""The servers: Forebay (store, worker, front end), vLLM and llama.cpp. Real processes, started as users start them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.vllm_sides.sides import Alone, Setup, session_cpu_s, stop_session
from forebay.testing.cluster import Cluster

LLAMA = Path(__file__).with_name("llama.py")


@dataclass(frozen=True)
class Memory:
    """Of all processes of a server, in bytes: resident (what several share counts several times), and proportional."""

    resident: int
    proportional: int


class Server(Protocol):
    """One server. `sessions` are those of its processes."""

    name: str

    @property
    def url(self) -> str:
        """See `Serving`."""

    @property
    def model(self) -> str:
        """See `Serving`."""

    @property
    def sessions(self) -> Sequence[int]:
        """Of all of its processes."""

    def start(self) -> None:
        """Start it; returns once it serves."""

    def stop(self) -> None:
        """End it."""


@dataclass
class Ours:
    """A store, a worker and a front end of `cluster`. `store` says whether the worker is attached; `extra` are more of
    the worker's flags. Several in one cluster share its store."""

    name: str
    cluster: Cluster
    store: bool = True
    extra: tuple[str, ...] = ()
    model: str = "ours"

    @property
    def front(self) -> str:
        """The front end's name in the cluster."""
        return f"{self.name}-front"

    @property
    def url(self) -> str:
        """See `Serving`."""
        return self.cluster.url(self.front)

    @property
    def sessions(self) -> list[int]:
        """See `Server`."""
        names = [self.name, self.front, *(["store"] if self.store else [])]
        return [self.cluster.processes[name].pid for name in names]

    def start(self) -> None:
        """See `Server`."""
        if self.store and "store" not in self.cluster.processes:
            self.cluster.start_store()
        self.cluster.start_worker(self.name, store=self.store, extra=self.extra)
        self.cluster.start_frontend(self.front, self.name, extra=("--label", self.model))

    def stop(self) -> None:
        """See `Server`. The store ends with the cluster."""
        for name in (self.front, self.name):
            if name in self.cluster.processes:
                self.cluster.processes.pop(name).end()


@dataclass
class Vllm:
    """A vLLM server with its own prefix cache."""

    setup: Setup
    name: str = "vllm"
    model: str = "m"

    def __post_init__(self) -> None:
        self.side = Alone(self.name, self.setup)

    @property
    def url(self) -> str:
        """See `Serving`."""
        return self.side.url

    @property
    def sessions(self) -> list[int]:
        """See `Server`."""
        return [] if self.side.server is None else [self.side.server.pid]

    def start(self) -> None:
        """See `Server`."""
        self.side.start()

    def stop(self) -> None:
        """See `Server`."""
        self.side.stop()


@dataclass
class Llama:
    """A llama.cpp server in a process of `python`, which has xllamacpp; `streams` slots of `context` tokens each."""

    python: Path
    gguf: Path
    folder: Path
    streams: int = 16
    context: int = 4608
    threads: int = 2
    name: str = "xllamacpp"
    model: str = "m"
    url: str = ""
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def sessions(self) -> list[int]:
        """See `Server`."""
        return [] if self.process is None else [self.process.pid]

    def start(self) -> None:
        """See `Server`."""
        words = [self.gguf, self.threads, self.streams, self.streams * self.context]
        with (self.folder / "xllamacpp.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(self.python), str(LLAMA), *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("http://"):
                self.url = line.strip()
                # What else it prints mustn't fill the pipe.
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return
        told = (self.folder / "xllamacpp.log").read_text()[-2000:]
        raise RuntimeError(f"xllamacpp ended with {self.process.wait()}\n{told}")

    def stop(self) -> None:
        """See `Server`."""
        if self.process is not None:
            stop_session(self.process)
            self.process = None


@contextlib.contextmanager
def standing(server: Server) -> Iterator[Server]:
    """A server from its start to its end, whatever happens."""
    try:
        server.start()
        yield server
    finally:
        server.stop()


def cpu_s(server: Server) -> float:
    """CPU seconds that its processes have used."""
    return sum(map(session_cpu_s, server.sessions))


def memory(server: Server) -> Memory:
    """Of all of its processes now."""
    resident = proportional = 0
    for pid in _processes(server.sessions):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                resident += 1024 * int(rest.split()[0]) if name == "Rss" else 0
                proportional += 1024 * int(rest.split()[0]) if name == "Pss" else 0
    return Memory(resident, proportional)


def _processes(sessions: Sequence[int]) -> Iterator[int]:
    wanted = set(sessions)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) in wanted:
                yield int(entry.name)


