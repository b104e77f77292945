"""Who computes a long prompt: a worker that is for that, where little of it is cached; who fails is done without."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from forebay.errors import ConfigError
from forebay.router.router import Router
from forebay.router.settings import Backend, RouterConfig, backends_of
from forebay.testing import web
from forebay.testing.cluster import wait_for
from tests.router.test_proxying import Answering, Scripted, complete, failing, fine, routed

LONG = list(range(60))
SPLIT_AT = 32
THERE = {"do_remote_prefill": True, "remote_host": "10.0.0.2", "remote_port": 7450}


class Prefills(Scripted):
    """A server that computes prompts for others."""

    def backend(self, name: str) -> Backend:
        return replace(super().backend(name), prefill=True)


def prefilled(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
    """It has the KV."""
    return 200, json.dumps({"choices": [{"text": "w"}], "kv_transfer_params": THERE}).encode(), {}


def either(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
    """Whole or streamed, as it is asked for."""
    if not body.get("stream"):
        return fine(body)
    event = {"choices": [{"index": 0, "text": "well", "finish_reason": "stop"}]}
    return 200, b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n", {}


def splits(router: Router, outcome: str) -> int:
    return int(router.metrics.split.labels(outcome)._value.get())


def test_a_long_prompt_is_computed_by_one_and_the_request_goes_with_where_that_is_to_the_other() -> None:
    with Prefills(prefilled) as one, Scripted(either) as other, routed(one, other, split_at=SPLIT_AT) as (url, router):
        more = {"prompt": LONG, "max_tokens": 9, "cache_salt": "s", "temperature": 0.5}
        assert complete(url, **more).json()["choices"][0]["text"] == "well"
        (first,), (second,) = one.asked, other.asked
        assert (first["prompt"], first["max_tokens"], first["cache_salt"]) == (LONG, 1, "s")
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert second["kv_transfer_params"] == THERE and (second["max_tokens"], second["temperature"]) == (9, 0.5)
        assert splits(router, "prefilled") == 1 and router.routing.load.stats().in_flight == 0
        assert "[DONE]" in complete(url, **more | {"stream": True, "prompt": LONG[::-1]}).text
        assert len(one.asked) == 2 and other.asked[1]["kv_transfer_params"] == THERE, "streams too"


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": LONG[: SPLIT_AT - 1]}, {"max_tokens": 1}, {"prompt": [LONG, LONG]}, {"echo": True},
        {"prompt_logprobs": 1}, {"kv_transfer_params": THERE},
    ],
    ids=str,
)  # fmt: skip
def test_short_prompts_and_those_that_somebody_has_decided_on_stay_whole(more: dict[str, Any]) -> None:
    with Prefills(prefilled) as one, Scripted(fine) as other, routed(one, other, split_at=SPLIT_AT) as (url, _):
        assert complete(url, **{"prompt": LONG, **more}).status_code == 200
        assert not one.asked and len(other.asked) == 1


def test_what_is_believed_to_be_cached_where_it_is_decoded_is_not_computed_elsewhere() -> None:
    with Prefills(prefilled) as one, Scripted(fine) as other, routed(one, other, split_at=SPLIT_AT) as (url, router):
        for end in (7, 8):
            assert complete(url, prompt=[*LONG, end]).status_code == 200
        assert len(one.asked) == 1 and len(other.asked) == 2 and splits(router, "cached") == 1


def nothing_told(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
    return 200, b'{"choices": []}', {}


def no_answer(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
    return 200, b"\xff[", {}


@pytest.mark.parametrize("answer", [failing(500), failing(429), nothing_told, no_answer])
def test_a_prefill_worker_that_fails_is_done_without(answer: Answering) -> None:
    with Prefills(answer) as one, Scripted(fine) as other, routed(one, other, split_at=SPLIT_AT) as (url, router):
        assert complete(url, prompt=LONG).json()["choices"][0]["text"] == "well"
        assert "kv_transfer_params" not in other.asked[0] and splits(router, "failed") == 1


def test_where_nobody_decodes_a_prefill_worker_does() -> None:
    with Prefills(fine) as one, Scripted(failing(500)) as other, routed(one, other, split_at=500) as (url, router):
        assert complete(url).json()["choices"][0]["text"] == "well"
        assert len(other.asked) == 1 and len(one.asked) == 1
        router.upstreams.all[1].draining = True
        assert complete(url).status_code == 200 and len(other.asked) == 1


def test_prompts_that_are_computed_for_others_are_counted_and_capped() -> None:
    go_on = threading.Event()

    def slow(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        go_on.wait(20)
        return prefilled(body)

    with Prefills(slow) as one, Scripted(fine) as other, routed(one, other, split_at=SPLIT_AT, per_worker=2) as (
        url, router,
    ):  # fmt: skip
        texts: list[int] = []

        def ask(first: int) -> None:
            texts.append(complete(url, prompt=[first, *LONG]).status_code)

        asking = [threading.Thread(target=ask, args=(first,)) for first in (1, 2)]
        for thread in asking:
            thread.start()
        wait_for("both prompts", lambda: router.upstreams.all[0].prefilling == 2, 20)
        assert b'forebay_router_worker_prefilling{worker="w0"} 2.0' in router.render_metrics()
        assert complete(url, prompt=[3, *LONG]).status_code == 200, "a third one isn't kept waiting"
        assert splits(router, "alone") == 1 and len(one.asked) == 2
        go_on.set()
        for thread in asking:
            thread.join(20)
        assert texts == [200, 200] and router.upstreams.all[0].prefilling == 0


def test_a_client_that_leaves_and_a_worker_that_goes_down_end_what_is_computed() -> None:
    gone = threading.Event()

    def hangs(body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        gone.wait(20)
        return prefilled(body)

    with Prefills(hangs) as one, Scripted(fine) as other, routed(one, other, split_at=SPLIT_AT) as (url, router):
        with pytest.raises(httpx.ReadTimeout):
            web.post(f"{url}/v1/completions", json={"model": "m", "prompt": LONG}, timeout=0.5)
        wait_for("it to be let go", lambda: router.upstreams.all[0].prefilling == 0, 20)
        assert not other.asked
        began = time.monotonic()
        asking = threading.Thread(target=complete, args=(url,), kwargs={"prompt": LONG})
        asking.start()
        wait_for("its prompt", lambda: router.upstreams.all[0].prefilling == 1, 20)

        def ended() -> bool:
            router.upstreams._on_down(0)  # as each look at a worker that says nothing: the call may not be open yet
            return not asking.is_alive()

        wait_for("the call to end", ended, 15)
        assert len(other.asked) == 1 and time.monotonic() - began < 20, "it didn't wait for the answer"
        gone.set()


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="true or false"):
        backends_of({"w": {"url": "http://127.0.0.1:1", "prefill": 1}})
    (made,) = backends_of({"w": {"url": "http://127.0.0.1:1", "prefill": True}})
    assert made.prefill
    with pytest.raises(ConfigError, match="somebody must decode"):
        Router(RouterConfig((made,)))
