"""The three sides: vLLM alone, vLLM with LMCache's server, vLLM with Forebay's store. Real processes, one vLLM each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from forebay.kvstore.client import StoreClient

START_S = 900.0
STOP_S = 30.0
HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Setup:
    """What is the same for all sides. `memory_gib` is the size of the cache behind vLLM, `kv_gib` of the one in it."""

    vllm: Path
    lmcache: Path
    model: Path
    folder: Path
    dtype: str = "bfloat16"
    max_len: int = 8192
    kv_gib: int = 1
    memory_gib: int = 2
    blocks: int = 0
    eager: bool = False
    files: bool = True


@dataclass
class Side:
    """A vLLM server and what is behind it. `hybrid` is vLLM's hybrid KV cache manager, which LMCache refuses."""

    name: str
    setup: Setup
    hybrid: bool = True
    port: int = 0
    peer: subprocess.Popen[bytes] | None = None
    server: subprocess.Popen[bytes] | None = None
    client: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=600))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        return self.setup.folder / self.name

    # --- what is behind ----------------------------------------------------------------------------------

    def start_peer(self) -> None:
        """The store, LMCache's server, or nothing."""

    def transfer(self) -> dict[str, object] | None:
        """vLLM's `--kv-transfer-config`."""
        return None

    def settle(self) -> None:
        """Wait until all that was computed is in what is behind."""
        time.sleep(1.0)

    # --- vLLM ----------------------------------------------------------------------------------------------

    def command(self) -> list[str]:
        """As a user would type it."""
        setup = self.setup
        given = [
            str(setup.vllm), "serve", str(setup.model), "--served-model-name", "m", "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", setup.dtype, "--max-model-len", str(setup.max_len),
            "--max-num-seqs", "16", "--enable-prompt-tokens-details",
        ]  # fmt: skip
        transfer = self.transfer()
        if transfer is not None:
            given += ["--kv-transfer-config", json.dumps(transfer)]
        if not self.hybrid:
            given.append("--disable-hybrid-kv-cache-manager")
        if setup.blocks:
            given += ["--num-gpu-blocks-override", str(setup.blocks)]
        return [*given, *(["--enforce-eager"] if setup.eager else [])]

    def start(self) -> None:
        """Start vLLM and wait until it serves."""
        self.folder.mkdir(exist_ok=True)
        self.port = quiet_port()
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(self.setup.kv_gib), "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2", "VLLM_SERVER_DEV_MODE": "1",
        }  # fmt: skip
        environment.pop("PYTHONPATH", None)
        self.server = self._run(self.command(), "vllm.log", environment)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.server.poll() is not None:
                raise RuntimeError(f"{self.name}: vLLM ended\n{(self.folder / 'vllm.log').read_text()[-3000:]}")
            with contextlib.suppress(httpx.TransportError):
                if self.client.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"{self.name}: vLLM didn't start")

    def stop(self) -> None:
        """End vLLM, not what is behind it."""
        stop_session(self.server)
        self.server = None

    def stop_peer(self) -> None:
        """End what is behind."""
        stop_session(self.peer)
        self.peer = None

    def _run(self, command: Sequence[str], log: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    def cpu_s(self) -> float:
        """CPU seconds that all processes of this side have used."""
        return sum(session_cpu_s(process.pid) for process in (self.server, self.peer) if process is not None)

    def cached_tokens(self) -> float:
        """Prompt tokens that vLLM has found so far, on the device and behind it, by its own counters."""
        text = self.client.get(f"{self.url}/metrics").text
        families = text_string_to_metric_families(text)
        return sum(one.value for family in families for one in family.samples if one.name in HITS)

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache."""
        while self.client.post(f"{self.url}/reset_prefix_cache").status_code != 200:
            time.sleep(0.05)


class Alone(Side):
    """vLLM with its own prefix cache."""


class Forebay(Side):
    """vLLM with our connector and store."""

    @property
    def address(self) -> str:
        """The store's."""
        return f"unix://{self.folder}/store.sock"

    def start_peer(self) -> None:
        """The store, with files behind it."""
        self.folder.mkdir(exist_ok=True)
        command = [
            sys.executable, "-m", "forebay", "store", "--socket", f"{self.folder}/store.sock",
            "--memory", f"{self.setup.memory_gib}GiB",
        ]  # fmt: skip
        if self.setup.files:
            command += ["--fs", f"{self.folder}/files", "--fs-quota", "8GiB"]
        self.peer = self._run(command, "store.log", dict(os.environ))
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(Exception), StoreClient(self.address):
                return
            time.sleep(0.1)
        raise RuntimeError(f"the store didn't start\n{(self.folder / 'store.log').read_text()[-3000:]}")

    def transfer(self) -> dict[str, object]:
        """See `Side`."""
        return {
            "kv_connector": "ForebayConnector", "kv_connector_module_path": "forebay.connectors.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": self.address},
        }  # fmt: skip

    def start(self) -> None:
        """See `Side`; then until the store knows the model."""
        super().start()
        log = self.folder / "vllm.log"
        while log.read_text().count("chunks of this model are shared") < log.read_text().count("non-default args"):
            time.sleep(0.1)

    def settle(self) -> None:
        """See `Side`."""
        with StoreClient(self.address) as store:
            while True:
                values = store.stats().values
                busy = sum(value for name, value in values.items() if name.endswith(".stores_running"))
                if not busy and not values["host.reserved_bytes"]:
                    return
                time.sleep(0.05)


class LMCache(Side):
    """vLLM with LMCacheMPConnector and LMCache's server."""

    rpc: int = 0

    def start_peer(self) -> None:
        """LMCache's server, with files behind it."""
        self.folder.mkdir(exist_ok=True)
        self.rpc, http = quiet_port(), quiet_port()
        command = [
            str(self.setup.lmcache), "server", "--host", "127.0.0.1", "--port", str(self.rpc),
            "--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", str(self.setup.memory_gib),
            "--no-l1-use-lazy", "--chunk-size", "256", "--eviction-policy", "LRU", "--max-workers", "2",
            "--disable-observability", "--supported-transfer-mode", "auto", "--shm-name", f"bench-{os.getpid()}",
        ]  # fmt: skip
        if self.setup.files:
            (self.folder / "files").mkdir(exist_ok=True)
            command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": f"{self.folder}/files"})]
        self.peer = self._run(command, "lmcache.log", dict(os.environ))
        for port in (self.rpc, http):
            self._answers(port)

    def _answers(self, port: int) -> None:
        """Wait until the server listens there."""
        assert self.peer is not None
        until = time.monotonic() + START_S
        while True:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.connect(("127.0.0.1", port))
                return
            if self.peer.poll() is not None or time.monotonic() > until:
                log = (self.folder / "lmcache.log").read_text()[-3000:]
                raise RuntimeError(f"LMCache's server ended, or doesn't listen on port {port}\n{log}")
            time.sleep(0.2)

    def transfer(self) -> dict[str, object]:
        """See `Side`."""
        return {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.rpc},
        }  # fmt: skip


def quiet_port() -> int:
    """A free port below those that systems give to whoever asks for any: nobody takes it by chance until it is used."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def standing(side: Side) -> Iterator[Side]:
    """A side with all of its processes; they end whatever happens."""
    try:
        side.start_peer()
        side.start()
        yield side
    finally:
        side.stop()
        side.stop_peer()


def stop_session(process: subprocess.Popen[Any] | None) -> None:
    """End a process that has a session of its own, and all that it has started there."""
    if process is None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def session_cpu_s(session: int) -> float:
    """CPU seconds of all processes of a session, those included that it has waited for."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session:
                total += sum(int(field) for field in fields[11:15])
    return total / TICKS
