"""A vLLM server and a worker of ours behind one `forebay router`: each prompt goes to whoever has it, by the events of
either engine, and the one that is left answers for the other."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forebay.testing.cluster import Cluster, Process, wait_for
from forebay.testing.ports import free_port
from tests.vllm.conftest import server
from tests.vllm.servers import Engine, running

BLOCK = 32
"""Of vLLM's events; ours are of 16."""
LONG = 400


@pytest.fixture(scope="module")
def vllm(qwen: Cluster) -> Iterator[Engine]:
    """vLLM that tells of its device, on local sockets: its endpoints bind there alone."""
    folder = qwen.folder
    events = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", '
        f'"endpoint": "ipc://{folder}/v.events", "replay_endpoint": "ipc://{folder}/v.replay"}}'
    )
    one = server(qwen, "routed", "--kv-events-config", events, block_size=BLOCK)
    with running(one):
        yield one


@pytest.fixture(scope="module")
def routed(qwen: Cluster, vllm: Engine) -> Cluster:
    """The cluster with a worker w0 of ours, and the router before both."""
    folder = qwen.folder
    ours = tuple(f"ipc://{folder}/w.{name}" for name in ("events", "replay"))
    qwen.start_worker("w0", extra=("--events", ours[0], "--replay", ours[1]))
    qwen.start_frontend("f0", "w0", extra=("--label", "tiny"))
    (folder / "router.toml").write_text(
        f'[workers.ours]\nurl = "{qwen.url("f0")}"\nevents = "{ours[0]}"\nreplay = "{ours[1]}"\nprefill_s = 0.001\n'
        f'[workers.vllm]\nurl = "{vllm.url}"\nevents = "ipc://{folder}/v.events"\nreplay = "ipc://{folder}/v.replay"\n'
        f"block_tokens = {BLOCK}\noverlaps = false\nprefill_s = 0.001\n"
    )
    qwen.ports["router"] = free_port()
    arguments = ["router", "--config", f"{folder}/router.toml", "--port", str(qwen.ports["router"])]
    qwen.processes["router"] = Process("router", arguments, folder / "router.log").start()

    def ready() -> bool:
        qwen.processes["router"].must_run()
        try:
            told = httpx.get(f"{qwen.url('router')}/router/workers", timeout=5).json()
        except httpx.TransportError:
            return False
        return all(worker["up"] for worker in told["workers"])

    wait_for("both workers", ready)
    return qwen


def prompt_of(number: int) -> list[int]:
    return [3 + (number * 131 + place * place) % 500 for place in range(LONG)]


def rows(cluster: Cluster, prompt: list[int]) -> dict[str, dict[str, Any]]:
    """What the router thinks of each worker."""
    answer = httpx.post(
        f"{cluster.url('router')}/router/explain", json={"model": "tiny", "prompt": prompt}, timeout=30
    )
    assert answer.status_code == 200, answer.text
    return {row["worker"]: row for row in answer.json()["candidates"]}


def drain(cluster: Cluster, worker: str, on: bool) -> None:
    url = f"{cluster.url('router')}/router/drain"
    assert httpx.post(url, json={"worker": worker, "drain": on}, timeout=30).status_code == 200


def chosen(cluster: Cluster, prompt: list[int]) -> str:
    answer = httpx.post(
        f"{cluster.url('router')}/router/explain", json={"model": "tiny", "prompt": prompt}, timeout=30
    )
    return str(answer.json()["worker"])


@pytest.mark.parametrize(("worker", "other", "number"), [("vllm", "ours", 1), ("ours", "vllm", 2)])
def test_a_prompt_goes_back_to_the_engine_that_has_it(
    routed: Cluster, worker: str, other: str, number: int
) -> None:
    prompt = prompt_of(number)
    drain(routed, other, True)
    first = routed.complete("router", prompt, 4, model="tiny")
    drain(routed, other, False)
    wait_for("its events", lambda: rows(routed, prompt)[worker]["device_tokens"] >= LONG // BLOCK * BLOCK)
    assert rows(routed, prompt)[other]["device_tokens"] == 0
    assert chosen(routed, prompt) == worker
    again = routed.complete("router", prompt, 4, model="tiny")
    assert again.token_ids == first.token_ids
    assert first.cached_tokens == 0 and again.cached_tokens >= LONG // BLOCK * BLOCK - BLOCK


def test_what_vllm_drops_is_no_longer_credited_to_it(routed: Cluster, vllm: Engine) -> None:
    prompt = prompt_of(3)
    drain(routed, "ours", True)
    routed.complete("router", prompt, 4, model="tiny")
    wait_for("its events", lambda: rows(routed, prompt)["vllm"]["device_tokens"] > 0)
    vllm.forget_device()
    drain(routed, "ours", False)
    # Its clear comes with its next step.
    vllm.complete(prompt_of(4))
    wait_for("the clear", lambda: rows(routed, prompt)["vllm"]["device_tokens"] == 0)


def test_the_one_that_is_left_answers_for_the_other(routed: Cluster, vllm: Engine) -> None:
    prompt = prompt_of(5)
    drain(routed, "ours", True)
    before = routed.complete("router", prompt, 4, model="tiny")
    drain(routed, "ours", False)
    assert vllm.process is not None
    vllm.process.send_signal(signal.SIGTERM)
    vllm.process.wait(60)
    for _ in range(4):
        after = routed.complete("router", prompt, 4, model="tiny")
        assert len(after.token_ids) == 4 and after.prompt_tokens == before.prompt_tokens
    wait_for("the router to notice", lambda: not rows(routed, prompt)["vllm"]["up"])


def test_figures_tell_of_both_streams(routed: Cluster) -> None:
    figures = routed.figures("router")
    for worker in ("ours", "vllm"):
        assert figures[f'forebay_router_stream{{owner="{worker}",what="stored"}}'] > 0
        assert figures[f'forebay_router_stream{{owner="{worker}",what="unusable"}}'] == 0
    assert figures["forebay_router_belief_answers_total"] > 0
