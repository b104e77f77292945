"""The servers that are measured: our daemon by its public command, and LMCache's by its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.errors import StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.testing.ports import free_port

START_S = 120.0


@dataclass
class Daemon:
    """A running store."""

    address: str
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """CPU seconds that the daemon has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def run(self, role: str, seed: int, size: int, seconds: float, spec: str) -> Client:
        """Start a client process in this role."""
        command = [sys.executable, "-m", "benchmarks.store_ops.client", role, self.address]
        arguments = [str(seed), str(size), str(seconds), spec]
        return Client(subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE))


@dataclass
class Client:
    """A client process that is at work."""

    process: subprocess.Popen[bytes]

    def times(self) -> Any:
        """What it measured; waits for its end."""
        out, _ = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, f"a client ended with {self.process.returncode}"
        return json.loads(out)["times"]


@contextmanager
def daemon(memory: int, *, whole: bool = False) -> Iterator[Daemon]:
    """A store on a socket of its own, all bytes of its pool granted. `whole`: with a file tier and events, too."""
    with tempfile.TemporaryDirectory(prefix="forebay-store-ops-") as folder:
        address, log = f"unix://{folder}/store.sock", Path(folder) / "log"
        arguments = ["--socket", f"{folder}/store.sock", "--memory", str(memory)]
        if whole:
            arguments += ["--fs", f"{folder}/files", "--events", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0"]
        command = [sys.executable, "-m", "forebay", "store", *arguments]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            _wait_for_pool(address, memory, process, log)
            yield Daemon(address, process)
        finally:
            process.terminate()
            process.wait(30)


def _wait_for_pool(address: str, memory: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            with StoreClient(address) as client:
                if client.stats().values["host.bytes_budget"] >= memory:
                    return
        except StoreUnavailable:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the store did not get ready: {log.read_text()}")


@dataclass
class LMCache:
    """LMCache's server, started anew for each use; its own benchmark is its client."""

    command: str
    chunk_tokens: int = 256

    def bench(self, tokens: int, shape: str, requests: int) -> dict[str, dict[str, float]]:
        """Figures of its benchmark in milliseconds, by operation (cold_lookup, warm_lookup, cold_store, ...)."""
        rpc, http = free_port(), free_port()
        with tempfile.TemporaryDirectory(prefix="lmcache-") as folder:
            log, out = Path(folder) / "log", Path(folder) / "out.json"
            server = [
                self.command, "server", "--host", "127.0.0.1", "--port", str(rpc), "--http-host", "127.0.0.1",
                "--http-port", str(http), "--l1-size-gb", "2", "--no-l1-use-lazy", "--chunk-size",
                str(self.chunk_tokens), "--eviction-policy", "LRU", "--max-workers", "2", "--disable-observability",
                "--supported-transfer-mode", "auto", "--shm-name", f"peer{rpc}",
            ]  # fmt: skip
            with log.open("wb") as sink:
                process = subprocess.Popen(server, stdout=sink, stderr=sink, cwd=folder)
            try:
                _wait_for_http(http, process, log)
                for start, end in ((0, requests), (requests, 2 * requests)):  # the first round warms its pool
                    subprocess.run(
                        [
                            self.command, "bench", "server", "--mode", "cpu", "--transfer-mode", "engine_driven",
                            "--rpc-url", f"tcp://127.0.0.1:{rpc}", "--url", f"http://127.0.0.1:{http}",
                            "--num-tokens", str(tokens), "--num-blocks", str(tokens // 16 * 2), "--block-size", "16",
                            "--kvcache-shape-spec", shape, "--start", str(start), "--end", str(end),
                            "--interval", "0", "--format", "json", "--output", str(out),
                        ],
                        check=True, timeout=400, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
                    )  # fmt: skip
                metrics = json.loads(out.read_text())["metrics"]
                assert metrics["results"]["pass_rate"] == 100.0, metrics["results"]
                return {name: values for name, values in metrics.items() if name not in ("config", "results")}
            finally:
                process.terminate()
                process.wait(60)


def _wait_for_http(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"LMCache's server did not get ready: {log.read_text()[-2000:]}")
