"""A real vLLM server on this machine's CPUs, and what a client sees of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from forebay.connectors.keys import salt_of
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import MATCH_UNIT, pack_tokens, root_key
from forebay.kvstore.protocol import Explained
from forebay.testing.cluster import Cluster

START_S = 600.0
STOP_S = 30.0
HELD_S = 60.0


@dataclass(frozen=True)
class Reply:
    """One answered completion. `logprobs[i]` are those of the likeliest tokens at position i, by token."""

    token_ids: list[int]
    logprobs: list[dict[str, float]]
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Engine:
    """One server. `store` is an address, or None for vLLM alone; `arguments` come last, so they win."""

    executable: Path
    model: Path
    log: Path
    store: str | None
    chunk_tokens: int = 32
    arguments: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    kv_space: int = 1
    block_size: int = 32
    policy: str = "recompute"
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    client: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=300))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """As a user would type it."""
        given = [
            str(self.executable), "serve", str(self.model), "--served-model-name", "tiny", "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8",
            "--enforce-eager", "--block-size", str(self.block_size), "--enable-prompt-tokens-details",
        ]  # fmt: skip
        if self.store is not None:
            transfer = {
                "kv_connector": "ForebayConnector",
                "kv_connector_module_path": "forebay.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": self.policy,
                "kv_connector_extra_config": {
                    "store": self.store, "chunk_tokens": self.chunk_tokens, "cache_dir": str(self.log.parent / "cache"),
                    **self.settings,
                },
            }  # fmt: skip
            given += ["--kv-transfer-config", json.dumps(transfer)]
        return [*given, *self.arguments]

    def start(self) -> Engine:
        """Start it; returns at once."""
        self.port = quiet_port()
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(self.kv_space), "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONUNBUFFERED": "1", **self.environment,
        }  # fmt: skip
        environment.pop("PYTHONPATH", None)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command(), stdout=out, stderr=out, env=environment, start_new_session=True
            )
        return self

    def ready(self, *, known: bool = True) -> Engine:
        """Wait until it serves, and, if it has one, its store knows it (`known`)."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process is not None and self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                if self.client.get(f"{self.url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        else:
            raise AssertionError(f"vLLM didn't start:\n{self.log.read_text()[-4000:]}")
        if self.store is not None and known:
            wait("the connection to the store", lambda: "chunks of this model are shared" in self.log.read_text())
            wait("the scheduler's connection", lambda: "connected to the store" in self.log.read_text())
        return self

    def complete(self, prompt: Sequence[int], tokens: int = 4, **more: Any) -> Reply:
        """One greedy completion of token ids."""
        body = {
            "model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": 5, "return_token_ids": True, **more,
        }  # fmt: skip
        answer = self.client.post(f"{self.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return Reply(choice["token_ids"], choice["logprobs"]["top_logprobs"], usage["prompt_tokens"], cached)

    def leave(self, prompt: Sequence[int], tokens: int, after_s: float | None) -> None:
        """Ask, and go away after so long, wherever the request is then; None: when the answer has begun."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True, "stream": True}
        timeout = httpx.Timeout(300, read=after_s if after_s is not None else 300)
        with (
            contextlib.suppress(httpx.TimeoutException),
            self.client.stream("POST", f"{self.url}/v1/completions", json=body, timeout=timeout) as answer,
        ):
            assert answer.status_code == 200
            assert next(answer.iter_lines()).startswith("data:")

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache, not the store."""
        wait("an idle engine", lambda: self.client.post(f"{self.url}/reset_prefix_cache").status_code == 200)

    def metrics(self) -> dict[str, float]:
        """All figures of /metrics, by name with labels."""
        values = {}
        for line in self.client.get(f"{self.url}/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        return values

    def counts(self) -> dict[str, float]:
        """The connector's own figures, by name; counts and gauges."""
        found: dict[str, float] = {}
        for name, value in self.metrics().items():
            if name.startswith(("vllm:forebay_total{", "vllm:forebay_now{")):
                label = next(part for part in name.split(",") if 'name="' in part and "model_name" not in part)
                found[label.split('"')[1]] = value
        return found

    def stop(self) -> None:
        """End it and all of its processes."""
        self.client.close()
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def running(*engines: Engine, known: bool = True) -> Iterator[None]:
    """Start engines, end them whatever happens. `known`: see `Engine.ready`."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.ready(known=known)
        yield
    finally:
        for engine in engines:
            engine.stop()


def quiet_port() -> int:
    """A free port below those that systems give to whoever asks for any: nobody takes it by chance until it is used."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait(what: str, ready: Any, seconds: float = 60.0) -> Any:
    """The first true answer, asked every 50 ms."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if answer := ready():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


def namespaces(client: StoreClient) -> set[bytes]:
    """Ids of those that the store knows."""
    return {bytes.fromhex(row["id"]) for row in client.stats().namespaces}


def held(
    cluster: Cluster, prompts: Sequence[Sequence[int]], cache_salt: str | None = None, *, but: Set[bytes] = frozenset()
) -> None:
    """Wait until the store's memory has all that can be found of these prompts, in a namespace that is none of `but`:
    what has been computed isn't there before it has been copied, hashed and committed."""
    salt = salt_of(b"", "", cache_salt)
    with StoreClient(cluster.store_address) as client:

        def missing(prompt: Sequence[int]) -> list[Explained]:
            """Empty if it is there."""
            limit = (len(prompt) - 1) // MATCH_UNIT * MATCH_UNIT
            tokens, known = pack_tokens(prompt[:limit]), namespaces(client) - but
            told = [client.explain(namespace, root_key(namespace, salt), tokens) for namespace in known]
            return [] if any(one.hit >= limit for one in told) else told or [Explained(0, 0, [])]

        for place, prompt in enumerate(prompts):
            until = time.monotonic() + HELD_S
            while told := missing(prompt):
                assert time.monotonic() < until, f"prompt {place} of {len(prompt)} tokens isn't held: {told}"
                time.sleep(0.05)


def settle(cluster: Cluster, *, tiers: bool = True) -> dict[str, float]:
    """Wait until nothing is pinned, reserved or under way in the store; its figures then."""

    def quiet() -> dict[str, float] | None:
        values = cluster.store_values()
        busy = [values["host.reserved_bytes"], values["store.leases"]]
        busy += [value for name, value in values.items() if tiers and name.endswith(".stores_running")]
        return values if not any(busy) else None

    return dict(wait("a quiet store", quiet))
