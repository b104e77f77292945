"""Several answers of which the best are told, prompts that are told with their likelihood, names, and a clean end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.workers.api import service
from tests.api.codec import BOS, VOCAB
from tests.api.scripted import ScriptedWorker
from tests.api.serving import Front
from tests.api.test_failover import TEXT, Reader
from tests.api.test_requests import refusal

# --- the best of several -----------------------------------------------------------------------------------


def test_the_likeliest_of_several_answers_are_told_best_first(front: Front) -> None:
    """The scripted worker's choices have a logprob of -0.5, -1.5 and -2.5 a token, in turn."""
    body = front.complete("|abc", n=3, best_of=5, logprobs=0).json()
    logprobs = [choice["logprobs"]["token_logprobs"][0] for choice in body["choices"]]
    assert logprobs == [-0.5, -0.5, -1.5] and [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 5 * 4, "all five were generated"
    assert front.worker is not None
    asked = front.worker.asked
    assert [ask.sampling.choice for ask in asked] == [0, 1, 2, 3, 4] and len({ask.sampling.seed for ask in asked}) == 1


def test_they_are_ranked_though_nobody_asked_for_logprobs(front: Front) -> None:
    choice = front.complete("|abc", best_of=3).json()["choices"][0]
    assert choice["logprobs"] is None
    assert front.worker is not None and all(ask.sampling.logprobs == 0 for ask in front.worker.asked)


def test_each_prompt_has_its_own_best(front: Front) -> None:
    choices = front.complete(["|one", "|two"], best_of=3).json()["choices"]
    assert [choice["text"] for choice in choices] == ["one", "two"]


def test_what_is_best_is_not_known_in_mid_stream(front: Front) -> None:
    assert refusal(front.complete("|x", best_of=2, stream=True))["param"] == "best_of"
    assert refusal(front.complete("|x", n=3, best_of=2))["param"] == "best_of"


# --- prompts -----------------------------------------------------------------------------------------------


def test_prompt_logprobs_tell_each_token_and_the_likeliest_by_id(front: Front) -> None:
    choice = front.complete("a|b", prompt_logprobs=1).json()["choices"][0]
    told, ids = choice["prompt_logprobs"], [BOS, *(ord(letter) + 2 for letter in "a|b")]
    assert told[0] is None and len(told) == 4
    for token, entry in zip(ids[1:], told[1:], strict=True):
        assert entry[str(token)]["logprob"] == -0.5 and entry[str(token)]["rank"] == 2
        assert entry[str((token + 1) % VOCAB)] | {"decoded_token": ""} == {
            "logprob": -0.25, "rank": 1, "decoded_token": "",
        }  # fmt: skip
    assert told[1][str(ids[1])]["decoded_token"] == "a"


def test_they_are_asked_of_the_first_choice_and_told_by_all(front: Front) -> None:
    choices = front.complete("a|b", prompt_logprobs=0, n=2).json()["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    assert front.worker is not None
    assert [ask.sampling.prompt_logprobs for ask in front.worker.asked] == [0, None]
    chat = {"messages": [{"role": "user", "content": "|x"}], "prompt_logprobs": 2}
    assert len(front.post("/v1/chat/completions", chat).json()["prompt_logprobs"]) == len("user: |x\nassistant:")


def test_an_echo_puts_the_prompt_before_the_answer(front: Front) -> None:
    choice = front.complete("say|hi", echo=True, return_token_ids=True).json()["choices"][0]
    assert choice["text"] == "say|hihi" and len(choice["token_ids"]) == 3


def test_an_echo_with_logprobs_scores_the_prompt_too(front: Front) -> None:
    logprobs = front.complete([ord("a") + 2, ord("|") + 2, ord("b") + 2], echo=True, logprobs=1).json()["choices"][0]
    told = logprobs["logprobs"]
    assert told["tokens"] == ["a", "|", "b", "b", "<end>"] and told["token_logprobs"] == [None, *[-0.5] * 4]
    assert told["text_offset"] == [0, 1, 2, 3, 4] and told["top_logprobs"][:2] == [None, {"}": -0.25}]


def test_what_is_told_of_a_prompt_is_bounded(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_PROMPT_SCORES", 300)
    assert front.complete([5] * 100, prompt_logprobs=2).status_code == 200
    assert refusal(front.complete([5] * 101, prompt_logprobs=2))["param"] == "prompt_logprobs"
    assert front.complete([5] * 101, prompt_logprobs=1).status_code == 200


def test_neither_is_streamed(front: Front) -> None:
    for field, value in (("echo", True), ("prompt_logprobs", 0)):
        assert refusal(front.complete("|x", stream=True, **{field: value}))["param"] == field


# --- schemas -----------------------------------------------------------------------------------------------


def grammar(front: Front, **more: Any) -> str:
    pytest.importorskip("llguidance", reason="the extra `guided` isn't installed")
    answer = front.complete("|x", **more)
    assert answer.status_code == 200, answer.text
    assert front.worker is not None
    return front.worker.asked[-1].sampling.grammar


def test_schemas_reach_the_worker_as_grammars(front: Front) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert '"integer"' in grammar(front, response_format=form)
    assert grammar(front, response_format=form) == grammar(front, structured_outputs={"json": schema})
    assert "json_schema" in grammar(front, response_format={"type": "json_object"})
    assert "ab?" in grammar(front, structured_outputs={"regex": "ab?c"})
    assert "yes" in grammar(front, structured_outputs={"choice": ["yes", 'n"o']})
    assert "digit" in grammar(front, structured_outputs={"grammar": "start: digit+\ndigit: /[0-9]/"})
    assert grammar(front, response_format={"type": "text"}) == "" == grammar(front)


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "fruit"}}, {"json": "not json"}, {"json": 5}, {"regex": "("}, {"choice": []},
        {"choice": [""]}, {"grammar": "start: nothing"}, {"json": {"enum": ["x" * 70_000]}},
    ],
)  # fmt: skip
def test_a_schema_that_is_none_is_refused_at_once(front: Front, wanted: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="the extra `guided` isn't installed")
    assert refusal(front.complete("|x", structured_outputs=wanted))["param"] == "structured_outputs"
    assert front.worker is not None and not front.worker.asked


# --- names -------------------------------------------------------------------------------------------------


def test_a_clients_name_for_its_request_is_in_the_answer_the_worker_and_the_log(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for stream in (False, True):
            body = {"prompt": "|abc", "stream": stream}
            answer = front.post("/v1/completions", body, headers={"X-Request-Id": "job-7/a"})
            assert answer.headers["x-request-id"] == "cmpl-job-7/a" and '"id":"cmpl-job-7/a"' in answer.text
    assert front.worker is not None
    first, second = (ask.id for ask in front.worker.asked)
    assert first.startswith("cmpl-job-7/a.0.") and first != second, "what a client repeats is still two requests"
    front.wait_until(lambda: caplog.text.count("cmpl-job-7/a: 5 prompt tokens (0 cached), 4 output tokens") == 2)


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "a\tb", "ü"])
def test_a_name_that_logs_can_not_show_is_replaced(front: Front, name: str) -> None:
    answer = front.post("/v1/completions", {"prompt": "|x"}, headers={"X-Request-Id": name.encode()})
    assert answer.status_code == 200 and len(answer.headers["x-request-id"]) == len("cmpl-") + 24


def test_requests_with_priority_are_not_put_before_other_tenants(front: Front) -> None:
    assert front.complete("|x", priority=-100).status_code == 200
    assert refusal(front.complete("|x", priority=-101))["param"] == "priority"


# --- anything --------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5),
    st.lists(st.integers(-1, 400), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(-200, 200), max_size=3),
    st.sampled_from(["auto", "required", {"type": "json_schema"}, {"type": "json_object"}, {"choice": ["a"]},
                     {"regex": "["}, [{"type": "function", "function": {"name": "f"}}]]),
)  # fmt: skip
FIELDS = [
    "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "best_of", "n",
    "stop_token_ids", "prompt_logprobs", "priority", "response_format", "structured_outputs", "tools", "tool_choice",
    "parallel_tool_calls", "echo", "logprobs", "stream",
]  # fmt: skip


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_fields_hold_the_answer_is_one_or_names_what_is_wrong(front: Front, data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
    for path, body in (
        ("/v1/completions", {"prompt": "|ab", "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "|ab"}], "max_tokens": 5}),
    ):
        answer = front.post(path, body | fields)
        assert answer.status_code in (200, 400), (answer.status_code, fields, answer.text)
        assert answer.status_code == 200 or answer.json()["error"]["message"]


# --- the end -----------------------------------------------------------------------------------------------


def ask_until_refused(front: Front) -> None:
    """What is accepted in the moment of the signal is still answered."""
    while True:
        try:
            front.get("/health")
        except httpx.TransportError:
            return


def test_a_server_that_stops_finishes_its_streams_and_takes_no_new_ones(tmp_path: Path) -> None:
    worker = ScriptedWorker(tmp_path / "worker.sock", pace_s=0.03)
    with Front(tmp_path, worker=worker, shutdown_s=20.0) as front:
        reader = Reader(front, "|" + TEXT)
        front.wait_until(lambda: len(reader.ids) > 3)
        front.stop()
        ask_until_refused(front)
        reader.done()
        assert reader.text == TEXT and reader.finish == "stop" and not reader.errors


def test_a_stream_that_takes_longer_than_that_is_told(tmp_path: Path) -> None:
    worker = ScriptedWorker(tmp_path / "worker.sock", hold=5)
    with Front(tmp_path, worker=worker, shutdown_s=0.2) as front:
        reader = Reader(front, "|" + TEXT)
        front.wait_until(lambda: len(reader.ids) == 5)
        front.stop()
        reader.done()
        assert reader.text == TEXT[:5] and "the server stops" in reader.errors[0]["message"]
        front.wait_until(lambda: not front.fleet.calls)
