"""Prefill by a worker of two ranks on one host, decode by a worker of one on another: each uses what the other has
computed, as if both were of one size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.testing import web
from forebay.testing.cluster import Cluster, wait_for
from forebay.testing.ports import free_port
from forebay.tiers.p2p.transfer_params import prefill_request
from tests.checkpoints import tiny_llama
from tests.e2e.reference import greedy_reference
from tests.ranks.conftest import CHUNK

FIRST = [(53 * i) % 470 + 20 for i in range(150)]
LENGTH, UNIT = 40, 16
RANKS = {"prefill": "2", "decode": "1"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    folder = tmp_path_factory.mktemp("hosts")
    model = tiny_llama(folder / "model")
    ports = free_port(), free_port()
    made = [host(folder / name, model, ports[number], ports[1 - number]) for number, name in enumerate(RANKS)]
    for cluster, ranks in zip(made, RANKS.values(), strict=True):
        cluster.start_worker("worker", extra=("--threads", "1", "--tensor-parallel-size", ranks))
    for cluster, port in zip(made, ports, strict=True):
        cluster.start_frontend("front", "worker", extra=("--kv-address", f"127.0.0.1:{port}"))
        wait_for("its peer", lambda cluster=cluster: cluster.store_values().get("tier.p2p.peers_up") == 1)
    yield made[0], made[1]
    for cluster in made:
        cluster.stop()


def host(folder: Path, model: Path, port: int, peer: int) -> Cluster:
    """A store that fetches from its peer."""
    folder.mkdir()
    made = Cluster(folder, model, chunk_tokens=CHUNK)
    made.tiers = (
        f'[tiers.p2p]\nkind = "p2p"\ncopy = "never"\nstore = "{made.store_address}"\n'
        f'listen = "127.0.0.1:{port}"\npeers = "other=127.0.0.1:{peer}"\n'
    )
    made.start_store()
    return made


def ask(cluster: Cluster, prompt: list[int], max_tokens: int, params: dict[str, Any]) -> dict[str, Any]:
    body = cluster.body(prompt, max_tokens, kv_transfer_params=params)
    answer = web.post(f"{cluster.url('front')}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_each_side_uses_what_the_other_has_computed(hosts: tuple[Cluster, Cluster]) -> None:
    prefill, decode = hosts
    (wanted,) = greedy_reference(prefill.model, [FIRST], LENGTH)
    first = ask(prefill, FIRST, 1, prefill_request())
    assert first["choices"][0]["token_ids"] == wanted[:1]
    answer = ask(decode, FIRST, LENGTH, first["kv_transfer_params"])
    assert answer["choices"][0]["token_ids"] == wanted
    assert cached(answer) == (len(FIRST) - 1) // UNIT * UNIT, "all but the prompt's last unit"
    assert decode.store_values()["tier.p2p.promoted_bytes"] > 0

    # The next turn: what one rank has decoded is taken apart for two.
    decode.settle("front")
    turn = [*FIRST, *wanted, *range(30, 60)]
    (next_token,) = greedy_reference(prefill.model, [turn], 1)
    second = ask(prefill, turn, 1, prefill_request())
    assert second["choices"][0]["token_ids"] == next_token
    assert cached(second) == (len(FIRST) + LENGTH - 1) // UNIT * UNIT, "the answer's KV came from the other host"
    assert prefill.store_values()["tier.p2p.promoted_bytes"] > 0
