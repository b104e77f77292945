"""`forebay serve --ray` on a Ray cluster of this machine: placed, started again, scaled, and gone without a trace."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.testing import web
from forebay.testing.cluster import wait_for
from forebay.testing.ports import free_port
from tests.checkpoints import tiny_qwen3

PROMPT = [3 + (number * number) % 400 for number in range(96)]
# Loopback, but not the address that Ray takes for "whatever this machine is called elsewhere".
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.2", "include_dashboard": False}
KEY = {"authorization": "Bearer client-key"}


@dataclass
class Served:
    """A Ray cluster, and the command that serves on it."""

    cluster: Any
    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    runtime: Path
    nodes: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def up(self) -> list[str]:
        """Names of the hosts that the router has as up."""
        assert self.process.poll() is None, self.log()[-3000:]
        try:
            told = web.get(f"{self.url}/router/workers", timeout=10).json()
        except httpx.TransportError:
            return []
        return [one["name"] for one in told["workers"] if one["up"]]

    def complete(self) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        answer = web.post(f"{self.url}/v1/completions", json=body, headers=KEY, timeout=120)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def add_node(self) -> None:
        self.nodes.append(self.cluster.add_node(**NODE))


def ours(words: Callable[[str], bool]) -> list[int]:
    """Processes whose command line is like this."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if words(line):
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    utils = pytest.importorskip("ray.cluster_utils", reason="no Ray here: `make test-ray` brings it")
    folder = tmp_path_factory.mktemp("ray")
    model = tiny_qwen3(folder / "model")
    environment = pytest.MonkeyPatch()
    runtime = Path(tempfile.mkdtemp(prefix="forebay-"))  # short: names of sockets may have 107 characters
    environment.setenv("XDG_RUNTIME_DIR", str(runtime))
    cluster = utils.Cluster(initialize_head=True, connect=False, head_node_args=NODE | {"num_cpus": 0})
    port = free_port()
    words = [
        "serve", str(model), "--ray", cluster.address, "--ray-hosts", "2", "--port", str(port), "--dtype", "float64",
        "--chunk-tokens", "32", "--memory", "64MiB", "--no-fs", "--device-memory", "32MiB", "--label", "tiny",
        "--api-keys", f"{folder}/api-keys",
    ]  # fmt: skip
    (folder / "api-keys").write_text("client-key somebody\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "forebay", *words], stdout=log, stderr=log)
    made = Served(cluster, folder, port, process, runtime)
    made.add_node()
    yield made
    if process.poll() is None:
        process.kill()
        process.wait()
    cluster.shutdown()
    environment.undo()
    shutil.rmtree(runtime, ignore_errors=True)


def test_a_node_serves_behind_the_router(served: Served) -> None:
    wait_for("the first host", lambda: served.up() == ["h0"], 180)
    wait_for("the word", lambda: "serving on" in served.log(), 60)
    first, again = served.complete(), served.complete()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]


def test_a_serve_that_is_killed_is_started_again_by_its_actor(served: Served) -> None:
    before = served.complete()["choices"][0]["text"]
    (pid,) = ours(lambda line: " -m forebay serve " in line and " --ray " not in line and str(served.folder) in line)
    os.kill(pid, signal.SIGKILL)
    wait_for("its end to be noticed", lambda: served.up() == [], 60)
    wait_for("another one", lambda: served.up() == ["h0"], 180)
    assert served.complete()["choices"][0]["text"] == before


def test_an_actor_that_is_killed_is_started_again_by_ray_and_its_processes_with_it(served: Served) -> None:
    (actor,) = ours(lambda line: line.startswith("ray::Host"))
    children = ours(lambda line: str(served.folder) in line and " -m forebay " in line and " --ray " not in line)
    os.kill(actor, signal.SIGKILL)
    wait_for("its processes to end with it", lambda: not (set(children) & set(_hosts(served))), 120)
    wait_for("Ray", lambda: [pid for pid in ours(lambda line: line.startswith("ray::Host")) if pid != actor], 180)
    wait_for("the host", lambda: served.up() == ["h0"], 180)
    assert served.complete()["usage"]["completion_tokens"] == 4


def _hosts(served: Served) -> list[int]:
    """What runs of the hosts: not the command itself, nor its router."""
    return ours(
        lambda line: str(served.folder) in line and " -m forebay " in line and " --ray " not in line
        and " router " not in line
    )  # fmt: skip


def test_a_node_that_comes_fills_the_vacant_place_and_one_that_goes_leaves_the_other_serving(served: Served) -> None:
    served.add_node()
    wait_for("the second host", lambda: served.up() == ["h0", "h1"], 180)
    served.cluster.remove_node(served.nodes.pop(0), allow_graceful=False)
    wait_for("it to be noticed", lambda: served.up() == ["h1"], 180)
    assert served.complete()["usage"]["completion_tokens"] == 4
    served.add_node()
    wait_for("another node in its place", lambda: served.up() == ["h0", "h1"], 180)


def test_a_stop_ends_everything_everywhere(served: Served) -> None:
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(120) == 0, served.log()[-3000:]
    wait_for("all hosts to be gone", lambda: not _hosts(served), 60)
    assert list(served.runtime.glob("forebay-hosts-*")) and not list(served.runtime.glob("forebay-hosts-*/*"))
    assert "Traceback" not in served.log()
