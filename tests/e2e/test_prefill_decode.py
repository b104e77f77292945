"""Two hosts as an orchestrator uses them: one prefills, the other fetches its KV and decodes.

Neither is told where anything is but by what orchestrators send, and by the stores' configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forebay.testing.cluster import Cluster, free_port, wait_for
from forebay.tiers.p2p.transfer_params import prefill_request
from tests.checkpoints import tiny_gemma3
from tests.e2e.prompts import sharing_prompts
from tests.e2e.reference import greedy_reference
from tests.e2e.test_identity import CHUNK, OUTPUT, VOCAB, WINDOW

COUNT = 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    folder = tmp_path_factory.mktemp("hosts")
    tiny_gemma3(folder / "model")
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
        host.start_worker("worker")
        host.start_frontend("front", "worker", extra=("--kv-address", f"127.0.0.1:{ports[number]}"))
    for host in made:
        wait_for("its peer", lambda host=host: host.store_values().get("tier.p2p.peers_up") == 1)
    yield prefill, decode
    for host in made:
        host.stop()


def ask(host: Cluster, prompt: list[int], max_tokens: int, params: dict[str, Any]) -> dict[str, Any]:
    body = host.body(prompt, max_tokens, kv_transfer_params=params)
    answer = httpx.post(f"{host.url('front')}/v1/completions", json=body, timeout=120)
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
