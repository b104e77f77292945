"""`forebay serve` from start to stop: what it starts, what it starts again, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.kvstore.extents import pool_path
from forebay.testing import web
from forebay.testing.ports import free_port
from forebay.testing.standstill import pause
from tests.checkpoints import tiny_qwen3
from tests.cli.commands import told

START_S = 90.0


@dataclass
class Serving:
    """One `forebay serve` in a folder of its own."""

    folder: Path
    model: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    sockets: tempfile.TemporaryDirectory[str] = field(default_factory=lambda: tempfile.TemporaryDirectory(prefix="fb-"))
    """Their paths must be short; those of pytest's folders aren't."""

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def runtime(self) -> Path:
        return Path(self.sockets.name) / "forebay" / f"serve-{self.port}"

    @property
    def pool(self) -> Path:
        return pool_path(Path("/dev/shm"), self.runtime / "store.sock")

    def start(self, *more: str) -> None:
        environment = os.environ | {
            "XDG_RUNTIME_DIR": self.sockets.name, "XDG_CACHE_HOME": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "forebay", "serve", str(self.model), "--port", str(self.port), "--memory", "64MiB",
            "--device-memory", "16MiB", "--chunk-tokens", "32", "--dtype", "float32",
            "--shutdown-timeout", "1s", *more,
        ]  # fmt: skip
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait(self, what: str, true: Callable[[], Any], timeout_s: float = START_S) -> Any:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            answer = true()
            if answer:
                return answer
            time.sleep(0.05)
        raise AssertionError(f"{what}: not within {timeout_s:.0f} s\n{self.log[-3000:]}")

    def ready(self) -> None:
        def said() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log
            return "serving on http" in self.log and "Ctrl-C" in self.log

        self.wait("ready", said)

    def health(self) -> dict[str, Any]:
        try:
            answer = web.get(f"http://127.0.0.1:{self.port}/health", timeout=5)
        except httpx.TransportError:
            return {}
        return answer.json() if answer.status_code == 200 else {}

    def pids(self) -> dict[str, int]:
        """Process ids of the parts, by command; of several workers that of one."""
        return {command: pids[-1] for command, pids in self.all_pids().items()}

    def all_pids(self) -> dict[str, list[int]]:
        """Process ids of all parts, by command."""
        assert self.process is not None
        found: dict[str, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, IndexError, ValueError):
                    continue
                if parent == self.process.pid and b"forebay" in words:
                    found.setdefault(words[words.index(b"forebay") + 1].decode(), []).append(int(entry.name))
        return found

    def complete(self, prompt: list[int], tokens: int = 8) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = web.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"it goes on:\n{self.log[-3000:]}") from None

    def nothing_left(self) -> None:
        """No process, no socket, no shared memory."""
        self.wait("the parts end", lambda: not self.pids(), 15)
        self.wait("the pool goes", lambda: not self.pool.exists(), 15)
        assert not self.runtime.exists()


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path_factory.mktemp("serving"), model, free_port())
    serving.start()
    serving.ready()
    yield serving
    if serving.process is not None and serving.process.poll() is None:
        serving.stop(signal.SIGTERM)


PROMPT = [(7 * number) % 500 + 4 for number in range(150)]


def test_it_ends_its_start_with_a_line_to_paste(serving: Serving) -> None:
    line = next(line for line in serving.log.splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(["/bin/sh", "-c", f"{line} -s"], capture_output=True, text=True, check=False)
    if done.returncode == 127:
        pytest.skip("no curl here")
    assert json.loads(done.stdout)["choices"]


def test_its_parts_are_processes_of_their_own_and_serve_a_hit(serving: Serving) -> None:
    assert set(serving.pids()) == {"store", "worker", "frontend"}
    first, second = serving.complete(PROMPT), serving.complete(PROMPT)
    assert first["choices"] == second["choices"] and (cached(first), cached(second)) == (0, 144)
    assert serving.health() == {
        "status": "ok", "model": "tiny", "worker": serving.pids()["worker"], "store": "connected",
    }  # fmt: skip


def test_a_stream_outlives_a_killed_worker(serving: Serving) -> None:
    length = 600
    wanted = serving.complete(PROMPT[:40], length)["choices"][0]["token_ids"]
    old = serving.pids()["worker"]
    seen: list[int] = []
    at_kill = 0
    body = {
        "prompt": PROMPT[:40], "max_tokens": length, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "stream": True,
    }  # fmt: skip
    with web.stream("POST", f"http://127.0.0.1:{serving.port}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seen.extend(json.loads(line[6:])["choices"][0]["token_ids"])
            if len(seen) >= 5 and not at_kill:  # by who reads: a look now and then may come when all is said
                os.kill(old, signal.SIGKILL)
                at_kill = len(seen)
    assert 5 <= at_kill < length and seen == wanted
    assert serving.pids()["worker"] != old


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex(str(path)) == 0


def test_a_killed_store_comes_back_with_what_it_had(serving: Serving) -> None:
    def figures() -> dict[str, float]:
        told_of = told("stat", "--socket", serving.runtime / "store.sock", "--json")
        values: dict[str, float] = json.loads(told_of)["values"]
        return values

    serving.complete(PROMPT)
    serving.wait("health", lambda: serving.health().get("store") == "connected")
    # The last chunk is pushed behind the answer: what isn't committed yet may be lost with the store.
    serving.wait("pushes", lambda: (now := figures())["store.committed"] == now["store.reserved"] > 0)
    old = serving.pids()["store"]
    os.kill(old, signal.SIGKILL)
    serving.wait("another store", lambda: serving.pids().get("store", old) != old)
    serving.wait("the new store's socket", lambda: _accepts(serving.runtime / "store.sock"))
    serving.wait("the worker, beside ourselves", lambda: figures()["store.connections"] >= 2)
    assert figures()["host.readopted"] > 0
    assert cached(serving.complete(PROMPT)) == 144


def test_a_hung_worker_is_replaced(serving: Serving) -> None:
    old = serving.pids()["worker"]
    pause(old)
    serving.wait("another worker", lambda: serving.pids().get("worker", old) != old, 40)
    serving.wait("health", lambda: serving.health().get("store") == "connected")
    assert cached(serving.complete(PROMPT)) == 144


def test_a_killed_front_end_comes_back_on_the_same_port(serving: Serving) -> None:
    old = serving.pids()["frontend"]
    os.kill(old, signal.SIGKILL)
    # Nobody is refused meanwhile: the port is the supervisor's, and a new front end takes who waits.
    assert serving.complete(PROMPT)["choices"]
    assert serving.pids()["frontend"] != old


def test_another_one_on_the_same_port_is_refused(serving: Serving) -> None:
    environment = {"XDG_RUNTIME_DIR": serving.sockets.name, "XDG_CACHE_HOME": str(serving.folder / "cache")}
    refused = told("serve", serving.model, "--port", serving.port, code=4, environment=environment)
    assert f"port {serving.port}" in refused and "--port" in refused


def test_sigterm_stops_everything_and_a_restart_hits_the_files(serving: Serving) -> None:
    before = serving.complete(PROMPT)
    body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with web.stream("POST", f"http://127.0.0.1:{serving.port}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert serving.stop() == 0
        rest = [line for line in lines if line]
    assert "the server stops" in rest[-1], "an open stream is told"
    assert "Traceback" not in serving.log
    serving.nothing_left()
    serving.start()
    serving.ready()
    after = serving.complete(PROMPT)
    assert after["choices"] == before["choices"] and cached(after) == 144
    assert serving.stop(signal.SIGINT) == 0
    serving.nothing_left()


def test_its_parts_do_not_outlive_a_killed_supervisor(serving: Serving) -> None:
    serving.start("--no-fs")
    serving.ready()
    parts = serving.pids()
    assert serving.process is not None and len(parts) == 3
    serving.process.kill()
    serving.process.wait(10)
    serving.wait("the parts end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in parts.values()), 20)
    assert not serving.pool.exists()


def test_several_workers_stand_in_for_each_other_and_are_replaced_one_by_one(tmp_path: Path, model: Path) -> None:
    serving = Serving(tmp_path, model, free_port())
    serving.start("--workers", "2", "--no-fs")
    serving.ready()

    def all_able() -> bool:
        workers = serving.health().get("workers", {}).values()
        return len(workers) == 2 and all(worker["state"] == "ok" for worker in workers)

    try:
        serving.wait("both workers", all_able)
        old = set(serving.all_pids()["worker"])
        for name in ("worker-1", "worker-2"):
            assert "has ended" in told("drain", serving.runtime / f"{name}.sock", "--stop")
            assert serving.complete(PROMPT)["choices"], "the other one is there"
            serving.wait("its successor", all_able)
        assert len(old) == 2 and not old & set(serving.all_pids()["worker"])
    finally:
        assert serving.stop() == 0
    serving.nothing_left()


def test_a_worker_that_does_not_stay_up_is_left_alone_while_another_serves(tmp_path: Path, model: Path) -> None:
    serving = Serving(tmp_path, model, free_port())
    serving.start("--workers", "2", "--no-fs")
    serving.ready()

    def killed(name: str, until: str) -> Callable[[], bool]:
        def again() -> bool:
            for pid in serving.all_pids().get("worker", []):
                if f"{name}.sock".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
            return until in serving.log

        return again

    try:
        serving.wait("rest for the second", killed("worker-2", "the other workers go on"), 60)
        assert len(serving.all_pids()["worker"]) == 1
        assert serving.complete(PROMPT)["choices"], "the first one serves"
        assert serving.process is not None and serving.process.poll() is None
        serving.wait("the end", killed("worker-1", "the worker-1 has ended 5 times in a row"), 60)
        assert serving.ended() == 1, "nobody is left who serves"
    finally:
        assert serving.process is not None
        if serving.process.poll() is None:
            serving.stop()
    serving.nothing_left()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_model_ends_it_with_the_reason(tmp_path: Path, model: Path, workers: int) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    serving = Serving(tmp_path, broken, free_port())
    serving.start("--workers", str(workers))
    assert serving.ended() == 5
    assert f"{broken}" in serving.log and "Traceback" not in serving.log
    serving.nothing_left()


def test_a_pool_that_does_not_fit_ends_it_before_anything_is_loaded(tmp_path: Path, model: Path) -> None:
    serving = Serving(tmp_path, model, free_port())
    serving.start("--memory", "100TiB")
    assert serving.ended() == 4
    assert "--memory" in serving.log and "Traceback" not in serving.log
    serving.nothing_left()


def test_a_signal_during_the_start_stops_it(tmp_path: Path, model: Path) -> None:
    serving = Serving(tmp_path, model, free_port())
    serving.start()
    serving.wait("a store", lambda: "store" in serving.pids())
    assert serving.stop() == 0
    serving.nothing_left()
