"""Two hosts as an orchestrator uses them: one prefills, the other fetches its KV and decodes.

Neither is told where anything is but by what orchestrators send, and by the stores' configuration. Then the decode
side's front end is its own orchestrator: it has long prompts computed by the other host.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.testing import web
from forebay.testing.cluster import Cluster, Process, wait_for
from forebay.testing.ports import free_port
from forebay.testing.standstill import pause, resume
from forebay.tiers.p2p.transfer_params import prefill_request
from tests.e2e.failover import ONE_THREAD
from tests.e2e.prompts import sharing_prompts
from tests.e2e.reference import greedy_reference
from tests.e2e.test_identity import CHUNK, OUTPUT, VOCAB, WINDOW
from tests.e2e.windowed import tiny_windowed

COUNT = 4
SPLIT_AT, UNIT = 64, 16


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    folder = tmp_path_factory.mktemp("hosts")
    tiny_windowed(folder / "model")
    ports = free_port(), free_port()
    made = []
    for number, name in enumerate(("prefill", "decode")):
        (folder / name).mkdir()
        host = Cluster(folder / name, folder / "model", chunk_tokens=CHUNK)
        host.tiers = (
            f'[tiers.p2p]\nkind = "p2p"\ncopy = "never"\nstore = "{host.store_address}"\n'
            f'listen = "127.0.0.1:{ports[number]}"\npeers = "other=127.0.0.1:{ports[1 - number]}"\n'
        )
        made.append(host)
    prefill, decode = made
    for number, host in enumerate(made):
        host.start_store()
        host.start_worker("worker", extra=ONE_THREAD)
        extra = ("--kv-address", f"127.0.0.1:{ports[number]}")
        if host is decode:
            other = f"http://127.0.0.1:{prefill.ports['front']}"
            extra += ("--prefill", other, "--store", host.store_address, "--split-at", str(SPLIT_AT))
        host.start_frontend("front", "worker", extra=extra)
    for host in made:
        wait_for("its peer", lambda host=host: host.store_values().get("tier.p2p.peers_up") == 1)
    yield prefill, decode
    for host in made:
        host.stop()


def ask(host: Cluster, prompt: list[int], max_tokens: int, params: dict[str, Any]) -> dict[str, Any]:
    body = host.body(prompt, max_tokens, kv_transfer_params=params)
    answer = web.post(f"{host.url('front')}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_what_one_host_prefilled_the_other_fetches_and_decodes(hosts: tuple[Cluster, Cluster]) -> None:
    prefill, decode = hosts
    prompts = sharing_prompts(VOCAB, CHUNK, WINDOW, COUNT, seed=77, longest=200)
    expected = greedy_reference(prefill.model, prompts, OUTPUT)
    fetched = 0
    for prompt, tokens in zip(prompts, expected, strict=True):
        first = ask(prefill, prompt, 1, prefill_request())
        assert first["choices"][0]["token_ids"] == list(tokens[:1])
        # It was answered when the store had it: nobody waited in between.
        answer = ask(decode, prompt, OUTPUT, first["kv_transfer_params"])
        assert answer["choices"][0]["token_ids"] == list(tokens)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(prompt) - 1) // 16 * 16, "all but the prompt's last unit was computed already"
        fetched += cached
    assert fetched > 0 and decode.store_values()["tier.p2p.promoted_bytes"] > 0
    assert decode.figures("front")['forebay_transfer_requests_total{party="prefiller"}'] == COUNT
    assert prefill.figures("front")['forebay_transfer_requests_total{party="decoder"}'] == COUNT


# --- the decode side's front end decides -----------------------------------------------------------------


class Watch:
    """How a host's figures have grown since it was made."""

    def __init__(self, host: Cluster) -> None:
        self._host, self._before = host, host.figures("front")

    def grown(self, name: str) -> int:
        return int(self._host.figures("front").get(f"forebay_{name}", 0) - self._before.get(f"forebay_{name}", 0))


def fresh(seed: int, length: int) -> list[int]:
    """A prompt of its own."""
    rng = random.Random(seed)
    return [rng.randrange(16, VOCAB) for _ in range(length)]


def right(host: Cluster, prompt: list[int], length: int = OUTPUT, front: str = "front") -> list[int]:
    """Ask for the answer, which must be transformers'."""
    (wanted,) = greedy_reference(host.model, [prompt], length)
    got = host.complete(front, prompt, length).token_ids
    assert got == wanted
    return got


def test_a_long_prompt_is_computed_on_the_other_host_and_fetched(hosts: tuple[Cluster, Cluster]) -> None:
    prefill, decode = hosts
    prompt, there, here = fresh(1, 150), Watch(prefill), Watch(decode)
    pulled = decode.store_values()["tier.p2p.promoted_bytes"]
    right(decode, prompt)
    assert here.grown("split_remote") == 1
    assert there.grown("worker_tokens_prefilled") == len(prompt)
    assert here.grown("worker_tokens_prefilled") <= UNIT
    assert decode.store_values()["tier.p2p.promoted_bytes"] > pulled


def test_the_next_turn_is_prefilled_on_what_was_decoded_here(hosts: tuple[Cluster, Cluster]) -> None:
    prefill, decode = hosts
    first, length = fresh(1, 150), 40
    turn = [*first, *right(decode, first, length), *fresh(2, 90)]
    decode.settle("front")
    there, pulled = Watch(prefill), prefill.store_values().get("tier.p2p.promoted_bytes", 0)
    right(decode, turn)
    # All that was known: prompt and answer, but for what the open unit holds and the last token, that nobody computed.
    assert there.grown("worker_tokens_prefilled") == len(turn) - (len(first) + length - 1) // UNIT * UNIT
    assert prefill.store_values().get("tier.p2p.promoted_bytes", 0) > pulled, "it came from this host's store"


def test_a_router_has_a_long_prompt_computed_by_one_host_and_decoded_by_the_other(
    hosts: tuple[Cluster, Cluster], tmp_path: Path
) -> None:
    prefill, decode = hosts
    urls = prefill.url("front"), decode.url("front")
    (tmp_path / "router.toml").write_text(
        f'[workers.p]\nurl = "{urls[0]}"\nprefill = true\n[workers.d]\nurl = "{urls[1]}"\n'
    )
    decode.ports["router"] = free_port()
    arguments = ["router", "--config", f"{tmp_path}/router.toml", "--port", str(decode.ports["router"]),
                 "--split-at", str(SPLIT_AT)]  # fmt: skip
    router = Process("router", arguments, tmp_path / "router.log").start()
    try:
        for worker in ("p", "d"):
            up = f'forebay_router_worker_up{{worker="{worker}"}}'
            wait_for("the router to see both", lambda up=up: answering(decode) and decode.figures("router")[up] == 1)
        prompt, there, here = fresh(21, 150), Watch(prefill), Watch(decode)
        right(decode, prompt, front="router")
        assert there.grown("worker_tokens_prefilled") == len(prompt)
        assert here.grown("worker_tokens_prefilled") <= UNIT and here.grown("split_remote") == 0
        right(decode, fresh(22, SPLIT_AT - 1), front="router")
        assert there.grown("worker_tokens_prefilled") == len(prompt), "a short one stays where it is decoded"
        assert decode.figures("router")['forebay_router_split_total{outcome="prefilled"}'] == 1
    finally:
        router.end()


def answering(decode: Cluster) -> bool:
    try:
        return web.get(f"{decode.url('router')}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_a_prefill_host_whose_worker_stops_in_the_middle_is_done_without(hosts: tuple[Cluster, Cluster]) -> None:
    prefill, decode = hosts
    here, pid = Watch(decode), prefill.processes["worker"].pid
    pause(pid)
    try:
        prompt = fresh(3, 150)
        right(decode, prompt)
        assert here.grown("split_failed") == 1 and here.grown("worker_tokens_prefilled") == len(prompt)
        right(decode, fresh(4, 150))
        assert here.grown("split_alone") == 1, "what is known to be gone isn't asked"
    finally:
        resume(pid)
    prefill.wait_healthy("front", watch=[prefill.processes["worker"]])
    again = Watch(decode)

    def asked_again() -> bool:
        right(decode, fresh(1000 + again.grown("split_alone"), 100))
        return again.grown("split_remote") > 0

    wait_for("the other host to be asked again", asked_again)


def test_a_dead_prefill_host_is_done_without(hosts: tuple[Cluster, Cluster]) -> None:
    """Last: it ends that host."""
    prefill, decode = hosts
    for name in ("front", "worker", "store"):
        prefill.processes[name].end(signal.SIGKILL)
    here, prompt = Watch(decode), fresh(6, 150)
    right(decode, prompt)
    assert here.grown("worker_tokens_prefilled") == len(prompt)
    assert here.grown("split_remote") == 0
