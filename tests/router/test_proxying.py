"""The proxy before scripted servers: who is asked next when one fails, and what clients are told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from forebay.errors import ConfigError
from forebay.router.app import make_app
from forebay.router.router import Router
from forebay.router.settings import Backend, RouterConfig
from forebay.router.upstream import Upstreams
from forebay.testing import web
from forebay.testing.cluster import wait_for

Answering = Callable[[dict[str, Any]], tuple[int, bytes, dict[str, str]]]


@dataclass
class Scripted:
    """A server like vLLM's, that answers completions as it is told."""

    answer: Answering
    asked: list[dict[str, Any]] = field(default_factory=list)
    tokenised: list[Any] = field(default_factory=list)
    key: str | None = None

    def __enter__(self) -> Scripted:
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def reply(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                wanted = f"Bearer {scripted.key}" if scripted.key and self.path != "/health" else None
                if wanted is not None and self.headers["authorization"] != wanted:
                    return self.reply(401, b"{}")
                models = {"data": [{"id": "m", "max_model_len": 100}]}
                found = {"/health": b"", "/v1/models": json.dumps(models).encode()}.get(self.path)
                return self.reply(404 if found is None else 200, found or b"")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path != "/v1/completions":
                    scripted.tokenised.append(body["prompt"])
                    return self.reply(200, json.dumps({"tokens": list(body["prompt"].encode())}).encode())
                scripted.asked.append(body)
                return self.reply(*scripted.answer(body))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def backend(self, name: str) -> Backend:
        return Backend(name, "127.0.0.1", self.server.server_address[1])


@contextmanager
def routed(*servers: Scripted, **settings: Any) -> Iterator[tuple[str, Router]]:
    """A router before these servers, once all are up."""
    backends = tuple(server.backend(f"w{number}") for number, server in enumerate(servers))
    router = Router(RouterConfig(backends, health_s=0.05, seed=1, **settings))
    config = uvicorn.Config(make_app(router), port=0, log_level="warning", http="httptools")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    wait_for("the router", lambda: server.started, 20)
    wait_for("its workers", lambda: all(up.up for up in router.upstreams.all), 20)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", router
    finally:
        server.should_exit = True
        thread.join(20)


def fine(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    return 200, json.dumps({"choices": [{"text": "well"}], "usage": usage}).encode(), {}


def failing(status: int, **headers: str) -> Answering:
    return lambda body: (status, json.dumps({"error": {"message": f"no: {status}"}}).encode(), headers)


def complete(url: str, **more: Any) -> httpx.Response:
    return web.post(f"{url}/v1/completions", json={"model": "m", "prompt": "abc", **more}, timeout=20)


def test_another_worker_answers_what_one_cannot() -> None:
    with Scripted(failing(500)) as bad, Scripted(fine) as good, routed(bad, good) as (url, router):
        for _ in range(12):
            assert complete(url).json()["choices"][0]["text"] == "well"
        assert len(good.asked) == 12
        assert len(bad.asked) <= 5, "after five failures in a row it is left alone"
        assert good.asked[0]["prompt"] == [97, 98, 99], "its text was tokenised once, for all"
        assert router.routing.belief.realised_tokens == 12
        assert router.routing.load.stats().in_flight == 0


def test_a_text_is_tokenised_once_whoever_is_asked_how_often() -> None:
    with Scripted(failing(503)) as bad, Scripted(fine) as good, routed(bad, good) as (url, router):
        for number in range(8):
            complete(url, prompt=f"text {number % 2}")
        assert sorted([*bad.tokenised, *good.tokenised]) == ["text 0", "text 1"]
        assert (router.prompts.memory.misses, router.prompts.memory.hits) == (2, 6)
        assert all(isinstance(body["prompt"], list) for body in good.asked), "workers are given ids"


def test_of_a_text_that_grew_only_the_end_is_tokenised_and_workers_are_given_the_whole() -> None:
    text = "".join(f"line {number} of the log\n" for number in range(2000))
    with Scripted(fine) as server, routed(server) as (url, router):
        for end in ("", "it goes on", "it goes on, and on"):
            complete(url, prompt=text + end)
            assert bytes(server.asked[-1]["prompt"]) == (text + end).encode()
        assert [len(asked) > len(text) / 2 for asked in server.tokenised] == [True, False, False, False, False]
        assert router.prompts.memory.grown == 2
        complete(url, prompt="x" + text)
        assert len(server.tokenised[-1]) == len(text) + 1, "another text"
        values = router.prompts.statistics()
        assert values["remembered_texts"] == 4 and values["texts_grown"] == 2 and values["tokenise_questions"] == 6
        assert b"forebay_router_texts_grown_total 2.0" in router.render_metrics()


def test_a_worker_that_is_placed_elsewhere_is_asked_there(tmp_path: Path) -> None:
    with Scripted(fine) as old, Scripted(fine) as new, routed(old) as (url, router):
        complete(url)
        there = f"http://127.0.0.1:{new.server.server_address[1]}"
        told = web.post(f"{url}/router/place", json={"worker": "w0", "url": there}, timeout=20)
        assert told.json() == {"worker": "w0", "url": there}
        wait_for("the new place", lambda: router.upstreams.all[0].up, 20)
        complete(url)
        assert (len(old.asked), len(new.asked)) == (1, 1)
        for wrong in ({"worker": "w9", "url": there}, {"worker": "w0", "url": "ftp://x"}, {"worker": "w0"}):
            assert web.post(f"{url}/router/place", json=wrong, timeout=20).status_code == 400


def test_what_one_caller_sent_makes_nothing_faster_for_another() -> None:
    with Scripted(fine) as server, routed(server) as (url, router):
        for key in ("a", "b", "a"):
            body = {"model": "m", "prompt": "abc"}
            web.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=20)
        assert len(server.tokenised) == 2 and router.prompts.memory.hits == 1


def test_workers_that_ask_for_a_key_are_used_with_the_routers_own_and_without_it_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("secret-of-the-router\n")
    with Scripted(fine, key="secret-of-the-router") as server:
        with routed(server, worker_key=tmp_path / "key") as (url, _):
            assert complete(url).json()["choices"][0]["text"] == "well"
        upstreams = Upstreams(RouterConfig((server.backend("w0"),)), time.monotonic, lambda number: None)
        for _ in range(3):
            asyncio.run(upstreams._look(0))
        assert not upstreams.all[0].up
        assert [record.message for record in caplog.records if "--worker-key" in record.message] == [
            "worker w0 isn't used: it is healthy, but /v1/models answers 401; give the router a key of its own with "
            "--worker-key"
        ]
    (tmp_path / "key").write_text("\n")
    for path in (tmp_path / "key", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="--worker-key"):
            Router(RouterConfig((server.backend("w0"),), worker_key=path))


def test_a_request_that_is_wrong_is_told_so_by_the_first_one_asked() -> None:
    with Scripted(failing(400)) as one, Scripted(failing(400)) as two, routed(one, two) as (url, router):
        answer = complete(url)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == "no: 400"
        assert len(one.asked) + len(two.asked) == 1
        assert router.routing.load.stats().in_flight == 0


def test_when_all_are_full_the_client_is_told_when_to_come_back() -> None:
    full = failing(429, **{"retry-after": "7"})
    with Scripted(full) as one, Scripted(full) as two, routed(one, two) as (url, _):
        answer = complete(url)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
        assert len(one.asked) == len(two.asked) == 1


def test_what_one_worker_may_have_is_capped_and_the_rest_refused_at_once() -> None:
    hold = threading.Event()

    def slow(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        hold.wait(20)
        return fine(body)

    with Scripted(slow) as one, routed(one, per_worker=2) as (url, router):
        waiting = [threading.Thread(target=complete, args=(url,)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        wait_for("two under way", lambda: router.routing.load.stats().in_flight == 2, 20)
        answer = complete(url)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        hold.set()
        for thread in waiting:
            thread.join(20)
        assert complete(url).status_code == 200
        assert b'forebay_router_rejected_total{why="full"} 1.0' in router.render_metrics()


def test_a_stream_of_another_engine_that_breaks_off_ends_with_an_error_and_a_whole_one_passes() -> None:
    event = b'data: {"id": "x", "choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'

    def broken(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        return 200, event, {"content-type": "text/event-stream"}

    def whole(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        return 200, event + b"data: [DONE]\n\n", {"content-type": "text/event-stream"}

    with Scripted(broken) as server, routed(server) as (url, router):
        lines = [line for line in complete(url, stream=True).text.splitlines() if line]
        assert '"text":"a"' in lines[0] and '"error"' in lines[-1]
        server.answer = whole
        lines = [line for line in complete(url, stream=True).text.splitlines() if line]
        assert lines[-1] == "data: [DONE]" and "error" not in lines[0]
        assert "resume_token_ids" not in server.asked[-1] and "return_token_ids" not in server.asked[-1]
        assert router.routing.load.stats().in_flight == 0


def test_a_seed_is_drawn_here_so_that_a_second_worker_says_the_same() -> None:
    with Scripted(failing(503)) as bad, Scripted(fine) as good, routed(bad, good) as (url, _):
        for _ in range(6):
            complete(url)
        asked = [*bad.asked, *good.asked]
        assert all(isinstance(body["seed"], int) for body in asked)
        assert {body["seed"] for body in bad.asked} <= {body["seed"] for body in good.asked}
