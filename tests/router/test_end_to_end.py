"""Two real workers, their front ends, one store, and a router: requests go where their prefix is, and the death of a
worker in mid-stream costs its clients nothing but time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forebay.testing import web
from forebay.testing.cluster import Cluster, Process, wait_for
from forebay.testing.ports import free_port
from tests.checkpoints import tiny_qwen3
from tests.e2e.paced import Pace

OUTPUT = 48
LONG = 400
TEMPLATE = (
    "{% if tools %}Call tools so: <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("router")
    tiny_qwen3(folder / "model", chat_template=TEMPLATE)
    made = Cluster(folder, folder / "model", threads=1, module=Pace(folder / "pace").module)
    events = {name: (free_port(), free_port()) for name in ("store", "w0", "w1")}
    urls = {name: tuple(f"tcp://127.0.0.1:{port}" for port in ports) for name, ports in events.items()}
    made.start_store(events=urls["store"][0], replay=urls["store"][1])
    for name in ("w0", "w1"):
        made.start_worker(name, extra=("--events", urls[name][0], "--replay", urls[name][1]))
    for name in ("w0", "w1"):
        made.start_frontend(f"f{name[1]}", name, extra=("--label", "tiny"))
    lines = [f'[stores.s]\nevents = "{urls["store"][0]}"\nreplay = "{urls["store"][1]}"\n']
    for name in ("w0", "w1"):
        lines.append(
            f'[workers.{name}]\nurl = "{made.url("f" + name[1])}"\nevents = "{urls[name][0]}"\n'
            f'replay = "{urls[name][1]}"\nstore = "s"\nprefill_s = 0.001\n'
        )
    (folder / "router.toml").write_text("\n".join(lines))
    made.ports["router"] = free_port()
    arguments = ["router", "--config", f"{folder}/router.toml", "--port", str(made.ports["router"])]
    made.processes["router"] = Process("router", arguments, folder / "router.log").start()
    wait_for("both workers and all streams", lambda: _ready(made))
    yield made
    made.stop()


def _ready(cluster: Cluster) -> bool:
    cluster.processes["router"].must_run()
    try:
        told = web.get(f"{cluster.url('router')}/router/workers", timeout=5).json()
    except httpx.TransportError:
        return False
    exact = {stream["owner"] for stream in told["streams"] if stream["trust"] == "exact"}
    return all(worker["up"] for worker in told["workers"]) and exact >= {"w0", "w1"}


def prompt_of(number: int, length: int = LONG) -> list[int]:
    return [3 + (number * 131 + place * place) % 500 for place in range(length)]


def explain(cluster: Cluster, prompt: list[int]) -> dict[str, Any]:
    return explained(cluster, {"prompt": prompt})


def explained(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    answer = web.post(f"{cluster.url('router')}/router/explain", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


class Reader(threading.Thread):
    """Reads one streamed completion; `at(n)` waits for its n-th token."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url, body | {"stream": True, "stream_options": {"include_usage": True}}
        self.events: list[dict[str, Any]] = []
        self.status, self.done = 0, False
        self.start()

    def run(self) -> None:
        with web.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=120) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events for choice in event.get("choices", ()) for token in choice["token_ids"]]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))

    def at(self, tokens: int) -> None:
        wait_for(f"{tokens} tokens", lambda: len(self.ids) >= tokens or not self.is_alive())


def test_a_prompt_goes_back_to_where_its_prefix_is(cluster: Cluster) -> None:
    prompt = prompt_of(1)
    first = cluster.complete("router", prompt, 4)
    assert first.cached_tokens == 0
    chosen = explain(cluster, prompt)["worker"]
    wait_for("its events", lambda: max(row["device_tokens"] for row in explain(cluster, prompt)["candidates"]) >= 384)
    wait_for("the store's", lambda: min(row["near_tokens"] for row in explain(cluster, prompt)["candidates"]) >= 384)
    told = explain(cluster, prompt)
    rows = {row["worker"]: row for row in told["candidates"]}
    other = ({"w0", "w1"} - {chosen}).pop()
    assert rows[chosen]["device_tokens"] >= 384 and rows[other]["device_tokens"] == 0
    assert rows[other]["near_tokens"] >= 384, "the store has it for both"
    assert told["cached_tokens"] >= 384
    again = cluster.complete("router", prompt, 4)
    assert again.cached_tokens >= 384 and again.token_ids == first.token_ids


def test_text_and_chats_are_tokenised_once_and_answered_as_by_the_worker(cluster: Cluster) -> None:
    text = "all rivers " * 30
    for _ in range(2):
        ours = web.post(
            f"{cluster.url('router')}/v1/completions",
            json={"model": "tiny", "prompt": text, "max_tokens": 5, "temperature": 0, "ignore_eos": True}, timeout=60,
        ).json()  # fmt: skip
        direct = web.post(
            f"{cluster.url('f0')}/v1/completions",
            json={"model": "tiny", "prompt": text, "max_tokens": 5, "temperature": 0, "ignore_eos": True}, timeout=60,
        ).json()  # fmt: skip
        assert ours["choices"][0]["text"] == direct["choices"][0]["text"]
        assert ours["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]


def chat(cluster: Cluster, body: dict[str, Any]) -> dict[str, Any]:
    url = f"{cluster.url('router')}/v1/chat/completions"
    answer = web.post(url, json=body | {"max_tokens": 3, "temperature": 0, "ignore_eos": True}, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_chat_with_tools_is_found_where_its_prefix_is(cluster: Cluster) -> None:
    properties = {f"field{number}": {"type": "string", "description": "words " * 4} for number in range(4)}
    parameters = {"type": "object", "properties": properties}
    function = {"name": "weather", "description": "of a place", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    body = {"messages": [{"role": "user", "content": "how is it there?"}], "tools": tools}
    told = chat(cluster, body)["usage"]
    assert explained(cluster, body)["prompt_tokens"] == told["prompt_tokens"], "tokenised as the worker does"
    expected = told["prompt_tokens"] // 32 * 32
    assert expected >= 128

    def devices() -> list[int]:
        return sorted(row["device_tokens"] for row in explained(cluster, body)["candidates"])

    wait_for("its events", lambda: devices()[1] >= expected)
    assert explained(cluster, body)["cached_tokens"] >= expected
    other = body | {"messages": [{"role": "user", "content": "and there?"}]}
    assert explained(cluster, other)["cached_tokens"] >= 96, "the tools come first, so they are everybody's prefix"
    for unlike in ({"tools": None}, {"tool_choice": "none"}):
        assert explained(cluster, body | unlike)["cached_tokens"] == 0
    again = chat(cluster, body)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= expected


def test_of_a_conversation_that_grew_the_end_is_tokenised_and_its_keys_are_the_workers(cluster: Cluster) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}]
    for number in range(40):
        messages += [
            {"role": "user", "content": f"{number} " + "how deep is the river there? " * 6},
            {"role": "assistant", "content": f"{number} " + "as deep as it is wide; and wider below. " * 6},
        ]  # fmt: skip
    messages.append({"role": "user", "content": "and the lake?"})
    before = cluster.figures("router")
    explained(cluster, {"messages": messages})
    whole = cluster.figures("router")
    messages += [{"role": "assistant", "content": "deeper"}, {"role": "user", "content": "the forebay?"}]
    told = explained(cluster, {"messages": messages})
    grown = cluster.figures("router")
    figure = "forebay_router_tokenise_bytes_total"
    assert grown["forebay_router_texts_grown_total"] == before["forebay_router_texts_grown_total"] + 1
    assert grown[figure] - whole[figure] < (whole[figure] - before[figure]) / 2
    direct = web.post(f"{cluster.url('f0')}/tokenize", json={"messages": messages}, timeout=30).json()
    assert told["prompt_tokens"] == direct["count"]
    assert 0 < grown["forebay_router_remembered_tokens"] <= grown["forebay_router_remembered_tokens_max"]


def test_a_decision_can_be_looked_at_term_by_term_by_people(cluster: Cluster) -> None:
    words = ["route", "--explain", "--url", cluster.url("router")]
    asked = subprocess.run(
        [sys.executable, "-m", "forebay", *words, "all rivers"], capture_output=True, text=True, timeout=60
    )
    assert asked.returncode == 0, asked.stderr
    first, *rows = asked.stdout.splitlines()
    assert "tokens go to w" in first and "decided by ttft" in first
    head = next(row for row in rows if row.startswith("worker"))
    assert {"device", "near", "far", "wait", "load", "cut", "compute", "ttft"} <= set(head.split())
    assert sum(row.startswith(("w0", "w1")) for row in rows) == 2
    told = json.loads(subprocess.run(
        [sys.executable, "-m", "forebay", *words, "--json", "all rivers"], capture_output=True, text=True, timeout=60
    ).stdout)  # fmt: skip
    assert told["worker"] in {candidate["worker"] for candidate in told["candidates"]} == {"w0", "w1"}


def test_what_was_believed_and_what_was_are_told_side_by_side(cluster: Cluster) -> None:
    prompt = prompt_of(40)
    for _ in range(2):
        cluster.complete("router", prompt, 2)
    figures = cluster.figures("router")
    for name in ("answers", "predicted_tokens", "realised_tokens", "error_tokens"):
        assert figures[f"forebay_router_belief_{name}_total"] >= 0
    assert figures["forebay_router_belief_realised_tokens_total"] > 0
    assert any(name.startswith("forebay_router_decisions_total{") and 'reason="prefix"' in name for name in figures)
    for what in ("lag_s", "gaps", "orphans", "duplicates", "unknown_medium", "lost_batches", "stored"):
        assert f'forebay_router_stream{{owner="s",what="{what}"}}' in figures, what
    assert figures['forebay_router_stream_trust{owner="s",state="exact"}'] == 1
    text = web.get(f"{cluster.url('router')}/metrics", timeout=10).text
    assert "forebay_router_rejected" in text and "forebay_router_time_to_first_token_seconds_bucket" in text


def test_refusals_are_the_workers_own_and_unknown_models_are_named(cluster: Cluster) -> None:
    url = f"{cluster.url('router')}/v1/completions"
    wrong = web.post(url, json={"prompt": [5, 6], "max_tokens": 0}, timeout=30)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "max_tokens"
    assert web.post(url, content=b"{", timeout=30).status_code == 400
    nobody = web.post(url, json={"model": "nobody", "prompt": [5, 6]}, timeout=30)
    assert nobody.status_code == 404 and "tiny" in nobody.json()["error"]["message"]
    models = web.get(f"{cluster.url('router')}/v1/models", timeout=30).json()["data"]
    assert [model["id"] for model in models] == ["tiny"]


def test_a_draining_worker_gets_nothing_new(cluster: Cluster) -> None:
    prompt = prompt_of(2)
    cluster.complete("router", prompt, 2)
    chosen = explain(cluster, prompt)["worker"]
    url = f"{cluster.url('router')}/router/drain"
    assert web.post(url, json={"worker": chosen}, timeout=30).json()["draining"] is True
    try:
        assert explain(cluster, prompt)["worker"] != chosen
    finally:
        web.post(url, json={"worker": chosen, "drain": False}, timeout=30)
    assert web.post(url, json={"worker": "nobody"}, timeout=30).status_code == 400


def test_a_worker_that_dies_in_mid_stream_costs_its_clients_nothing_but_time(cluster: Cluster) -> None:
    prompts = [prompt_of(number, 200) for number in (11, 12, 13, 14)]
    bodies = [cluster.body(prompt, OUTPUT) for prompt in prompts]
    bodies[3] |= {"temperature": 1.0, "seed": 5}  # sampled, too
    expected = [cluster_answer(cluster, body) for body in bodies]
    pace = Pace(cluster.folder / "pace")
    pace.wait()
    try:
        readers = [Reader(cluster.url("router"), body) for body in bodies]
        for reader in readers:
            reader.at(3)
        victim = _busiest(cluster)
        cluster.processes[victim].end(signal.SIGKILL)
    finally:
        pace.free()
    for reader, (ids, text) in zip(readers, expected, strict=True):
        reader.join(120)
        assert reader.status == 200 and reader.done, reader.events[-2:]
        assert (reader.ids, reader.text) == (ids, text)
        assert len({event["id"] for event in reader.events}) == 1, "one answer, whoever gave it"
        assert reader.events[-1]["usage"]["completion_tokens"] == OUTPUT
    figures = cluster.figures("router")
    assert figures["forebay_router_resumed_total"] >= 1
    assert figures["forebay_router_in_flight"] == 0
    # What the dead one has left is still its store's; its own device is believed in no more once it is back.
    left = ({"w0", "w1"} - {victim}).pop()
    assert explain(cluster, prompt_of(15))["worker"] == left
    cluster.processes[victim].start()
    wait_for("the worker to be back", lambda: _ready(cluster))


def _busiest(cluster: Cluster) -> str:
    """Whoever is in the middle of most streams."""
    told = web.get(f"{cluster.url('router')}/router/workers", timeout=5).json()["workers"]
    most = max(told, key=lambda worker: worker["in_flight"])
    assert most["in_flight"] > 0, "all streams have ended before anybody could be killed"
    return str(most["name"])


def cluster_answer(cluster: Cluster, body: dict[str, Any]) -> tuple[list[int], str]:
    """What a worker says that nobody disturbs."""
    choice = web.post(f"{cluster.url('f0')}/v1/completions", json=body, timeout=120).json()["choices"][0]
    return choice["token_ids"], choice["text"]


def test_with_nobody_left_clients_are_told_to_come_back(cluster: Cluster) -> None:
    for name in ("w0", "w1"):
        cluster.processes[name].end(signal.SIGKILL)
    url = f"{cluster.url('router')}"
    wait_for("the router to notice", lambda: web.get(f"{url}/health", timeout=5).status_code == 503)
    answer = web.post(f"{url}/v1/completions", json={"prompt": [5, 6, 7]}, timeout=30)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    for name in ("w0", "w1"):
        cluster.processes[name].start()
    wait_for("both workers to be back", lambda: _ready(cluster))
    begun = time.monotonic()
    assert len(cluster.complete("router", prompt_of(20), 2).token_ids) == 2
    assert time.monotonic() - begun < 60
