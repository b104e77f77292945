"""What a request may say, what it is told if it says something else, and what reaches the worker."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import pytest

from forebay.testing import web
from forebay.workers.api.http import BODY_BYTES_MAX
from tests.api.codec import BOS, VOCAB
from tests.api.scripted import CONTEXT, ScriptedWorker
from tests.api.serving import Front


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer, in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"), ("skip_special_tokens", False), ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a+"}),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(front: Front, field: str, value: Any) -> None:
    assert front.worker is not None
    front.replace_worker(ScriptedWorker(front.worker.path, guided=False))
    front.wait_until(lambda: front.fleet.description is not None and not front.fleet.description.guided)
    assert refusal(front.complete("|x", **{field: value}))["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0), ("frequency_penalty", 0.0), ("logit_bias", None), ("echo", False), ("best_of", 1),
        ("user", "me"), ("metadata", {"a": "b"}), ("store", False), ("service_tier", "auto"), ("suffix", None),
        ("no_stop_trim", False), ("skip_special_tokens", True), ("return_hidden_states", False),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_ignored(front: Front, field: str, value: Any) -> None:
    assert front.complete("|x", **{field: value}).json()["choices"][0]["text"] == "x"


def test_a_misspelt_parameter_is_refused_by_name(front: Front) -> None:
    error = refusal(front.complete("|x", temprature=0))
    assert error["param"] == "temprature" and "temprature" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 10**12), ("max_tokens", "many"), ("max_tokens", 1.5),
        ("temperature", -0.1), ("temperature", 1e9), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("n", 0), ("n", 1000),
        ("seed", 2**64), ("logprobs", -1), ("logprobs", 100), ("stop", [""]), ("stop", ["x"] * 17), ("stop", 5),
        ("stream", "yes"), ("cache_salt", "x" * 1000), ("presence_penalty", 2.5), ("frequency_penalty", -3),
        ("repetition_penalty", 0), ("min_p", 1.1), ("min_tokens", 101), ("logit_bias", {"x": 1}), ("best_of", 0),
        ("logit_bias", {"5": 101}), ("logit_bias", {"100000": 1}), ("logit_bias", {"5": "a"}), ("best_of", 17),
        ("stop_token_ids", [100000]), ("prompt_logprobs", -1), ("priority", 101), ("priority", "high"),
        ("response_format", {"type": "xml"}), ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ],
)  # fmt: skip
def test_negative_absurd_and_mistyped_values_are_refused_by_name(front: Front, field: str, value: Any) -> None:
    error = refusal(front.complete("|x", **{field: value}))
    assert error["param"] == field and field in error["message"]


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", '"text"', "null", '{"prompt": "x", "temperature": NaN}', '{"prompt": "x", "temperature": 1e999}',
     '{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', "{}"],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(front: Front, body: str | bytes) -> None:
    refusal(front.post("/v1/completions", body))


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], ["|x", ""], [1, "x"], ["x", 1], [-1], [1.5], [True], [2**40], [None], {"a": 1}, None, 7,
     [VOCAB], [[1], [VOCAB]], ["x"] * 65],
)  # fmt: skip
def test_a_prompt_that_is_none_is_refused(front: Front, prompt: Any) -> None:
    assert refusal(front.complete(prompt))["param"] == "prompt"


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(front: Front) -> None:
    error = refusal(front.complete([5] * CONTEXT))
    assert error["code"] == "context_length_exceeded" and str(CONTEXT) in error["message"]


def test_more_tokens_than_the_context_has_left_are_refused(front: Front) -> None:
    assert refusal(front.complete([5] * (CONTEXT - 10), max_tokens=11))["param"] == "max_tokens"
    assert front.complete([5] * (CONTEXT - 10), max_tokens=10).status_code == 200


def test_a_full_prompt_without_max_tokens_gets_what_is_left(front: Front) -> None:
    answer = front.post("/v1/completions", {"prompt": [ord("|") + 2] + [70] * (CONTEXT - 4)})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_body_over_the_limit_is_too_large(front: Front) -> None:
    error = refusal(front.post("/v1/completions", b" " * (BODY_BYTES_MAX + 1)), 413)
    assert error["code"] == "body_too_large"


def test_a_text_gets_its_beginning_and_token_ids_are_taken_as_they_are(front: Front) -> None:
    front.complete("|x")
    front.complete([70, 71])
    assert front.worker is not None
    first, second = (ask.prompt for ask in front.worker.asked)
    assert first[:4] == BOS.to_bytes(4, "little") and second == b"F\0\0\0G\0\0\0"


def test_sampling_reaches_the_worker(front: Front) -> None:
    front.complete("|x", temperature=0.5, top_p=0.9, top_k=40, seed=-7, ignore_eos=True, max_tokens=3, logprobs=0)
    assert front.worker is not None
    sampling = front.worker.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 40, 3)
    assert sampling.seed == -7 % 2**63 and sampling.ignore_eos and sampling.logprobs == 0


def test_adjustments_and_priority_reach_the_worker(front: Front) -> None:
    given: dict[str, Any] = {
        "presence_penalty": -0.5, "frequency_penalty": 1, "repetition_penalty": 1.1, "min_p": 0.05, "min_tokens": 2,
        "stop_token_ids": [7, 9],
    }  # fmt: skip
    front.complete("|x", logit_bias={"5": -100, "70": 1.5}, priority=-3, **given)
    assert front.worker is not None
    (ask,) = front.worker.asked
    assert {name: getattr(ask.sampling, name) for name in given} == given
    assert ask.sampling.logit_bias == {5: -100.0, 70: 1.5} and ask.priority == -3


def test_stop_strings_count_from_the_minimum_on(front: Front) -> None:
    for least, text in ((0, "a"), (2, "a"), (3, "a.b"), (4, "a.b"), (5, "a.b.c")):
        answer = front.complete("|a.b.c", stop=["."], min_tokens=least).json()["choices"][0]
        assert answer["text"] == text, least


def test_a_tokens_of_the_requests_own_ends_its_text(front: Front) -> None:
    choice = front.complete("|abc", stop_token_ids=[ord("c") + 2], ignore_eos=True, max_tokens=4).json()["choices"][0]
    assert choice["text"] == "ab", "the worker goes on; what ends the answer is no text"


def test_a_seed_is_drawn_at_admission_if_there_is_none(front: Front) -> None:
    front.complete("|x")
    front.complete("|x")
    assert front.worker is not None
    first, second = (ask.sampling.seed for ask in front.worker.asked)
    assert first != second and min(first, second) >= 0


def test_choices_share_a_seed_and_begin_after_the_first_one_has(front: Front) -> None:
    assert front.worker is not None
    front.worker.pace_s = 0.05
    answer = front.complete("|abc", n=3)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["abc"] * 3
    asked = front.worker.asked
    assert [ask.sampling.choice for ask in asked] == [0, 1, 2] and len({ask.sampling.seed for ask in asked}) == 1


def test_token_ids_are_told_if_asked_for(front: Front) -> None:
    choice = front.complete("|ab", return_token_ids=True).json()["choices"][0]
    assert choice["token_ids"] == [ord("a") + 2, ord("b") + 2, 0]


def test_token_ids_of_characters_that_are_not_whole_yet_are_streamed_at_once(front: Front) -> None:
    ids: list[int] = []
    with web.stream(
        "POST", f"{front.url}/v1/completions", json={"prompt": "|ü", "stream": True, "return_token_ids": True}
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                ids += httpx.Response(200, content=line[6:]).json()["choices"][0]["token_ids"]
    assert ids == [byte + 2 for byte in "ü".encode()] + [0]


def test_no_model_means_the_one_that_is_there(front: Front) -> None:
    assert front.complete("|x").json()["model"] == "scripted"


def test_an_unknown_path_and_a_wrong_method_are_told_in_the_same_shape(front: Front) -> None:
    refusal(front.get("/v1/nothing"), 404)
    refusal(front.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]), ("response_format", {"type": "yaml"}), ("tool_choice", "required"),
        ("tools", [{"type": "search", "function": {"name": "f"}}]), ("functions", [{"name": "f"}]),
    ],
)  # fmt: skip
def test_chat_refuses_what_it_does_not_do(front: Front, field: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "|x"}], field: value}
    assert refusal(front.post("/v1/chat/completions", body))["param"] == field


def test_chat_takes_texts_only(front: Front) -> None:
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    assert refusal(front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]}))
    assert refusal(front.post("/v1/chat/completions", {"messages": []}))["param"] == "messages"


def test_tokenize_and_detokenize_are_inverse(front: Front) -> None:
    told = front.post("/tokenize", {"prompt": "grüße"}).json()
    assert told["count"] == len(told["tokens"]) == 8 and told["max_model_len"] == CONTEXT
    assert front.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "grüße"}
    assert front.post("/tokenize", {"prompt": "x", "add_special_tokens": False}).json()["tokens"] == [ord("x") + 2]
    chat = front.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["count"] == len("user: x\nassistant:")


def test_detokenize_refuses_ids_that_no_token_has(front: Front) -> None:
    assert refusal(front.post("/detokenize", {"tokens": [VOCAB]}))["param"] == "tokens"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"x","user":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"x","max_tokens":' + b"9" * 400 + b"}",
        b'{"prompt":"x","top_k":' + b"9" * 400 + b"}",
        b'{"prompt":"x","temperature":1e999}',
    ],
)
def test_bodies_that_are_made_to_hurt_are_a_client_error(front: Front, raw: bytes) -> None:
    answer = web.post(f"{front.url}/v1/completions", content=raw, timeout=30)
    refusal(answer)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error_of_ours(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    until = time.monotonic() + 60
    while 'status="499"' not in front.get("/metrics").text:
        assert time.monotonic() < until, "the abandoned request isn't counted as one"
        time.sleep(0.05)
    assert "Traceback" not in caplog.text and "failed" not in caplog.text
