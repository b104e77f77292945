"""`kv_transfer_params`: what an orchestrator may say of a prompt's KV, and what it is answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.testing import web
from forebay.tiers.p2p.options import Address
from forebay.tiers.p2p.transfer_params import prefill_request
from tests.api.scripted import ScriptedWorker
from tests.api.serving import Front
from tests.api.test_requests import refusal

TALK = {"messages": [{"role": "user", "content": "|x"}], "max_tokens": 1}
SOURCE = {"remote_kv_source": {"kv_request_id": "r1", "remote_host": "10.0.0.3", "remote_port": 7450}}


@pytest.fixture
def prefiller(tmp_path: Path) -> Iterator[Front]:
    worker = ScriptedWorker(tmp_path / "worker.sock")
    with Front(tmp_path, worker=worker, kv_address=Address("10.0.0.2", 7450)) as front:
        yield front


def asked_of(front: Front) -> list[bool]:
    assert front.worker is not None
    return [ask.settled for ask in front.worker.asked]


def test_a_prefill_is_answered_with_where_its_kv_is_once_the_store_has_it(prefiller: Front) -> None:
    params = {"kv_transfer_params": prefill_request()}
    for answer in (
        prefiller.complete("|x", **params | {"max_tokens": 1}), prefiller.post("/v1/chat/completions", TALK | params)
    ):  # fmt: skip
        told = answer.json()["kv_transfer_params"]
        assert told["do_remote_prefill"] is True and told["do_remote_decode"] is False
        assert (told["remote_host"], told["remote_port"]) == ("10.0.0.2", 7450)
        # The decode worker takes that answer as it is.
        assert prefiller.complete("|x", kv_transfer_params=told).status_code == 200
    assert asked_of(prefiller) == [True, True, False, False]


def test_a_prefill_by_name_goes_on_under_that_name(prefiller: Front) -> None:
    answer = prefiller.complete("|x", kv_transfer_params={"remote_decoder": {"kv_request_id": "r1"}})
    where = {"kv_request_id": "r1", "remote_host": "10.0.0.2", "remote_port": 7450}
    assert answer.json()["kv_transfer_params"] == {"remote_prefiller": where}


def test_a_host_that_serves_no_peers_answers_without_them(front: Front) -> None:
    answer = front.complete("|x", kv_transfer_params=prefill_request())
    assert answer.status_code == 200 and "kv_transfer_params" not in answer.json()
    assert asked_of(front) == [False], "nobody can fetch it, so nobody waits for the store"


@pytest.mark.parametrize("params", [None, {}, SOURCE, {"do_remote_decode": False, "do_remote_prefill": False}])
def test_a_request_that_will_not_be_fetched_waits_for_nothing(prefiller: Front, params: Any) -> None:
    answer = prefiller.complete("|x", kv_transfer_params=params)
    assert answer.status_code == 200 and "kv_transfer_params" not in answer.json()
    assert asked_of(prefiller) == [False]


@pytest.mark.parametrize(
    "params",
    [7, [], {"do_remote_decode": True, "do_remote_prefill": True}, {"remote_prefiller": {"kv_request_id": "r1"}},
     {"remote_kv_source": {"remote_host": "h", "remote_port": 1 << 20}}, SOURCE | {"do_remote_decode": True}],
)  # fmt: skip
def test_what_says_no_such_thing_is_refused_by_name(prefiller: Front, params: Any) -> None:
    assert refusal(prefiller.complete("|x", kv_transfer_params=params))["param"] == "kv_transfer_params"
    assert asked_of(prefiller) == []


def test_who_named_another_party_is_counted(prefiller: Front) -> None:
    prefiller.complete("|x", kv_transfer_params=prefill_request())
    prefiller.complete("|x", kv_transfer_params=SOURCE)
    text = web.get(f"http://127.0.0.1:{prefiller.port}/metrics").text
    assert 'forebay_transfer_requests_total{party="decoder"} 1.0' in text
    assert 'forebay_transfer_requests_total{party="source"} 1.0' in text
