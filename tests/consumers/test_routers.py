"""vllm-router and sglang-router, as they are published, before two of our front ends with one store."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forebay.testing.cluster import Cluster, Process, wait_for
from forebay.testing.ports import free_port
from tests.checkpoints import CHAT_TEMPLATE, tiny_qwen3
from tests.events.consumers.environment import needs_consumers, program

pytestmark = [needs_consumers, pytest.mark.timeout(600)]

ROUTERS = ["vllm-router cache_aware", "vllm-router kv_aware", "sglang-router cache_aware"]
CREDITED = re.compile(r"credited_prefix_tokens=(\d+)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PATIENCE_S = 60
FRONTENDS = {"f0": "w0", "f1": "w1"}


class Router:
    """One router's process before the cluster's front ends."""

    def __init__(self, kind: str, cluster: Cluster, streams: dict[str, tuple[str, str]]) -> None:
        name, self.policy = kind.split()
        self.name, self.log = name, cluster.folder / f"{name}-{self.policy}.log"
        self.url = f"http://127.0.0.1:{free_port()}"
        arguments = [program(name), *(["launch"] if name == "sglang-router" else [])]
        arguments += [
            "--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], "--policy", self.policy,
            "--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1", "--log-level", "debug",
            "--worker-startup-check-interval", "1", "--health-check-interval-secs", "1",
            "--health-failure-threshold", "1", "--health-success-threshold", "1",
            # A cache-aware policy tries the dead host again until a health check has failed: for longer than a second.
            "--retry-initial-backoff-ms", "10", "--retry-max-retries", "15",
            "--worker-urls", *(cluster.url(frontend) for frontend in FRONTENDS),
        ]  # fmt: skip
        if self.policy == "kv_aware":
            arguments += ["--kv-event-model", "tiny"]
            for frontend, worker in FRONTENDS.items():
                events, replay = streams[worker]
                arguments += ["--kv-event-source", f"{cluster.url(frontend)}={events}"]
                arguments += ["--kv-event-replay-source", f"{cluster.url(frontend)}={replay}"]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(arguments, stdout=out, stderr=out)
        wait_for(f"{kind} and its workers", self._serves)

    def _serves(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return self.post("/v1/completions", body("are you there", 1)).status_code == 200
        except httpx.TransportError:
            return False

    def post(self, path: str, question: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=question, timeout=120)

    def complete(self, text: str, tokens: int = 8) -> dict[str, Any]:
        answer = self.post("/v1/completions", body(text, tokens))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def credited(self) -> list[int]:
        """Tokens of the prefix that it thought the chosen worker has, for each decision so far."""
        return [int(tokens) for tokens in CREDITED.findall(COLOURS.sub("", self.log.read_text()))]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def body(text: str, tokens: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("routers")
    tiny_qwen3(folder / "model", chat_template=CHAT_TEMPLATE)
    made = Cluster(folder, folder / "model")
    store = tuple(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    made.start_store(events=store[0], replay=store[1])
    for frontend, worker in FRONTENDS.items():
        made.start_worker(worker)
        made.start_frontend(frontend, worker, extra=("--label", "tiny"))
    (folder / "endpoints").write_text("\n".join(store))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def streams(cluster: Cluster) -> Iterator[dict[str, tuple[str, str]]]:
    """What the store holds, told once a worker in the form that vllm-router takes: (events, replay) of each."""
    events, replay = (cluster.folder / "endpoints").read_text().split()
    log = cluster.folder / "relay.log"
    relay = Process(
        "relay",
        ["events", "relay", "--events", events, "--replay", replay, "--publish", "tcp://127.0.0.1:0",
         "--publish-replay", "tcp://127.0.0.1:0", "--consumer", "vllm-router", "--label", "tiny",
         "--workers", "{ " + ", ".join(f"{worker} = {{}}" for worker in FRONTENDS.values()) + " }"],
        log,
    ).start()  # fmt: skip

    def told() -> dict[str, tuple[str, str]]:
        relay.must_run()
        lines = [line.partition(": ") for line in log.read_text().splitlines()]
        found = {name: tuple(places.split(", replay ")) for name, colon, places in lines if colon}
        return found if len(found) == len(FRONTENDS) else {}  # type: ignore[return-value]

    yield dict(wait_for("the relay", told))
    relay.end()


@pytest.fixture(scope="module", params=ROUTERS)
def router(
    request: pytest.FixtureRequest, cluster: Cluster, streams: dict[str, tuple[str, str]]
) -> Iterator[Router]:
    running = Router(request.param, cluster, streams)
    yield running
    running.stop()


def direct(cluster: Cluster, text: str, tokens: int = 8) -> dict[str, Any]:
    """What a front end says itself."""
    answer = httpx.post(f"{cluster.url('f0')}/v1/completions", json=body(text, tokens), timeout=120)
    return dict(answer.json())


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def test_answers_come_through_as_the_worker_gives_them(router: Router, cluster: Cluster) -> None:
    text = f"the history of the river {router.name} {router.policy}"
    expected = direct(cluster, text)
    answer = router.complete(text)
    assert said(answer) == said(expected)
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 8


def test_streams_come_through_event_by_event_to_their_end(router: Router, cluster: Cluster) -> None:
    text = f"a stream {router.name} {router.policy}"
    with httpx.stream(
        "POST", f"{router.url}/v1/completions", json=body(text, 12) | {"stream": True}, timeout=120
    ) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and len(lines) > 3
    assert "".join(said(json.loads(line)) for line in lines[:-1]) == said(direct(cluster, text, 12))


def test_chats_come_through(router: Router, cluster: Cluster) -> None:
    chat = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0,
    }  # fmt: skip
    answer = router.post("/v1/chat/completions", chat)
    expected = httpx.post(f"{cluster.url('f1')}/v1/chat/completions", json=chat, timeout=120).json()
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]


def test_a_prompt_that_comes_again_is_cached_wherever_it_goes(router: Router, cluster: Cluster) -> None:
    text = f"{router.name} {router.policy} " + "all rivers run into the sea " * 12
    first = router.complete(text)
    cluster.settle("f0")
    cluster.settle("f1")
    again = router.complete(text)
    assert said(again) == said(first)
    cached = [(one["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) for one in (first, again)]
    assert cached[0] <= 32, "but for the first blocks, which all of this router's prompts share"
    assert cached[1] >= again["usage"]["prompt_tokens"] // 32 * 32 - 32


@pytest.mark.parametrize("router", ["vllm-router kv_aware"], indirect=True)
def test_a_router_that_hears_our_events_credits_what_the_store_has(router: Router, cluster: Cluster) -> None:
    text = "what the store has " * 30
    length = router.complete(text)["usage"]["prompt_tokens"]
    cluster.settle("f0")
    cluster.settle("f1")

    def known() -> bool:
        router.complete(text)
        # Memory counts 0.8 there; the last block of a prompt is never credited.
        return router.credited()[-1] == int(0.8 * 16 * ((length - 1) // 16))

    wait_for("credit for all that is stored", known, PATIENCE_S)


def test_many_at_once_are_all_answered_by_both_workers(router: Router, cluster: Cluster) -> None:
    texts = [f"{number} of many {router.name} {router.policy} " * 4 for number in range(12)]
    before = {frontend: answered(cluster, frontend) for frontend in FRONTENDS}
    answers: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda text=text: answers.update({text: said(router.complete(text, 24))}))  # type: ignore[misc]
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers == {text: said(direct(cluster, text, 24)) for text in texts}
    assert all(answered(cluster, frontend) > before[frontend] for frontend in FRONTENDS)


def answered(cluster: Cluster, frontend: str) -> float:
    """Completions that this front end has answered."""
    return sum(value for name, value in cluster.figures(frontend).items() if name.startswith("forebay_requests_total"))


def test_a_host_that_dies_costs_nothing_but_a_retry_and_comes_back(router: Router, cluster: Cluster) -> None:
    text = f"before and after {router.name} {router.policy} " * 4
    before = said(router.complete(text))
    # With its front end: one whose worker alone has died would wait for it.
    for part in ("f0", "w0"):
        cluster.processes[part].end(signal.SIGKILL)
    try:
        for _ in range(8):
            assert said(router.complete(text)) == before
    finally:
        for part in ("w0", "f0"):
            cluster.processes[part].start()
        cluster.wait_healthy("f0", [cluster.processes["w0"], cluster.processes["f0"]])
    seen = answered(cluster, "f0")

    def serves_again() -> bool:
        many = [
            threading.Thread(target=router.complete, args=(f"{number} after {router.name} {router.policy}", 16))
            for number in range(8)
        ]
        for one in many:
            one.start()
        for one in many:
            one.join(60)
        return answered(cluster, "f0") > seen

    wait_for("requests at the worker that is back", serves_again, PATIENCE_S)


def test_what_routers_ask_of_a_worker_is_answered(cluster: Cluster) -> None:
    paths = ("/health", "/health_generate", "/v1/models", "/model_info", "/get_model_info", "/server_info",
             "/get_server_info", "/load")  # fmt: skip
    told = {path: httpx.get(f"{cluster.url('f0')}{path}", timeout=10) for path in paths}
    assert {path: answer.status_code for path, answer in told.items()} == dict.fromkeys(paths, 200)
    assert told["/v1/models"].json()["data"][0]["id"] == "tiny"
    assert httpx.post(f"{cluster.url('f0')}/tokenize", json={"prompt": "hello"}, timeout=10).json()["tokens"]
