"""What places hosts, without Ray: slots, one host with real processes, and the router that is told where it is."""

from __future__ import annotations

import argparse
import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forebay.cli import serve
from forebay.cli.serve_ray import arguments_of
from forebay.config import Arguments
from forebay.errors import ConfigError, NotWritable
from forebay.placing.asking import status_of
from forebay.placing.host import Host, free_ports
from forebay.placing.routing import NOWHERE, RouterProcess
from forebay.placing.slots import Slots
from forebay.placing.spec import SERVER, HostSpec, Place, new_pair
from forebay.testing import web
from forebay.testing.cluster import wait_for
from forebay.testing.ports import free_port
from tests.checkpoints import tiny_qwen3

PROMPT = [3 + (number * number) % 400 for number in range(96)]


def test_slots_keep_their_nodes_and_vacant_ones_are_filled_in_order() -> None:
    slots = Slots(2)
    assert slots.update(["a"]).came == {0: "a"}
    assert slots.update(["a", "b", "c"]).came == {1: "b"}
    change = slots.update(["b", "c"])
    assert (change.left, change.came) == ((0,), {0: "c"}), "b goes on where it is"
    assert slots.update(["c"]).left == (1,) and slots.nodes == {0: "c"}
    slots.vacate(0)
    assert slots.update(["c"]).came == {0: "c"}
    assert slots.update([]).left == (0,) and slots.nodes == {}


def test_ports_are_different_and_of_this_host() -> None:
    assert len(set(free_ports(3))) == 3
    with pytest.raises(OSError, match="assign"):
        free_ports(1, "192.0.2.1")


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short one: names of sockets may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="forebay-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def spec(folder: Path, keys: str | None = None) -> tuple[HostSpec, bytes]:
    router = new_pair()
    arguments = (
        str(tiny_qwen3(folder / "model")), "--dtype", "float64", "--chunk-tokens", "32", "--memory", "64MiB",
        "--no-fs", "--device-memory", "32MiB", "--label", "tiny",
    )  # fmt: skip
    environment = {"OMP_NUM_THREADS": "2"}
    made = HostSpec(arguments, environment, keys, b"s" * 32, new_pair(), router.public)
    (folder / "keys").mkdir(mode=0o700)
    secret = folder / "keys" / "secret.key"
    secret.touch(mode=0o600)
    secret.write_bytes(router.public + b"\n" + router.secret + b"\n")
    (folder / "keys" / f"{SERVER}.pub").write_bytes(made.pair.public + b"\n")
    return made, router.public


def test_a_host_serves_is_started_again_and_its_router_follows(tmp_path: Path) -> None:
    told, _ = spec(tmp_path, "client-key someone\nrouter-key router\n")
    (tmp_path / "key").write_text("router-key")
    host = Host(told, "127.0.0.1", "h1")
    router = RouterProcess(tmp_path, 2, free_port(), ["--worker-key", str(tmp_path / "key")])
    url = f"http://127.0.0.1:{router.port}"
    places: dict[int, Place] = {}

    def placed() -> bool:
        places[1] = host.look()
        router.look(places)
        try:
            return places[1].ready and status_of(f"{url}/health")[0] == 200
        except OSError:
            return False

    def complete() -> httpx.Response:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        headers = {"authorization": "Bearer client-key"}
        return web.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)

    try:
        wait_for("the host, by its router", placed, 120)
        first, text = places[1], complete().json()["choices"][0]["text"]
        assert complete().json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        named = web.get(f"{url}/router/workers", timeout=10).json()
        assert [(one["name"], one["up"]) for one in named["workers"]] == [("h0", False), ("h1", True)]
        wait_for("its store's stream", lambda: any(
            one["owner"] == "s1" and one["trust"] == "exact"
            for one in web.get(f"{url}/router/workers", timeout=10).json()["streams"]
        ), 60)  # fmt: skip
        assert web.post(f"{url}/v1/completions", json={"prompt": [5]}, timeout=60).status_code == 401
        os.kill(first.pid, signal.SIGKILL)
        wait_for("its end to be noticed", lambda: not placed(), 30)
        wait_for("another one", lambda: placed() and places[1].pid != first.pid, 120)
        assert places[1].url != first.url and places[1].started == 2
        assert complete().json()["choices"][0]["text"] == text, "the router was told where"
    finally:
        host.stop()
        router.stop()
    assert host.look().running is False, "who was stopped stays so"
    assert not host._folder.exists(), "nothing is left"


def test_keys_are_nobody_elses_to_read_and_a_process_that_ends_at_once_rests(tmp_path: Path) -> None:
    told, _ = spec(tmp_path)
    told = HostSpec(("no-such-model",), told.environment, "a b\n", told.secret, told.pair, told.router_key)
    host = Host(told, "127.0.0.1", "h1")
    try:
        for file in ("keys/secret.key", "state/server-secret", "api-keys"):
            assert stat.S_IMODE((host._folder / file).stat().st_mode) == 0o600
        assert host.look().running
        wait_for("its end", lambda: not host.look().running, 60)
        assert "no-such-model" in host.log_tail()
        rests = host.look()
        assert not rests.running and "no-such-model" in rests.trouble, "it rests, and says why"
        wait_for("another try", lambda: host.look().started == 2, 30)
        (host._folder / "left").write_text("by one that was killed")
        again = Host(told, "127.0.0.1", "h1")
        assert again._folder == host._folder and not (again._folder / "left").exists()
        again.stop()
    finally:
        host.stop()
    assert not host._folder.exists()


def test_a_folder_that_others_can_look_into_is_refused(tmp_path: Path, runtime: Path) -> None:
    told, _ = spec(tmp_path)
    (runtime / f"forebay-hosts-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(NotWritable, match="XDG_RUNTIME_DIR"):
        Host(told, "127.0.0.1", "h1")


def test_a_vacant_slot_is_nowhere(tmp_path: Path) -> None:
    assert NOWHERE.url.startswith("http://127.0.0.1:") and not NOWHERE.running
    with pytest.raises(OSError, match="refused"):
        status_of(f"{NOWHERE.url}/health")


def test_hosts_are_told_all_but_what_is_the_commands_own() -> None:
    parser = Arguments(argument_default=argparse.SUPPRESS)
    serve.configure(parser)
    words = ["m", "--memory", "1GiB", "--no-fs", "--label", "x"]
    flags = vars(parser.parse_args([*words, "--ray", "auto", "--port", "1", "--api-keys", "k", "--ray-hosts", "3"]))
    passed = arguments_of(flags, serve.SETTINGS)
    assert vars(parser.parse_args(list(passed))) == vars(parser.parse_args([str(Path("m").absolute()), *words[1:]]))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"host": "10.0.0.1", "api_keys": "keys"}, "loopback"), ({"events": "tcp://127.0.0.1:1"}, "--events"),
        ({"trace": "t"}, "--trace"), ({"api_keys": "nowhere"}, "--api-keys"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_ray_is_refused_by_name(tmp_path: Path, more: dict[str, str], says: str) -> None:
    flags = {"model": str(tmp_path), "ray": "auto"} | more
    with pytest.raises(ConfigError, match=says):
        serve.run(flags)
