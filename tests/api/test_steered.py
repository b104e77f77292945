"""Steered answers by real processes on a tiny model: those of transformers, and the same after a worker's death."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forebay.testing import web
from forebay.testing.cluster import Cluster
from tests.checkpoints import EOS_ID, VOCAB, tiny_qwen3

TEMPLATE = (
    "{% if tools %}Call tools so: <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SCHEMA = {
    "type": "object", "required": ["kind", "counts"], "additionalProperties": False,
    "properties": {
        "kind": {"enum": ["apple", "pear", "plum"]},
        "counts": {
            "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 4, "maxItems": 4,
        },
    },
}  # fmt: skip
PROMPT = [(13 * number) % (VOCAB - 10) + 5 for number in range(70)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("llguidance", reason="the extra `guided` isn't installed")
    folder = tmp_path_factory.mktemp("steered")
    cluster = Cluster(folder, tiny_qwen3(folder / "model", chat_template=TEMPLATE), threads=1)
    cluster.start_store()
    start_worker(cluster)
    cluster.start_frontend("front", "worker")
    yield cluster
    cluster.stop()


def start_worker(cluster: Cluster) -> None:
    cluster.start_worker("worker", extra=("--structured-outputs", "--trace", f"{cluster.folder}/trace.json"))


def replace_worker(cluster: Cluster, number: int) -> None:
    cluster.processes["worker"].end(number)
    start_worker(cluster)
    cluster.wait_healthy("front", watch=[cluster.processes["worker"]])


def stream(cluster: Cluster, body: dict[str, Any], kill_after: int | None = None) -> list[int]:
    """Token ids of a streamed answer; its worker is killed, and another one started, after that many."""
    ids: list[int] = []
    url = f"{cluster.url('front')}/v1/completions"
    with web.stream("POST", url, json=body | {"stream": True}, timeout=120) as got:
        assert got.status_code == 200
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            ids += [token for choice in event["choices"] for token in choice["token_ids"]]
            if kill_after is not None and len(ids) >= kill_after:
                kill_after = None
                cluster.processes["worker"].end(signal.SIGKILL)
                start_worker(cluster)
    return ids


def loaded(cluster: Cluster) -> Any:
    model = AutoModelForCausalLM.from_pretrained(cluster.model, dtype=torch.float64, attn_implementation="eager")
    return model.eval()


def test_penalised_greedy_answers_are_those_of_transformers(cluster: Cluster) -> None:
    model = loaded(cluster)
    settings = {"repetition_penalty": 1.3, "min_new_tokens": 40}
    expected = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), do_sample=False,
        max_new_tokens=40, eos_token_id=EOS_ID, pad_token_id=0, **settings,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    got = cluster.complete("front", PROMPT, 40, repetition_penalty=1.3, min_tokens=40, ignore_eos=False)
    assert got.token_ids == expected
    assert got.token_ids != cluster.complete("front", PROMPT, 40).token_ids


def test_a_prompts_logprobs_are_those_of_transformers(cluster: Cluster) -> None:
    body = cluster.body(PROMPT, 2, prompt_logprobs=3)
    told = web.post(f"{cluster.url('front')}/v1/completions", json=body, timeout=60).json()["choices"][0]
    with torch.inference_mode():
        expected = torch.log_softmax(loaded(cluster)(torch.tensor([PROMPT])).logits[0], -1)
    assert told["prompt_logprobs"][0] is None and len(told["prompt_logprobs"]) == len(PROMPT)
    for at, entry in enumerate(told["prompt_logprobs"][1:], 1):
        row = expected[at - 1]
        mine = entry[str(PROMPT[at])]
        assert mine["logprob"] == pytest.approx(float(row[PROMPT[at]]), abs=1e-5)
        assert mine["rank"] == 1 + int((row > row[PROMPT[at]]).sum())
        best = row.topk(3)
        for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-5)


def test_an_answer_of_a_schema_is_the_same_cold_from_the_store_and_after_a_death(cluster: Cluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    body = cluster.body(PROMPT[::-1], 300, response_format=form, ignore_eos=False)
    cold = stream(cluster, body)
    cluster.settle("front")
    replace_worker(cluster, signal.SIGKILL)
    hit = cluster.complete("front", PROMPT[::-1], 300, response_format=form, ignore_eos=False)
    assert hit.cached_tokens == 64 and hit.token_ids == cold
    answer = json.loads(hit.text)
    assert answer["kind"] in ("apple", "pear", "plum") and len(answer["counts"]) == 4
    assert all(0 <= count <= 99 for count in answer["counts"])
    assert stream(cluster, body, kill_after=len(cold) // 2) == cold


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_penalised_answer_goes_on_after_a_death_as_if_it_had_not_been(cluster: Cluster, temperature: float) -> None:
    more = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1, "min_p": 0.02, "seed": 11}
    body = cluster.body(PROMPT, 60, logit_bias={"9": -100}, **more) | {"temperature": temperature}
    whole = stream(cluster, body)
    assert len(whole) == 60 and 9 not in whole
    assert stream(cluster, body, kill_after=25) == whole


def test_several_answers_compute_their_prompt_once(cluster: Cluster) -> None:
    before = cluster.figures("front")["forebay_worker_tokens_prefilled"]
    body = cluster.body([*PROMPT[5:], *PROMPT], 4, n=4, best_of=6) | {"temperature": 0.7, "seed": 1}
    answer = web.post(f"{cluster.url('front')}/v1/completions", json=body, timeout=60).json()
    assert len(answer["choices"]) == 4 and answer["usage"]["completion_tokens"] == 24
    computed = cluster.figures("front")["forebay_worker_tokens_prefilled"] - before
    whole, beyond_whole_units = 135, 135 - 128
    assert computed == whole + 5 * beyond_whole_units


def test_a_call_that_must_be_made_is_made(cluster: Cluster) -> None:
    parameters = {
        "type": "object", "properties": {"city": {"enum": ["Bern", "Chur"]}}, "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = {
            "messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice, "temperature": 0,
            "max_tokens": 200, "parallel_tool_calls": False,
        }  # fmt: skip
        answer = web.post(f"{cluster.url('front')}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "weather" and answer["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"])["city"] in ("Bern", "Chur")


def test_its_trace_is_left_when_the_worker_stops(cluster: Cluster) -> None:
    """Last: it stops the worker."""
    assert cluster.processes["worker"].end(signal.SIGTERM) == 0
    events = json.loads((cluster.folder / "trace.json").read_text())["traceEvents"]
    assert {"step", "forward", "decode"} <= {event["name"] for event in events}
    start_worker(cluster)
