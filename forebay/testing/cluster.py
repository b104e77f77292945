"""A small cluster of real processes on this machine: store, workers, front ends.

Everything is started by the public command line and told apart by process id. Nothing here knows how the
parts work inside; what they did is read from their counters.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from forebay.errors import StoreError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.extents import pool_path
from forebay.parent import PARENT_VARIABLE
from forebay.testing import web
from forebay.testing.ports import free_port

START_S = 120.0
SETTLE_S = 60.0
STARTING_S = 0.05
"""How often a starting front end is asked: each answer takes from what its worker needs to start."""


def wait_for(what: str, ready: Callable[[], Any], timeout_s: float = START_S, every_s: float = 0.02) -> Any:
    """The first true answer of `ready`, asked every `every_s`: by default 20 ms."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        answer = ready()
        if answer:
            return answer
        time.sleep(every_s)
    raise AssertionError(f"{what}: not within {timeout_s:.0f} s")


@dataclass
class Process:
    """One started command; its output goes to a file that a failure can show. `module` is what python runs, `threads`
    are those that compute."""

    name: str
    arguments: list[str]
    log: Path
    module: str = "forebay"
    threads: int = 2
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        """Start it in a process group of its own."""
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        if threading.current_thread() is threading.main_thread():
            environment[PARENT_VARIABLE] = str(os.getpid())  # an interrupted test run leaves nothing behind
        with open(self.log, "ab") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *self.module.split(), *self.arguments],
                stdout=out, stderr=out, env=environment, start_new_session=True,
            )  # fmt: skip
        return self

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def must_run(self) -> None:
        """Fail with its last words if it has ended."""
        assert self.running, f"{self.name} ended early:\n{self.log.read_text()[-3000:]}"

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Signal it and wait; returns its exit code."""
        assert self.popen is not None
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(timeout_s)


@dataclass(frozen=True)
class Completion:
    """One answered request."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    logprobs: dict[str, Any]


@dataclass
class Cluster:
    """Processes of one test; `stop` ends them all and checks that nothing is left. `tiers` are tables of a store's
    configuration file; without, the store has one file tier, `fs`. `module` is what python runs of workers and front
    ends, so that a test may plant a mistake. `threads` are those of each process that compute: for tiny models one is
    faster than two that wait for each other. Who counts hits gives lookups a long `lookup_deadline`: a machine that is
    busy with other things must not make a hit a miss."""

    folder: Path
    model: Path
    dtype: str = "float64"
    chunk_tokens: int = 32
    memory: str = "256MiB"
    device_memory: str = "64MiB"
    tiers: str = ""
    module: str = "forebay"
    threads: int = 2
    lookup_deadline: str = "2s"
    processes: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def store_address(self) -> str:
        return f"unix://{self.folder}/store.sock"

    def start_store(self, *, events: str | None = None, replay: str | None = None) -> Process:
        """The store with its file tier, or with those of `tiers`."""
        arguments = ["store", "--socket", f"{self.folder}/store.sock", "--memory", self.memory]
        if self.tiers:
            (self.folder / "store.toml").write_text(self.tiers)
            arguments += ["--config", f"{self.folder}/store.toml"]
        else:
            arguments += ["--fs", f"{self.folder}/files", "--fs-quota", "1GiB"]
        if events:
            arguments += ["--events", events, "--replay", str(replay)]
        process = self._start("store", arguments)

        def answers() -> bool:
            process.must_run()
            try:
                return bool(self.store_values())
            except StoreError:
                return False

        wait_for("store", answers)
        return process

    def store_values(self) -> dict[str, float]:
        """The store's figures."""
        with StoreClient(self.store_address, maps=False) as client:
            return client.stats().values

    def start_worker(self, name: str, *, store: bool = True, extra: tuple[str, ...] = ()) -> Process:
        """A worker on a socket of its own."""
        arguments = [
            "worker", str(self.model), "--listen", f"unix://{self.folder}/{name}.sock", "--dtype", self.dtype,
            "--chunk-tokens", str(self.chunk_tokens), "--device-memory", self.device_memory,
            # Who counts hits wants all of what is stored to be loaded, however long that takes.
            "--prefixes", "load", "--lookup-deadline", self.lookup_deadline,
        ]  # fmt: skip
        if store:
            arguments += ["--store", self.store_address]
        return self._start(name, [*arguments, *extra])

    def socket(self, name: str) -> str:
        """The address of a worker or store of ours."""
        return f"unix://{self.folder}/{name}.sock"

    def start_frontend(self, name: str, *workers: str, extra: tuple[str, ...] = ()) -> Process:
        """A front end for these workers; returns once it serves."""
        port = free_port()
        process = self._start(
            name,
            ["frontend", "--worker", ",".join(map(self.socket, workers)), "--model", str(self.model),
             "--port", str(port), *extra],
        )  # fmt: skip
        self.ports[name] = port
        self.wait_healthy(name, watch=[process, *(self.processes[worker] for worker in workers)])
        return process

    def start_pair(self, worker: str, frontend: str) -> None:
        """A worker and its front end."""
        self.start_worker(worker)
        self.start_frontend(frontend, worker)

    def wait_healthy(self, frontend: str, watch: list[Process]) -> dict[str, Any]:
        """Wait until the front end has a worker and, if it uses one, the worker its store."""

        def healthy() -> dict[str, Any] | None:
            for process in watch:
                process.must_run()
            try:
                answer = web.get(f"{self.url(frontend)}/health", timeout=5)
            except httpx.TransportError:
                return None
            body: dict[str, Any] = answer.json()
            return body if answer.status_code == 200 and body.get("store") in ("connected", "none") else None

        return dict(wait_for(f"{frontend} healthy", healthy, every_s=STARTING_S))

    def url(self, frontend: str) -> str:
        """Where this front end serves."""
        return f"http://127.0.0.1:{self.ports[frontend]}"

    def _start(self, name: str, arguments: list[str]) -> Process:
        module = "forebay" if name == "store" else self.module
        process = Process(name, arguments, self.folder / f"{name}.log", module, threads=self.threads).start()
        self.processes[name] = process
        return process

    # --- requests --------------------------------------------------------------------------------------

    def complete(self, frontend: str, prompt: list[int], max_tokens: int, **more: Any) -> Completion:
        """One greedy completion."""
        answer = web.post(
            f"{self.url(frontend)}/v1/completions", json=self.body(prompt, max_tokens, **more), timeout=600
        )
        assert answer.status_code == 200, answer.text
        body = answer.json()
        choice, usage = body["choices"][0], body["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Completion(
            choice["text"], choice["token_ids"], usage["prompt_tokens"], cached, choice.get("logprobs") or {}
        )

    @staticmethod
    def body(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy request that also wants its token ids."""
        return {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more,
        }  # fmt: skip

    def figures(self, frontend: str) -> dict[str, float]:
        """The worker's figures, as its front end's /metrics shows them."""
        text = web.get(f"{self.url(frontend)}/metrics", timeout=10).text
        values = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        return values

    def figure(self, frontend: str, name: str, worker: str = "") -> float:
        """One of the workers' figures by its dotted name: that of one `worker`, or the sum of all."""
        wanted = "forebay_worker_" + name.replace(".", "_")
        label = f'{wanted}{{worker="{worker}"}}'
        found = self.figures(frontend)
        if worker:
            return found.get(label, 0.0)
        return sum(value for key, value in found.items() if key == wanted or key.startswith(wanted + "{"))

    def health(self, frontend: str) -> dict[str, Any]:
        """What the front end says of itself and, if it has several, its workers."""
        return dict(web.get(f"{self.url(frontend)}/health", timeout=10).json())

    def settle(self, frontend: str) -> None:
        """Wait until everything that was computed is in the store and in its tiers."""

        def quiet() -> bool:
            worker = self.figures(frontend)
            values = self.store_values()
            waiting = ("push_queue_bytes", "pushes_running")
            queued = sum(value for name, value in worker.items() if name.partition("{")[0].endswith(waiting))
            copying = sum(value for name, value in values.items() if name.endswith(".stores_running"))
            return queued == 0 and copying == 0 and values["host.reserved_bytes"] == 0

        wait_for("pushes and cascades", quiet, SETTLE_S)

    def stop(self) -> None:
        """End everything, front ends first."""
        for process in reversed(self.processes.values()):
            if process.running:
                process.end()
        store = self.processes.get("store")
        if store is not None and store.end() != 0:  # one that was killed leaves its pool to a successor: there is none
            shutil.rmtree(pool_path(Path("/dev/shm"), self.folder / "store.sock"), ignore_errors=True)
